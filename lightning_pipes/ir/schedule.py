"""What a schedule is: it orders a plan, in advance (Schedule) or while running (Policy)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from lightning_pipes.ir.errors import PlanError
from lightning_pipes.ir.instruction import Instruction, Kind
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.program import Program


@runtime_checkable
class Schedule(Protocol):
    """Turns a plan into a program. Frozen: its fields are its settings.

    What a plan has to be like before it can be ordered is said by attributes that a schedule may have:

    - `placement(n_ranks) -> tuple[int, ...]`, the rank of each stage; by default one stage a rank, in order.
    - `splits_backward`, whether backward runs as I and W; by default it does not.
    - `versions(plan) -> tuple[int, ...]`, the weight versions that may live on each stage; by default one. A schedule
      with more of them does not flush between batches: its program is endless.
    """

    @property
    def name(self) -> str:
        """The name under which people choose it."""

    def program(self, plan: Plan) -> Program:
        """Every compute instruction of the plan's window, one row a rank; transfers are added by `lower`.

        Raises:
            PlanError: the schedule can't order such a plan.
        """


@dataclass(frozen=True)
class RankView:
    """What one rank can see when a policy has to choose.

    Attributes:
        rank: the rank.
        last: what it ran last, None at the start.
        in_flight: samples between F and B, by stage; stages of other ranks are absent.
    """

    rank: int
    last: Instruction | None
    in_flight: dict[int, int]


@runtime_checkable
class Policy(Protocol):
    """Picks what a rank does next where the order is not fixed in advance.

    Frozen and without memory of its own, so that simulator and executor ask the same question and get the same
    answer.
    """

    @property
    def name(self) -> str:
        """The name under which people choose it."""

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        """One of `ready`, or None to wait for more.

        `ready` holds the compute instructions of this rank whose needs are met, sorted by `ready_key`: B, I, W and
        STEP before F, then by batch, job, stage and span; it is never empty. Returning None although nothing is on
        its way is a deadlock, and reported.
        """


def ready_key(i: Instruction) -> tuple[bool, int, int, int, tuple[int, int], str]:
    """Where `i` stands among the instructions that a policy may pick."""
    return i.kind is Kind.F, i.batch, i.job, i.stage, i.span, i.kind


def check_one_batch(plan: Plan, name: str, split_backward: bool = False) -> None:
    """Refuse a plan for a schedule that orders one batch of one job between two flushes.

    Raises:
        PlanError: the plan has several jobs, several batches, or a backward that is split where it should not be.
    """
    if len(plan.jobs) > 1 or plan.batches > 1 or plan.split_backward != split_backward:
        backwards = "backwards in two parts (I and W)" if split_backward else "full backwards (B)"
        raise PlanError(
            f"{name} orders one batch of one job with {backwards}; the plan has {len(plan.jobs)} jobs, "
            f"{plan.batches} batches and split_backward={plan.split_backward}"
        )


def check_placement(plan: Plan, schedule: Schedule) -> None:
    """Refuse a plan whose stages sit on other ranks than the schedule places them.

    Raises:
        PlanError: they do.
    """
    wanted = placement(schedule, plan.n_ranks)
    if plan.ranks != wanted:
        raise PlanError(f"{schedule.name} places stages on ranks {wanted}, the plan on {plan.ranks}")


def check_one_stage_a_rank(plan: Plan, name: str) -> None:
    """Refuse a plan for a schedule that runs one stage a rank, with the same spans forward and backward.

    Raises:
        PlanError: a rank has several stages, or a stage's backward is cut otherwise than its forward.
    """
    if plan.n_ranks != plan.n_stages:
        raise PlanError(
            f"{name} runs one stage a rank, the plan has {plan.n_stages} stages on {plan.n_ranks} ranks; "
            "for several stages a rank choose schedule 'interleaved'"
        )
    for stage in range(plan.n_stages):
        if plan.spans(Kind.B, stage) != plan.spans(Kind.F, stage):
            raise PlanError(f"{name} needs the same spans forward and backward; stage {stage} has others")


def prepared(plan: Plan, schedule: Schedule | Policy) -> Plan:
    """`plan` with the backward and the weight versions that the schedule asks for."""
    split = getattr(schedule, "splits_backward", False)
    if split != plan.split_backward:
        plan = replace(plan, split_backward=split)
    versions = getattr(schedule, "versions", None)
    return plan if versions is None else replace(plan, versions=tuple(versions(plan)))


def placement(schedule: Schedule | Policy, n_ranks: int) -> tuple[int, ...]:
    """The rank of each stage as the schedule wants it; one stage a rank, in order, unless it says otherwise."""
    place = getattr(schedule, "placement", None)
    return tuple(range(n_ranks)) if place is None else tuple(place(n_ranks))
