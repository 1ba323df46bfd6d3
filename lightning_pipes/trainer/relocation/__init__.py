"""Layers that change ranks: between two batches, or while batches go on."""
