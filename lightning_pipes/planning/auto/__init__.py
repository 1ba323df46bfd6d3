"""Choose a schedule, the number of micro-batches, and recomputation by simulating measured layers."""

from lightning_pipes.planning.auto.choice import Choice, Option, installed_variants
from lightning_pipes.planning.auto.search import AutoPlanner, choose_option

__all__ = ["AutoPlanner", "Choice", "Option", "choose_option", "installed_variants"]
