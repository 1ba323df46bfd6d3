"""The costs of stages and links in the last batches, from all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Kind, Plan, Program
from lightning_pipes.planning.measured import Averages, StepSample
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.reports.report import Window


def seen_costs(windows: Sequence[Window], control: Control, plan: Plan) -> CostModel | None:
    """The average costs of the last batches with `plan`; None where there were not two of them. Collective.

    Args:
        windows: of this rank.
        control: of all ranks of the pipeline.
    """
    own = [window for window in windows if window.plan is plan]
    rounds = control.all_gather([sample_of(*pair) for pair in pairwise(own)])
    averages = Averages()
    for step in zip(*rounds, strict=True):
        averages.add(step)
    return averages.costs() if rounds[0] else None


def sample_of(before: Window, window: Window) -> StepSample:
    """The sample of this rank's `window`, which came after another one."""
    ended = max((e.end for e in before.events if e.instruction.kind in (Kind.B, Kind.I)), default=0)
    return StepSample.of(window.events, window.plan, ended, chosen=not isinstance(window.order, Program))
