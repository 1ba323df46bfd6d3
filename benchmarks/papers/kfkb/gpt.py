"""Real GPTs of two stages in place of emulated ones, for steps over really shaped links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from benchmarks.engine import Cell, gpt_parts, make_stages
from benchmarks.papers.kfkb.links import Trial
from lightning_pipes.engine import Item, Stage
from lightning_pipes.ir import Plan, Span
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


@dataclass(frozen=True)
class WideGPT(Trial):
    """A GPT whose blocks are 256 wide, four a stage, two samples of 96 tokens a micro-batch."""

    WIDTH: ClassVar[int] = 256
    TOKENS: ClassVar[int] = 96
    FORWARD: ClassVar[float] = 0.016
    """Seconds of a stage's forward, about."""
    MESSAGE: ClassVar[int] = 2 * TOKENS * WIDTH * 4

    @property
    def plan(self) -> Plan:
        """The same for all schedules."""
        plan = Plan.even(self.stages, self.microbatches, 2 * self.microbatches)
        return replace(plan, layers=even_partition([1.0] * self.stages, self.stages))

    def stages_on(self, rank: int) -> list[Stage]:
        """Those that a rank runs, with a thread."""
        torch.set_num_threads(1)
        parts = gpt_parts(self.stages, self.WIDTH)
        torch.manual_seed(1)
        x, target = torch.randint(256, (2, 2 * self.microbatches, self.TOKENS))

        def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
            out = stage.run_layers(item, span, x[span.start : span.stop] if received is None else received)
            if stage.number < self.stages - 1:
                return out
            return nn.functional.cross_entropy(out, target[span.start : span.stop]) * (span.rows / item.rows)

        return [Stage(rank, {rank: parts[rank]}, body)]
