"""From a schedule to the plan and the order of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Plan, PlanError, Policy, Program, Schedule, Span, placement, prepared, verify
from lightning_pipes.planning.partition import even_partition, partition_at
from lightning_pipes.sim import simulate

DEFAULT_MICROBATCHES_PER_STAGE = 2
TRIED_PER_STAGE = 16
"""Micro-batches for each stage that show whether a schedule can order a plan."""
_KEPT = 64


class Plans:
    """Plans by number of samples: every batch is cut evenly, so what a sample sees does not depend on other batches.

    Args:
        schedule: orders the plan.
        ranks: the rank of each stage.
        layers: the layers of each stage.
        microbatches: pieces of a batch; None means two a stage.
        recompute: all stages but the last keep only their input.
    """

    def __init__(
        self,
        schedule: Schedule | Policy,
        ranks: Sequence[int],
        layers: Sequence[Span],
        microbatches: int | None,
        recompute: bool,
    ) -> None:
        self.schedule = schedule
        self.microbatches = microbatches or DEFAULT_MICROBATCHES_PER_STAGE * len(ranks)
        self._ranks = tuple(ranks)
        self._layers = tuple(layers)
        # The last stage runs the user's whole step, which should log and count once.
        self._recompute = tuple(recompute and s < len(ranks) - 1 for s in range(len(ranks))) if recompute else ()
        self._made: dict[int, tuple[Plan, Program | Policy]] = {}
        self._given: dict[int, tuple[Plan, Program | Policy]] = {}
        self._verified: int | None = None

    @property
    def trial_rows(self) -> int:
        """Samples of a batch with which the order can be tried before anybody knows the batches."""
        return min(self.microbatches, TRIED_PER_STAGE * len(self._ranks))

    def for_rows(self, rows: int) -> tuple[Plan, Program | Policy]:
        """The plan for a batch of `rows` samples and its verified order.

        A policy is tried in virtual time, with forwards of one second and backwards of two: one that gets stuck there
        would have every rank wait for ever.

        Raises:
            PlanError: the schedule can't order it.
            DeadlockError: the policy gets stuck.
        """
        if rows in self._given:
            return self._given[rows]
        if rows not in self._made:
            if len(self._made) >= _KEPT:
                self._made.pop(next(iter(self._made)))
            n = len(self._ranks)
            plan = Plan.even(
                n, self.microbatches, rows, ranks=self._ranks, layers=self._layers, recompute=self._recompute
            )
            self._made[rows] = self._ordered(plan)
        return self._made[rows]

    def other(
        self,
        schedule: Schedule | Policy,
        microbatches: int | None = None,
        given: Plan | None = None,
        verified: int | None = None,
    ) -> Plans:
        """Plans by another schedule for the same layers on the same ranks.

        Args:
            microbatches: by default as many as now.
            given: the plan for batches of its size, as with other spans on every stage; those of another size are cut
                evenly. Its layers and recomputation are those of the run.
            verified: samples of the batches for which somebody has verified the order: doing so takes up to a hundred
                times what making it does.

        Raises:
            PlanError: the schedule moves stages to other ranks, does not flush between batches, or can't order it.
        """
        ranks = max(self._ranks) + 1
        wanted = placement(schedule, ranks) if given is None else given.ranks
        if wanted != self._ranks:
            raise PlanError(
                f"{schedule.name} has stages on ranks {wanted}, and the run has them on {self._ranks}: layers would "
                "have to move, which they can't while training goes on. Choose a schedule with the same placement, or "
                "start another run with it"
            )
        made = Plans(schedule, self._ranks, self._layers, microbatches or self.microbatches, False)
        made._recompute, made._verified = self._recompute, verified
        if given is not None:
            plan = replace(given, layers=self._layers, recompute=self._recompute)
            made._given = {plan.jobs[0].rows: made._ordered(plan)}
        largest = verified or max(self._made, default=made.trial_rows)  # the next batch is most likely of that size
        tried = [made.for_rows(largest), *made._given.values()]
        if any(isinstance(order, Program) and order.endless for _, order in tried):
            raise PlanError(
                f"{schedule.name} does not flush between batches, which can't begin in the middle of a run; start "
                "another run with it"
            )
        return made

    def _ordered(self, plan: Plan) -> tuple[Plan, Program | Policy]:
        plan = prepared(plan, self.schedule)
        verified = plan.jobs[0].rows == self._verified
        if isinstance(self.schedule, Schedule):
            order = self.schedule.program(plan)
            if not verified:
                verify(order, plan)
            return plan, order
        if not verified:
            simulate(self.schedule, plan, CostModel.uniform(plan.n_stages, forward=1.0, backward=2.0))
        return plan, self.schedule


def stage_layers(partition: str | Sequence[int], sizes: Sequence[int], stages: int) -> tuple[Span, ...]:
    """The layers of each stage: balanced by `sizes` for "parameters", else cut where `partition` says."""
    if isinstance(partition, str):
        return even_partition(sizes, stages)
    return partition_at(partition, len(sizes), stages)


def stage_ranks(schedule: Schedule | Policy, n_ranks: int) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    return placement(schedule, n_ranks)
