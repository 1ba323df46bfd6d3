"""The policy "ready": run instructions that are ready, within a limit of samples held by each stage."""

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
    """No fixed order: a rank runs any instruction that is ready.

    If a forward and a backward are both ready, the rank alternates between the two kinds. With `alternate=False`, it
    always runs the backward.

    A stage may hold `limits[s]` samples between F and B. The default limits are the limits of 1F1B, p - s micro-batches
    on stage s of p, plus up to `slack` micro-batches: `slack` on stage 0, none on the last stage, and even steps
    between them. A larger slack hides slower and less steady links.

    With `split`, the backward has two parts. The input gradients (I) take the place of the backward, and the weight
    gradients (W) run if nothing else is ready, or if there is no room for another forward. Samples are then held until
    W. By default, every stage may hold as many samples as the first stage, so that later stages can delay W.

    The forwards of a stage run in the order of micro-batches, and so do its backwards. Messages of a link arrive in the
    order in which they were sent, and the earliest of the messages that have arrived is used first. Results therefore
    do not depend on the timing. A deadlock is impossible, because backwards are never held back.

    Attributes:
        slack: the number of additional micro-batches on stage 0.
        limits: the number of samples that each stage may hold. If empty, `slack` determines it.
        alternate: whether a rank alternates between forwards and backwards.
        split: whether the backward is split into I and W.

    Raises:
        PlanError: slack is negative, `limits` does not have one number for each stage, or a limit is too small for one
            micro-batch.
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
            raise InputError(f"{self.name}: every number in limits must be at least 1, got {self.limits}")

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
        """Return the variants that a planner tries: whole backwards, and split backwards."""
        return [cls(), cls(split=True)]

    # Drawn by `step(Ready(), link=1)`:
    # rank 0 |0-1-2-3-..............0===..1===..2===..3===| bubble 45.5%
    # rank 1 |....0-1-2-......0===3-1===..2===..3===......| bubble 45.5%
    # rank 2 |........0-0===1-1===2-2===3-3===............| bubble 45.5%
    #         - forward  = backward  . idle
    def rule(self, plan: Plan) -> Rule:
        """Return the rule for this plan, with its limits in samples and its priorities.

        Raises:
            PlanError: the limits do not fit the plan, or the plan splits the backward and the policy does not, or vice
                versa.
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
    """Return the number of samples of the largest micro-batch of each stage."""
    return tuple(max(x.rows for cut in plan.jobs for x in cut.spans(Kind.F, s)) for s in range(plan.n_stages))


def check_limits(plan: Plan, name: str, limits: Sequence[int]) -> None:
    """Check that `plan` can run within `limits`.

    Args:
        plan: the plan of the stages.
        name: the name of the schedule, used in the error message.
        limits: the number of samples that each stage may hold.

    Raises:
        PlanError: there is not one limit for each stage, or a limit is too small for one micro-batch.
    """
    if len(limits) != plan.n_stages:
        raise PlanError(f"{name}: limits {tuple(limits)} are for {len(limits)} stages, the plan has {plan.n_stages}")
    for stage, (limit, rows) in enumerate(zip(limits, largest_rows(plan), strict=True)):
        if limit < rows:
            raise PlanError(
                f"{name}: stage {stage} may hold {limit} samples, but has a micro-batch of {rows}; raise its limit or "
                "use more micro-batches"
            )


def limits_for(plan: Plan, costs: Costs, memory_limit: Limit) -> tuple[int, ...]:
    """Return the largest number of samples that each stage may hold between F and B within `memory_limit`.

    Each limit is a number of whole micro-batches, and at most the batch. Memory for the computations of the stage is
    reserved. If forwards and backwards alternate, a larger limit is never slower, so this is the recommended limit.

    Args:
        plan: the plan, with one stage per rank.
        costs: the costs of its stages.
        memory_limit: the bytes of every rank, or one value for each rank.

    Raises:
        PlanError: a rank has several stages, or does not have memory for one micro-batch. In the second case, the
            message states the missing bytes.
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
