"""Zero bubble: weight gradients are computed when a rank would idle."""

from lightning_pipes.strategies.zero_bubble.schedule import ZeroBubble

__all__ = ["ZeroBubble"]
