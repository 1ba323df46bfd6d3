"""Verification of the first batches of a training against one plain process of Lightning."""
