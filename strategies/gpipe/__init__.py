"""GPipe: fill, then drain."""

from lightning_pipes.strategies.gpipe.schedule import GPipe

__all__ = ["GPipe"]
