"""Losses, logs, returned values and stored values of micro-batches, and their merging to those of a batch."""
