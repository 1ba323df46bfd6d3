"""Ready first: whatever can run, under a limit of samples held."""

from lightning_pipes.strategies.ready.schedule import Ready

__all__ = ["Ready"]
