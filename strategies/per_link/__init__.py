"""1F1B with a longer warm-up over slow links."""

from lightning_pipes.strategies.per_link.schedule import PerLink, extra_for, forwards_ahead, warmed_up

__all__ = ["PerLink", "extra_for", "forwards_ahead", "warmed_up"]
