"""Hydra: validated settings and readable errors. Importing this imports no torch."""
