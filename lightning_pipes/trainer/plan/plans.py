"""Plans and orders of batches for a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Plan, PlanError, Policy, Program, Schedule, Span, adapt_plan, verify
from lightning_pipes.ir.replication import Seconds, list_shares, replicate_plan, replicate_program
from lightning_pipes.planning.fit import price_stages
from lightning_pipes.planning.partition import even_partition, partition_at
from lightning_pipes.planning.planner import (
    MICROBATCHES_PER_STAGE,
    EvenPlanner,
    MemoryGuardingPlanner,
    Planner,
    Problem,
    ShareBalancingPlanner,
    planner_of,
    solve_plan,
)
from lightning_pipes.planning.recomputation import place_recomputations
from lightning_pipes.planning.replanning import MAX_OBSERVATIONS, FreeBytes, Observation
from lightning_pipes.sim import simulate

TRIED_MICROBATCHES_PER_STAGE = 16
"""The number of micro-batches per stage with which it is checked that a schedule can order a plan."""
_MAX_CACHED_ORDERS = 64


class Plans:
    """The plans of batches by their number of samples, which the planner of the schedule makes.

    The cut of a batch depends only on its own size.

    Args:
        problem: the planning problem of any batch, in which the layers are decided and `rows` is filled in. A batch
            with too few samples for micro-batches of the smallest allowed size is cut into fewer micro-batches.
        replanner: the planner that revises plans during training. The default is the planner of the schedule.
        degrees: the number of ranks of each stage, if stages have several. The planner considers the ranks of a stage
            as one rank.
        seconds: the seconds per sample on each of these ranks, according to which they share samples. By default, all
            ranks are equally fast.
    """

    def __init__(
        self,
        problem: Problem,
        replanner: Planner | None = None,
        degrees: Sequence[int] = (),
        seconds: Seconds = (),
    ) -> None:
        self._degrees = tuple(degrees)
        least = 1 if problem.schedule.flushes else max(problem.least, *self._degrees, 1)
        self._problem = replace(problem, least=max(problem.least, least))  # each rank needs one if batches overlap
        self._seconds = seconds
        self._replanner = replanner
        self._asked = asked = replanner or planner_of(problem.schedule)
        self._guard: MemoryGuardingPlanner | None = None
        if isinstance(asked, MemoryGuardingPlanner) and asked.guards_memory and not degrees:
            self._guard = asked
        self._ranks = problem.schedule.place_stages(problem.ranks)
        self.schedule = problem.schedule
        self._made: dict[int, tuple[Plan, Program | Policy]] = {}
        self._given: dict[int, tuple[Plan, Program | Policy]] = {}
        self._verified: int | None = None

    @cached_property
    def microbatches(self) -> int:
        """The number of micro-batches of a batch with enough samples, from the user or from the planner."""
        if self._problem.microbatches is not None:
            return self._problem.microbatches
        rows = MICROBATCHES_PER_STAGE * len(self._ranks)
        return max(map(len, solve_plan(replace(self._problem, rows=rows)).jobs[0].forward))

    @property
    def least_rows(self) -> int:
        """The smallest number of samples of a micro-batch, unless a batch has fewer samples."""
        return self._problem.least

    @property
    def trial_rows(self) -> int:
        """The number of samples of a batch with which the order is checked before the size of the batches is known."""
        return min(self.microbatches, TRIED_MICROBATCHES_PER_STAGE * len(self._ranks)) * max(self._degrees, default=1)

    @property
    def is_asynchronous(self) -> bool:
        """Whether the order continues from batch to batch, so that stages step at different times."""
        return self.for_rows(self.trial_rows)[1].is_endless

    @property
    def layers(self) -> tuple[Span, ...]:
        """The layers of each stage for any number of samples. Empty if they are not decided."""
        return self._problem.layers

    def for_rows(self, rows: int) -> tuple[Plan, Program | Policy]:
        """Return the plan for a batch of `rows` samples and its verified order.

        A policy is simulated with forwards of one second and backwards of two seconds, because a policy that blocks
        there would make every rank wait forever.

        Raises:
            PlanError: the schedule cannot order the plan.
            DeadlockError: the policy blocks.
        """
        if rows in self._given:
            return self._given[rows]
        if rows not in self._made:
            if len(self._made) >= _MAX_CACHED_ORDERS:
                self._made.pop(next(iter(self._made)))
            self._made[rows] = self._order_plan(solve_plan(self._problem_of(rows)))
        return self._made[rows]

    def for_schedule(
        self,
        schedule: Schedule | Policy,
        microbatches: int | None = None,
        given: Plan | None = None,
        verified: int | None = None,
    ) -> Plans:
        """Return the plans of another schedule, for stages on the same ranks.

        Args:
            schedule: the new schedule.
            microbatches: the number of micro-batches. The default is the user's number, or the number of the schedule's
                planner.
            given: the plan for batches of its size. Other batches are cut by the schedule's planner, with the same
                layers. If the plan has no layers or no recomputation, the values of the run are used.
            verified: the batch size whose order has already been verified, because verification takes longer than
                planning.

        Raises:
            PlanError: the schedule moves stages to other ranks, only one of the two schedules flushes between batches,
                the schedule cannot order the plan, or `given` has different recomputation.
        """
        wanted = schedule.place_stages(self._problem.ranks) if given is None else given.ranks
        if wanted != self._ranks:
            raise PlanError(
                f"{schedule.name} has stages on ranks {wanted}, but the run has them on {self._ranks}. During "
                "training, layers can move between stages, but stages can't move to other ranks. Choose a schedule "
                "with the same placement, or start another run with it"
            )
        if self._degrees and given is not None:
            raise PlanError(
                f"a plan is given to a run with data_parallel={list(self._degrees)}, which divides samples among the "
                "ranks of each stage automatically. Give only the schedule and the number of micro-batches"
            )
        layers = self._problem.layers if given is None or not given.layers else given.layers
        m = self._problem.microbatches if microbatches is None else microbatches
        problem = replace(self._problem, schedule=schedule, microbatches=m, layers=layers)
        made = Plans(problem, self._replanner, self._degrees, self._seconds)
        made._verified = verified
        if given is not None:
            rows = given.jobs[0].rows
            made._given[rows] = made._order_plan(
                adapt_plan(self._keep_setting(given, solve_plan(made._problem_of(rows))), schedule)
            )
        largest = verified or max(self._made, default=made.trial_rows)  # the next batch most likely has this size
        tried = [made.for_rows(largest), *made._given.values()]
        flushes = self.schedule.flushes
        for _, order in tried:
            if order.is_endless == flushes:
                raise PlanError(
                    f"{schedule.name} {'does not flush' if flushes else 'flushes'} between batches, and "
                    f"{self.schedule.name} {'does' if flushes else 'does not'}, which can't change in the middle of a "
                    "run; start another run with it"
                )
        return made

    @property
    def every(self) -> int:
        """The number of training batches between two revisions by the planner, or 0 if plans are never revised."""
        return self._asked.every

    def is_due(self, batch: int) -> bool:
        """Return whether the planner revises the plan before training batch number `batch`."""
        return bool(self.every and batch) and batch % self.every == 0

    @property
    def guards_memory(self) -> bool:
        """Whether the planner needs the free bytes of all ranks before every batch."""
        return self._guard is not None

    def should_serialize_batches(self, free: Sequence[FreeBytes], serialized: bool) -> bool:
        """Return whether batches that could overlap should run one after the other for now."""
        return self._guard is not None and self._guard.should_serialize(free, serialized)

    def reduce_memory(self, rows: int, observations: tuple[Observation, ...], free: FreeBytes) -> Plans:
        """Return plans in which layers leave devices that are short of memory, or these plans if no layer has to move.

        Args:
            rows: the number of samples of a batch.
            observations: the observations of the plan for a batch of `rows` samples, the oldest first.
            free: the free bytes of all ranks.
        """
        plan, _ = self.for_rows(rows)
        now = replace(self._problem, rows=rows, layers=plan.layers, observations=observations)
        found = None if self._guard is None else self._guard.reduce_memory(plan, now, free)
        return (
            self if found is None else self._remember(self.for_schedule(self.schedule, given=found), plan, observations)
        )

    def revise(self, rows: int, observations: tuple[Observation, ...], remaining: int | None = None) -> Plans:
        """Return the plans that the planner chooses before a batch of `rows` samples, which are usually these plans.

        Args:
            rows: the number of samples of the batch.
            observations: the observations of the plan for such a batch, the oldest first.
            remaining: the number of batches that are left in the run, or None if it is unknown.

        Raises:
            PlanError: the planner's plan cannot be run.
        """
        plan, _ = self.for_rows(rows)
        costs = observations[-1].costs if observations else None
        now = replace(
            self._problem, rows=rows, layers=plan.layers, costs=costs, observations=observations, remaining=remaining
        )
        if self._degrees:
            return self._share_anew(plan, replace(now, microbatches=self._problem_of(rows).microbatches))
        found = self._asked.replan(plan, now)
        if found is None:
            return self
        return self._remember(self.for_schedule(self.schedule, given=found), plan, observations)

    def _share_anew(self, plan: Plan, now: Problem) -> Plans:
        """Return plans with shares of samples according to the measured speed of ranks, or these plans."""
        seconds = self._asked.balance_shares(plan, now) if isinstance(self._asked, ShareBalancingPlanner) else None
        if seconds is None:
            return self
        made = Plans(self._problem, self._replanner, self._degrees, seconds)
        made._verified = now.rows  # the order of whole micro-batches is the same as before
        rank_zero_info(
            f"The ranks of each stage now divide a batch of {now.rows} samples into "
            f"{list_shares(made.for_rows(now.rows)[0])}, instead of {list_shares(plan)}, according to their measured "
            "speed"
        )
        return made

    def _remember(self, made: Plans, plan: Plan, observations: tuple[Observation, ...]) -> Plans:
        """Return `made` with the observations of its predecessor `plan`."""
        earlier = (*self._problem.earlier_observations, *((plan, each) for each in observations))
        made._problem = replace(made._problem, earlier_observations=earlier[-MAX_OBSERVATIONS:])
        return made

    def _problem_of(self, rows: int) -> Problem:
        decides = self._problem.microbatches is None and not isinstance(planner_of(self.schedule), EvenPlanner)
        few = not decides and rows < self._problem.least * self.microbatches
        m = max(1, rows // self._problem.least) if few else self._problem.microbatches
        return replace(self._problem, rows=rows, microbatches=m)

    def _place_recomputations(self, program: Program, plan: Plan) -> Program:
        """Move recomputations into earlier bubbles, if the layers were measured and the devices have the memory."""
        profile, deployment = self._problem.profile, self._problem.deployment
        if not plan.early_recompute or not plan.layers or profile is None or deployment is None:
            return program
        if plan.split_backward and not profile.has_split:
            return program
        memory = [device.memory for device in deployment.pipeline.devices[: plan.n_ranks]]
        return place_recomputations(program, plan, price_stages(profile, plan, deployment), memory)

    def _keep_setting(self, given: Plan, usual: Plan) -> Plan:
        same = {name: getattr(usual, name) for name in ("recompute", "early_recompute", "kept_microbatches")}
        for name in ("recompute", "kept_microbatches"):
            if any(given.recompute) and getattr(given, name) != same[name]:
                raise PlanError(
                    f"the plan has {name} {getattr(given, name)}, but the run has {same[name]}, which can't change "
                    "during the run. Leave recompute out of the plan, or start another run with it"
                )
        return replace(given, layers=usual.layers, **same)

    def _order_plan(self, plan: Plan) -> tuple[Plan, Program | Policy]:
        verified = plan.jobs[0].rows == self._verified
        if isinstance(self.schedule, Schedule):
            order = self._place_recomputations(self.schedule.program(plan), plan)
            if not verified:
                verify(order, plan)
            if not self._degrees:
                return plan, order
            plan = replicate_plan(plan, self._degrees, self._seconds, least=int(order.is_endless))
            return plan, replicate_program(order, plan)
        if self._degrees:
            raise PlanError(
                f"schedule {self.schedule.name!r} decides its order while it runs, and ranks of one stage would decide "
                f"differently. For data_parallel={list(self._degrees)} take a schedule with a fixed order: '1f1b', "
                "'kfkb', 'pipedream' or 'dynpipe'"
            )
        if not verified:
            simulate(self.schedule, plan, CostModel.uniform(plan.n_stages, forward=1.0, backward=2.0))
        return plan, self.schedule


def stage_layers(
    partition: str | Sequence[int], sizes: Sequence[int], stages: int, degrees: Sequence[int] = ()
) -> tuple[Span, ...]:
    """Return the layers of each stage.

    The stages are balanced by `sizes` if `partition` is "parameters". Otherwise, `partition` contains the layers at
    which stages begin.
    """
    if isinstance(partition, str):
        return even_partition(sizes, stages, degrees)
    return partition_at(partition, len(sizes), stages)
