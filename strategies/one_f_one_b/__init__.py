"""1F1B: one forward, one backward."""

from lightning_pipes.strategies.one_f_one_b.schedule import OneFOneB

__all__ = ["OneFOneB"]
