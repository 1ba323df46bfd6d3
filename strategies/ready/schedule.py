"""Run ready instructions under a limit of samples held by each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from lightning_pipes.cost import Costs
from lightning_pipes.cost.units import bytes_text
from lightning_pipes.ir import InputError, Kind, Plan, PlanError, Rule, RulePolicy, check_fields, check_one_stage_a_rank
from lightning_pipes.planning.memory import stage_peak
from lightning_pipes.sim.loops.operations import Limit, limits_of
from lightning_pipes.strategies.deep import taper_slack


@dataclass(frozen=True)
class Ready(RulePolicy):
    """No fixed order: a rank runs whatever is ready. Where forward and backward both are, it takes the sort that it did
    not run last, or with `alternate` off the backward.

    A stage may hold `limits[s]` samples between F and B. By default these are 1F1B's, p - s micro-batches on stage s of
    p, and up to `slack` more: all of it on stage 0, none on the last one, in even steps between. More slack hides
    slower and less steady links.

    With `split` backward is in two parts: input gradients (I) count as the backward, and weight gradients (W) run where
    there is nothing else, or no room for another forward. Samples are held until W then, and by default every stage may
    hold as many as the first one, so that later stages can put more W off.

    Forwards of a stage run in the order of micro-batches, and so do backwards: messages of a link arrive in the order
    in which they were sent, and of what has arrived the earliest goes first. So numbers do not depend on what was ready
    when. It can't get stuck, for a backward is never held back.

    Raises:
        PlanError: negative slack; limits that are not one for each stage, or too small for one micro-batch.
    """

    slack: int = 2
    limits: tuple[int, ...] = ()
    alternate: bool = True
    split: bool = False
    name: ClassVar[str] = "ready"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.slack < 0:
            raise InputError(f"{self.name}: slack counts micro-batches from 0, got {self.slack}")
        if min(self.limits, default=1) < 1:
            raise InputError(f"{self.name}: limits count samples from 1, got {self.limits}")

    # Drawn by `step(Ready(split=True), link=1)`:
    # rank 0 |0-1-2-3-..........0+0~1+1~2+2~3+3~| bubble 29.4%
    # rank 1 |....0-1-2-3-..0+0~1+1~2+2~3+3~....| bubble 29.4%
    # rank 2 |........0-0+1-1+2-2+3-3+0~1~2~3~..| bubble 29.4%
    #         - forward  + input gradients  ~ weight gradients  . idle
    @property
    def splits_backward(self) -> bool:
        return self.split

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[Ready]:
        """Return the variants that a planner tries: with whole backwards and with split ones."""
        return [cls(), cls(split=True)]

    # Drawn by `step(Ready(), link=1)`:
    # rank 0 |0-1-2-3-..............0===..1===..2===..3===| bubble 45.5%
    # rank 1 |....0-1-2-......0===3-1===..2===..3===......| bubble 45.5%
    # rank 2 |........0-0===1-1===2-2===3-3===............| bubble 45.5%
    #         - forward  = backward  . idle
    def rule(self, plan: Plan) -> Rule:
        """Return the limits in samples for this plan, and what goes first.

        Raises:
            PlanError: limits that are not for it, or a backward that is split where it should not be.
        """
        if plan.split_backward != self.split:
            raise PlanError(f"{self.name} has split={self.split}, the plan split_backward={plan.split_backward}")
        return Rule(_limits(plan, self.slack, self.limits, self.split), self.alternate, weights_last=self.split)


@lru_cache(maxsize=64)
def _limits(plan: Plan, slack: int, given: tuple[int, ...], split: bool) -> tuple[int, ...]:
    if given:
        check_limits(plan, Ready.name, given)
        return given
    most = taper_slack(plan.n_stages, slack)
    rows = largest_rows(plan)
    return tuple(n * (most[0] if split else own) for n, own in zip(rows, most, strict=True))


def largest_rows(plan: Plan) -> tuple[int, ...]:
    """Return the samples of each stage's largest micro-batch."""
    return tuple(max(x.rows for cut in plan.jobs for x in cut.spans(Kind.F, s)) for s in range(plan.n_stages))


def check_limits(plan: Plan, name: str, limits: Sequence[int]) -> None:
    """Refuse limits under which `plan` can't run; says so of the schedule of that name.

    Raises:
        PlanError: they are not one for each stage, or too small for one micro-batch.
    """
    if len(limits) != plan.n_stages:
        raise PlanError(f"{name}: limits {tuple(limits)} are for {len(limits)} stages, the plan has {plan.n_stages}")
    for stage, (limit, rows) in enumerate(zip(limits, largest_rows(plan), strict=True)):
        if limit < rows:
            raise PlanError(
                f"{name}: stage {stage} may hold {limit} samples and has a micro-batch of {rows}; raise its limit or "
                "use more micro-batches"
            )


def limits_for(plan: Plan, costs: Costs, memory_limit: Limit) -> tuple[int, ...]:
    """Return the most samples that each stage may hold between F and B in `memory_limit` bytes a rank: whole
    micro-batches, at most the batch.

    More of it never hurts where forward and backward alternate, so this is the limit to take. What a stage needs while
    it computes is left free.

    Raises:
        PlanError: a rank holds several stages, or has no room for one micro-batch; says what is missing.
    """
    check_one_stage_a_rank(plan, "limits")
    found = []
    for stage, may in enumerate(limits_of(memory_limit, plan.n_ranks)):
        rows = max(span.rows for span in plan.spans(Kind.F, stage))
        one = stage_peak(plan, costs, stage, held=1)
        if one > may:
            raise PlanError(
                f"stage {stage} has {bytes_text(may)} and needs {bytes_text(one)} for one micro-batch of {rows} "
                f"samples: {bytes_text(one - may)} are missing; use more micro-batches, or recompute"
            )
        each = one - stage_peak(plan, costs, stage, held=0)
        more = (may - one) // each if each else plan.jobs[0].rows
        found.append(min(plan.jobs[0].rows, (1 + more) * rows))
    return tuple(found)
