"""Ranks find each other, and nobody waits for the dead."""
