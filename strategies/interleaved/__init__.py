"""Interleaved 1F1B: several stages per rank."""

from lightning_pipes.strategies.interleaved.schedule import Interleaved

__all__ = ["Interleaved"]
