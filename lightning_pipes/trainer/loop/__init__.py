"""Batches through the pipeline."""
