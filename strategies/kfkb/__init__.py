"""kFkB: the schedule of Ada-Grouper."""

from lightning_pipes.strategies.kfkb.schedule import KFKB

__all__ = ["KFKB"]
