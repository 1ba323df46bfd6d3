"""Checkpoints, and where training is in its data."""
