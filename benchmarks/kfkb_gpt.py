"""A real GPT of two stages in place of emulated ones, for steps over really shaped links."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from engine import Cell, make_stages
from kfkb_links import Trial

from lightning_pipes.engine import Stage
from lightning_pipes.ir import Plan
from lightning_pipes.planning.partition import even_partition


@dataclass(frozen=True)
class GPT(Trial):
    """The GPT of `engine.py`, two samples a micro-batch; `forward` is what messages are measured in."""

    @property
    def cell(self) -> Cell:
        """What `engine.py` calls it."""
        return Cell("1f1b", self.stages, self.microbatches, "gpt")

    @property
    def plan(self) -> Plan:
        """The same for all schedules."""
        plan = Plan.even(self.stages, self.microbatches, self.cell.rows)
        return replace(plan, layers=even_partition([1.0] * self.stages, self.stages))

    def stages_on(self, rank: int) -> list[Stage]:
        """Those that a rank runs, with a thread."""
        torch.set_num_threads(1)
        return make_stages(self.cell, self.plan, rank)
