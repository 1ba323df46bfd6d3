"""Unequal micro-batches for each stage, direction and link (UMPIPE)."""

from lightning_pipes.strategies.umpipe.network import Network, Scheme
from lightning_pipes.strategies.umpipe.schedule import UM1F1B, UMPipe

__all__ = ["UM1F1B", "Network", "Scheme", "UMPipe"]
