"""The loops that run batches through the pipeline."""
