"""Planners turn a problem into the plan of a batch, which contains every decision except the order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, get_args, runtime_checkable

from lightning_pipes.cost import CostModel, Deployment, ModelProfile
from lightning_pipes.ir import Cut, InputError, Plan, PlanError, Policy, Schedule, Span, adapt_plan, short_repr
from lightning_pipes.ir.replication import Seconds
from lightning_pipes.planning.replanning import FreeBytes, Observation

Relocation = Literal["blocking", "overlapped", "buffered"]
"""The way in which layers move between ranks.

"blocking" makes all ranks wait. The other two move layers while batches continue: with "overlapped", the old and the
new rank both take the optimizer steps of these batches; with "buffered", the optimizer steps of these batches are
delayed.
"""
RELOCATIONS: tuple[str, ...] = get_args(Relocation)
BLOCKING, OVERLAPPED, BUFFERED = RELOCATIONS
MICROBATCHES_PER_STAGE = 2
"""The default number of micro-batches for each stage."""


LATE = "late"
"""The value of the setting `recompute` with which stages recompute only when the gradient has arrived."""
UNDECIDED = "auto"
"""The value of the setting `recompute` with which as few stages recompute as the memory of the devices requires."""
Recompute = bool | str | tuple[int, ...]
"""The stages that recompute: True for all except the last, False for none, `UNDECIDED`, or the numbers of stages."""


def check_recompute(recompute: object) -> tuple[Recompute, bool]:
    """Check the setting of recomputation.

    Returns:
        The values of `Problem.recompute`, with stages in ascending order, and of `Problem.late_recompute`.

    Raises:
        InputError: the setting is invalid.
    """
    if isinstance(recompute, str) and recompute == LATE:
        return True, True
    if isinstance(recompute, bool) or (isinstance(recompute, str) and recompute == UNDECIDED):
        return recompute, False
    if isinstance(recompute, Sequence) and not isinstance(recompute, str | bytes | bytearray | memoryview):
        stages = sorted({s for s in recompute if isinstance(s, int) and not isinstance(s, bool) and s >= 0})
        if stages and len(stages) == len(recompute):
            return tuple(stages), False
    raise InputError(
        f"recompute must be True, False, {LATE!r}, {UNDECIDED!r}, or a list of the numbers of different stages, got "
        f"{short_repr(recompute)}"
    )


def recompute_setting(plan: Plan) -> bool | tuple[int, ...]:
    """Return the setting with which the stages of `plan` recompute, as in `Problem.recompute`."""
    stages = tuple(stage for stage, again in enumerate(plan.recompute) if again)
    return all(plan.recompute[:-1]) or stages if stages else False


@dataclass(frozen=True)
class Problem:
    """The input of a planner.

    Attributes:
        schedule: the schedule that orders the plan.
        ranks: the number of ranks of one pipeline. Each rank has one device.
        rows: the number of samples of the batch.
        microbatches: the requested number of micro-batches; None if the planner decides.
        recompute: the stages that keep only their input between forward and backward: True for all except the last,
            False for none, or their numbers. `UNDECIDED` leaves the choice to a `RecomputePlanner` or an `AutoPlanner`;
            for other planners, it means that no stage recomputes.
        late_recompute: whether a stage recomputes only when the gradient has arrived. Otherwise, in an order that is
            known in advance, it recomputes before; see `Plan.early_recompute`.
        layers: the layers of each stage, if they are already decided. The plan must then use them.
        profile: the seconds and bytes of the layers; None if they were not measured.
        deployment: the devices, links and memory limits; None if the user did not specify them.
        costs: the times of the stages and links of the running plan in its last batches, for the sizes in this plan;
            None before the first batch.
        observations: windows of the running plan, from one call of `replan` to the next, the oldest first. Windows of
            other plans are not included.
        earlier_observations: windows of plans that ran earlier, the oldest first, each with its plan.
        remaining: the number of batches until the end of the run; None if it is unknown.
        tied: groups of layers that share a parameter. If a group is in one stage, it can move to another stage as a
            whole; otherwise, its layers can't move.
        relocation: the way in which layers would move.
        fallback: the layers of each stage to keep unless the planner finds sufficiently better ones: an even partition
            by parameters, or the partition of the running plan. Empty if there is no fallback.
        least: the smallest number of samples of a micro-batch, if the batch is at least this large.
        kept_microbatches: the micro-batches that each of the recomputing stages does not recompute, as in
            `Plan.kept_microbatches`.
    """

    schedule: Schedule | Policy
    ranks: int
    rows: int
    microbatches: int | None = None
    recompute: Recompute = False
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
    late_recompute: bool = False
    kept_microbatches: tuple[tuple[int, int], ...] = ()

    def recomputing_stages(self, n_stages: int) -> tuple[bool, ...]:
        """Return for each of the stages whether it recomputes, as in `Plan.recompute`. Empty if no stage does.

        Raises:
            PlanError: a stage that should recompute does not exist, or is the last stage.
        """
        stages = self.recompute
        if not stages or isinstance(stages, str):
            return ()
        # The last stage runs the whole step of the user, which should log and count only once.
        if isinstance(stages, bool):
            return tuple(stage < n_stages - 1 for stage in range(n_stages))
        if stages[-1] >= n_stages - 1:
            able = "stage 0" if n_stages == 2 else f"stages 0 to {n_stages - 2}"
            raise PlanError(
                f"recompute={[*stages]} names stage {stages[-1]}, but with schedule {self.schedule.name!r} on "
                f"{self.ranks} rank{'s' * (self.ranks > 1)} only {able} can recompute. The last stage runs the loss "
                f"and never recomputes. Set recompute to {[*range(min(n_stages - 1, 2))]} or to True, for example"
                if n_stages > 1
                else f"recompute={[*stages]} names stage {stages[-1]}, but there is only one stage, which runs the "
                "loss and never recomputes. Leave recompute out, or use more stages"
            )
        return tuple(stage in stages for stage in range(n_stages))


@dataclass(frozen=True)
class Solution:
    """A problem in which everything is decided, and its plan.

    Attributes:
        problem: the original problem with the decisions of the planner: the layers and, if the planner chooses them,
            the schedule, the number of micro-batches, and recomputation. For batches of other sizes, the planner of
            this schedule receives this problem with different `rows`.
        plan: the plan of the batch, which the schedule of `problem` orders.
        why: an explanation for the user; empty if there was nothing to choose.
        table: a table of the compared options for the user.
    """

    problem: Problem
    plan: Plan
    why: str = ""
    table: str = ""


class Planner(ABC):
    """Decides how batches are cut. A schedule specifies its planner by `make_planner()`.

    A planner has no state and uses no unseeded random numbers, because every rank runs its own planner and all ranks
    must obtain the same plan.

    Attributes:
        every: the number of training batches between two calls of `replan`; 0 if `replan` is never called.
        wants_profile: whether layers are to be measured even if the user specifies the partition.
        memory_limit: the bytes that a rank may hold, in addition to the limit of its device. None means no such limit.
    """

    every: int = 0
    memory_limit: int | None = None
    wants_profile: ClassVar[bool] = False

    @property
    def user_chose_microbatches(self) -> bool:
        """Whether the user has chosen how a batch is cut, so that the number of micro-batches is not open."""
        return False

    @property
    def may_cut_unequally(self) -> bool:
        """Whether the planner may cut a batch differently on different stages or links if there is a profile."""
        return False

    @property
    def uses_profile(self) -> bool:
        """Whether the planner chooses more than the layers of the stages if there is a profile."""
        return self.may_cut_unequally

    @property
    def has_memory_limit(self) -> bool:
        """Whether the user wants a plan that fits into memory, so that the run must not begin if no plan does.

        Layers are then measured even if the user specifies the partition, or if they take little time.
        """
        return False

    @abstractmethod
    def plan(self, problem: Problem) -> Plan:
        """Return the plan of the batch on the ranks where the schedule places its stages.

        `solve` adapts the plan to the schedule.

        A batch of another size, such as the last batch of an epoch, is another problem.

        Raises:
            PlanError: there is no plan for this problem.
        """

    def solve(self, problem: Problem) -> Solution:
        """Return the plan, adapted to the schedule, and the decisions that it is based on.

        The schedule determines whether the backward is split and the number of weight versions. If `plan` returns no
        layers, the layers of the problem or its fallback are used. A planner that decides more than the plan overrides
        this method; its method `plan` keeps the schedule of the problem.

        Raises:
            PlanError: there is no plan, or the ranks, rows or layers of the plan differ from the problem.
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
                    f"the planner of schedule {schedule.name!r} planned for {what} {got} instead of {needed}"
                )
        return Solution(replace(problem, layers=plan.layers), adapt_plan(plan, schedule))

    def explain_plan(self, problem: Problem, plan: Plan) -> str:
        """Return a sentence for the user that explains how `plan`, which this planner made, cuts a batch.

        The result is empty if there is nothing to explain.
        """
        return ""

    def profile_sizes(self, rows: int, stages: int, microbatches: int | None) -> tuple[int, ...]:
        """Return the numbers of samples for which the times of layers are needed to plan a batch of `rows` samples.

        By default, these are an even micro-batch and half of one.

        Args:
            rows: the number of samples of the batch.
            stages: the number of stages.
            microbatches: the requested number of micro-batches; None if the planner decides.
        """
        one = -(-rows // (microbatches or MICROBATCHES_PER_STAGE * stages))
        return tuple(sorted({max(1, one // 2), one}))

    def most_rows(self, rows: int, stages: int, microbatches: int | None) -> int:
        """Return the largest number of samples that a micro-batch may have in a batch of `rows` samples."""
        return max(self.profile_sizes(rows, stages, microbatches))

    def replan(self, plan: Plan, problem: Problem) -> Plan | None:
        """Return another plan for batches of the same size, based on observations of the run; None to keep `plan`.

        Layers may be in other stages than in `plan`; they move before the next batch. Stages stay on their ranks.
        """
        return None


@runtime_checkable
class MemoryGuardingPlanner(Protocol):
    """A planner that reacts before a batch if devices run short of memory."""

    @property
    def guards_memory(self) -> bool:
        """Whether the other methods are called before every batch."""

    def should_serialize(self, free: Sequence[FreeBytes], serialized: bool) -> bool:
        """Return whether batches should run one at a time for now. This applies to schedules that do not flush.

        Args:
            free: the free bytes before each of the last batches, the oldest first.
            serialized: the result before the last batch.
        """

    def reduce_memory(self, plan: Plan, problem: Problem, free: FreeBytes) -> Plan | None:
        """Return a plan that needs less memory on devices that run short of it, even if batches take longer.

        The result is None to keep `plan`. This method is called if running batches one at a time has not freed enough
        memory.
        """


@runtime_checkable
class ShareBalancingPlanner(Protocol):
    """A planner that divides samples among the ranks of a stage by their measured speed."""

    def balance_shares(self, plan: Plan, problem: Problem) -> Seconds | None:
        """Return the seconds of a sample on each rank of each stage to compute new shares, or None to keep the shares.

        The shares of samples are inversely proportional to these seconds; see `ir.replication.share_rows`. This method
        is called instead of `replan` if stages have several ranks.
        """


class EvenPlanner(Planner):
    """Cuts the batch evenly and equally on all stages. The sizes of micro-batches differ by at most one sample."""

    def plan(self, problem: Problem) -> Plan:
        where = problem.schedule.place_stages(problem.ranks)
        again = problem.recomputing_stages(len(where))
        m = MICROBATCHES_PER_STAGE * len(where) if problem.microbatches is None else problem.microbatches
        cut = Cut.even(problem.rows, m, len(where))
        early = bool(again) and not problem.late_recompute and isinstance(problem.schedule, Schedule)
        kept = problem.kept_microbatches if again else ()
        return Plan(
            where, (cut,), layers=problem.layers, recompute=again, early_recompute=early, kept_microbatches=kept
        )


def planner_of(schedule: Schedule | Policy) -> Planner:
    """Return the planner of the schedule, or an `EvenPlanner` if the schedule does not specify one.

    Raises:
        PlanError: `make_planner` returns something other than a planner or None.
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
        PlanError: there is no plan, or the ranks, rows or layers of the plan differ from the problem.
    """
    return planner_of(problem.schedule).solve(problem).plan


def even_plan(schedule: Schedule | Policy, ranks: int, microbatches: int, rows: int, recompute: bool = False) -> Plan:
    """Return the plan of a batch of `rows` samples in equal micro-batches. The planner of the schedule is not used.

    Raises:
        PlanError: there are no samples or no micro-batches.
    """
    return adapt_plan(EvenPlanner().plan(Problem(schedule, ranks, rows, microbatches, recompute)), schedule)
