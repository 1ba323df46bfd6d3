"""Checkpoints of a pipeline, and the position of a training in its data."""
