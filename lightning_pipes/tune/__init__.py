"""Hydra integration: validated settings and readable errors. Importing this package does not import torch."""
