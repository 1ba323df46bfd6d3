"""Choose schedule, micro-batches and recomputation by simulation of measured layers."""

from lightning_pipes.planning.auto.choice import Choice, Option
from lightning_pipes.planning.auto.options import installed_variants
from lightning_pipes.planning.auto.planner import AutoPlanner
from lightning_pipes.planning.auto.search import choose_option

__all__ = ["AutoPlanner", "Choice", "Option", "choose_option", "installed_variants"]
