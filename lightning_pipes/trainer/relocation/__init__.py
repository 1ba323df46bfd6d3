"""Layers that move to other ranks, between two batches or while batches continue."""
