"""Rendezvous of ranks, and detection of failed ranks, so that no rank waits forever."""
