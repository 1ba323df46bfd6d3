"""1F1B with a longer warm-up that tapers."""

from lightning_pipes.strategies.deep.schedule import Deep, taper_slack

__all__ = ["Deep", "taper_slack"]
