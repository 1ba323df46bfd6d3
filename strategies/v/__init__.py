"""v(k): stages on a V with a limit of held activations, from a third of the memory of 1F1B to no bubble."""

from lightning_pipes.strategies.v.schedule import V

__all__ = ["V"]
