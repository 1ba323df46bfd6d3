"""Planners: from a problem to the plan of a batch, everything but order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from lightning_pipes.cost import CostModel, Deployment, ModelProfile
from lightning_pipes.ir import Cut, Plan, PlanError, Policy, Schedule, Span, adapt_plan
from lightning_pipes.ir.replication import Seconds
from lightning_pipes.planning.replanning import FreeBytes, Observation

Relocation = Literal["blocking", "overlapped", "buffered"]
"""How layers move: while all ranks wait; or beside the batches, whose steps both ranks take, or which wait."""
RELOCATIONS: tuple[str, ...] = get_args(Relocation)
BLOCKING, OVERLAPPED, BUFFERED = RELOCATIONS
MICROBATCHES_PER_STAGE = 2
"""The default number of micro-batches for each stage."""


@dataclass(frozen=True)
class Problem:
    """Everything that a planner goes by.

    Attributes:
        schedule: orders the plan.
        ranks: of one pipeline, a device each.
        rows: samples of the batch.
        microbatches: pieces of the batch that were asked for; None where the planner decides.
        recompute: whether all stages but the last are to keep only their input.
        layers: of each stage, where that is decided; a plan then keeps to it.
        profile: seconds and bytes of the layers; None where they were not measured.
        deployment: devices, links and memory limits; None where they were not asked for.
        costs: what the stages and links of the plan that runs took in its last batches, for the sizes that they have;
            None before anything has run.
        observations: windows of the plan that runs, from one `replan` to the next, the oldest first; of another plan
            none.
        earlier_observations: windows of plans that ran before this one, the oldest first, each with its plan.
        remaining: batches that are left in the run; None where it is unknown.
        tied: numbers of layers that share a parameter: together in one stage they can go to another one together, and
            otherwise they stay.
        relocation: how layers would move.
        fallback: the layers of each stage to keep unless the planner knows a cut that is worth a change: an even one by
            parameters, or that of the running plan; empty for none.
        least: the fewest samples that a micro-batch is to have, where the batch has so many.
    """

    schedule: Schedule | Policy
    ranks: int
    rows: int
    microbatches: int | None = None
    recompute: bool = False
    layers: tuple[Span, ...] = ()
    profile: ModelProfile | None = None
    deployment: Deployment | None = None
    costs: CostModel | None = None
    observations: tuple[Observation, ...] = ()
    earlier_observations: tuple[tuple[Plan, Observation], ...] = ()
    remaining: int | None = None
    tied: tuple[tuple[int, ...], ...] = ()
    relocation: str = BLOCKING
    least: int = 1
    fallback: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Solution:
    """A problem in which nothing is open, and its plan.

    Attributes:
        problem: the one that was asked, with what the planner has decided in it: the layers, and where it chooses
            these, too, the schedule, the number of micro-batches and recomputation. For another batch, a schedule's
            own planner gets this problem with other `rows`.
        plan: of the batch, ordered by the schedule of `problem`.
        why: for people; empty where there was nothing to choose.
        table: what was compared, for people.
    """

    problem: Problem
    plan: Plan
    why: str = ""
    table: str = ""


class Planner(ABC):
    """Decides how batches are cut. A schedule names its planner by `make_planner()`.

    It has no memory of its own and draws no unseeded random numbers: every rank asks its own and gets the same plan.

    Attributes:
        every: training batches from one `replan` to the next; it is never asked where that is 0.
        wants_profile: whether layers are to be measured even where the user says how they are cut.
    """

    every: int = 0
    wants_profile: ClassVar[bool] = False

    @property
    def user_chose_microbatches(self) -> bool:
        """Whether the user has chosen how a batch is cut, so that the number of micro-batches is not open."""
        return False

    @abstractmethod
    def plan(self, problem: Problem) -> Plan:
        """Return the cuts of the batch, on the ranks where the schedule places its stages; `solve` adapts the plan.

        A batch of another size is another problem, as is the last one of an epoch.

        Raises:
            PlanError: there is no such plan.
        """

    def solve(self, problem: Problem) -> Solution:
        """Return the plan with the backward and the weight versions that its schedule asks for, and all that was
        decided for it. Layers that the planner has not cut are those of the problem, or its fallback.

        A planner that decides more than a plan overrides this; its `plan` keeps to the schedule of the problem.

        Raises:
            PlanError: there is no plan, or it is for other ranks, rows or layers than those of the problem.
        """
        schedule = problem.schedule
        plan = self.plan(problem)
        if not plan.layers:
            plan = replace(plan, layers=problem.layers or problem.fallback)
        where = schedule.place_stages(problem.ranks)
        for what, got, needed in (
            ("stages on ranks", plan.ranks, where),
            ("rows", tuple(cut.rows for cut in plan.jobs), (problem.rows,)),
            ("layers", plan.layers, problem.layers or plan.layers),
        ):
            if got != needed:
                raise PlanError(
                    f"the planner of schedule {schedule.name!r} planned for {what} {got}, asked for {needed}"
                )
        return Solution(replace(problem, layers=plan.layers), adapt_plan(plan, schedule))

    def explain_plan(self, problem: Problem, plan: Plan) -> str:
        """Return a sentence for people on why `plan`, which it made of the problem, cuts a batch as it does; empty
        where there is nothing to say."""
        return ""

    def profile_sizes(self, rows: int, stages: int, microbatches: int | None) -> tuple[int, ...]:
        """Return the numbers of samples for which times of layers are wanted before a batch of `rows` is planned; by
        default an even micro-batch and half of one."""
        one = -(-rows // (microbatches or MICROBATCHES_PER_STAGE * stages))
        return tuple(sorted({max(1, one // 2), one}))

    def most_rows(self, rows: int, stages: int, microbatches: int | None) -> int:
        """Return the most samples that a micro-batch of a batch of `rows` may get."""
        return max(self.profile_sizes(rows, stages, microbatches))

    @property
    def guards_memory(self) -> bool:
        """Whether `should_serialize` and `reduce_memory` are asked before every batch."""
        return False

    def should_serialize(self, free: Sequence[FreeBytes], serialized: bool) -> bool:
        """Return whether batches of a schedule that does not flush should run one by one for now.

        Args:
            free: before the last batches, the oldest first.
            serialized: the answer before the last batch.
        """
        return serialized

    def reduce_memory(self, plan: Plan, problem: Problem, free: FreeBytes) -> Plan | None:
        """Return a plan with which devices that are short of memory hold less, even if batches take longer; None to
        keep `plan`. It is asked where batches that run one by one have not helped."""
        return None

    def replan(self, plan: Plan, problem: Problem) -> Plan | None:
        """Return another plan for batches like that of `plan`, by observations of the run; None to keep it.

        Layers may be in other stages than in `plan`: they move before the next batch. Stages stay on their ranks.
        """
        return None

    def balance_shares(self, plan: Plan, problem: Problem) -> Seconds | None:
        """Return seconds by which the ranks of each stage are to share out samples; None to keep their shares.

        It is asked in place of `replan` where stages have several ranks.
        """
        return None


class EvenPlanner(Planner):
    """The same even cut on every stage: micro-batches that differ by one sample at most."""

    def plan(self, problem: Problem) -> Plan:
        where = problem.schedule.place_stages(problem.ranks)
        # The last stage runs the user's whole step, which should log and count once.
        again = tuple(s < len(where) - 1 for s in range(len(where))) if problem.recompute else ()
        m = MICROBATCHES_PER_STAGE * len(where) if problem.microbatches is None else problem.microbatches
        cut = Cut.even(problem.rows, m, len(where))
        return Plan(where, (cut,), layers=problem.layers, recompute=again)


def planner_of(schedule: Schedule | Policy) -> Planner:
    """Return the planner that the schedule names, or the one that cuts evenly.

    Raises:
        PlanError: it names something else.
    """
    planner = schedule.make_planner()
    if planner is None:
        return EvenPlanner()
    if not isinstance(planner, Planner):
        raise PlanError(
            f"the planner of schedule {schedule.name!r} is {planner!r}; it needs a subclass of "
            "lightning_pipes.planning.Planner, or None for even micro-batches"
        )
    return planner


def solve_plan(problem: Problem) -> Plan:
    """Return the plan of the schedule's own planner; see `Planner.solve`.

    Raises:
        PlanError: there is none, or the planner's is for other ranks, rows or layers than those of the problem.
    """
    return planner_of(problem.schedule).solve(problem).plan


def even_plan(schedule: Schedule | Policy, ranks: int, microbatches: int, rows: int, recompute: bool = False) -> Plan:
    """Return a batch of `rows` samples in equal micro-batches, whatever the schedule's own planner would do.

    Raises:
        PlanError: no samples or no micro-batches.
    """
    return adapt_plan(EvenPlanner().plan(Problem(schedule, ranks, rows, microbatches, recompute)), schedule)
