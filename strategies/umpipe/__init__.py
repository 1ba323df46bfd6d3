"""Unequal micro-batches for each stage, direction and link (UMPIPE)."""

from lightning_pipes.strategies.umpipe.network import Network, Scheme

__all__ = ["Network", "Scheme"]
