"""1F1B with a longer warm-up that tapers."""

from lightning_pipes.strategies.deep.schedule import Deep, tapered

__all__ = ["Deep", "tapered"]
