"""Batches and their samples, and the data of a run."""
