"""GPipe: all forwards of a batch, then all backwards."""

from lightning_pipes.strategies.gpipe.schedule import GPipe

__all__ = ["GPipe"]
