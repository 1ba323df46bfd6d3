"""Rendezvous of ranks, and detection of dead ones, so that no rank waits forever."""
