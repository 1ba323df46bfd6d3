"""Optimizers of a rank, their parameters and the hooks of parameters."""
