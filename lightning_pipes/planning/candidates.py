"""Candidates: plans and orders to which a run may change without moving layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_pipes.cost import Costs
from lightning_pipes.cost.units import bytes_text
from lightning_pipes.ir import Cut, InputError, Kind, Plan, Policy, Schedule, adapt_plan
from lightning_pipes.planning.formatting import schedule_label
from lightning_pipes.planning.memory import stage_peak
from lightning_pipes.planning.planner import EvenPlanner, planner_of
from lightning_pipes.sim.loops.operations import Limit, limits_of


@dataclass(frozen=True)
class Candidate:
    """A plan that the tuner may switch to.

    Attributes:
        schedule: orders the plan.
        plan: the run's own but for how batches are cut.
        peak_bytes: the most that each rank holds, by the memory model.
    """

    schedule: Schedule | Policy
    plan: Plan
    peak_bytes: tuple[int, ...]

    @property
    def n_microbatches(self) -> int:
        """The number of micro-batches."""
        return len(self.plan.spans(Kind.F, 0))

    @property
    def label(self) -> str:
        """The schedule with its settings and the micro-batches, such as "kfkb k=2, 8 micro-batches"."""
        return f"{schedule_label(self.schedule)}, {self.n_microbatches} micro-batches"


class TuningPlanner(EvenPlanner):
    """A planner with candidates to which a run may change while it trains."""

    @abstractmethod
    def list_candidates(
        self, plan: Plan, costs: Costs, memory_limit: Limit = None, sizes: Sequence[int] = ()
    ) -> tuple[Candidate, ...]:
        """Return the candidates for `plan` within `memory_limit`, the schedule of this planner included.

        Args:
            costs: the times and bytes as measured until now.
            sizes: samples of a micro-batch to choose from; by default the plan's own.

        Raises:
            InputError: nothing fits; names the stage and what is missing.
        """


def tuning_planner(schedule: Schedule | Policy) -> TuningPlanner:
    """Return the planner of a schedule that can change while a run trains.

    Raises:
        InputError: the schedule has no such planner.
    """
    planner = planner_of(schedule)
    if not isinstance(planner, TuningPlanner):
        raise InputError(f"schedule {schedule.name} has no candidates to change to; begin with 'kfkb'")
    return planner


@lru_cache(maxsize=64)
def cut_into(plan: Plan, size: int) -> Plan:
    """Return the same plan with micro-batches of `size` samples at most, as even as can be: ceil(rows / size) of them.

    A plan whose largest micro-batch has `size` samples everywhere stays as it is, even if fewer micro-batches would do:
    another number of them changes the order in which gradients are summed.

    Raises:
        InputError: the plan has several jobs, or a size that is not positive.
    """
    if len(plan.jobs) > 1 or size < 1:
        raise InputError(f"micro-batches of {size} samples for {len(plan.jobs)} jobs; needs at least 1, for one job")
    (present,) = plan.jobs
    if len(present.distinct_spans) == 1 and max(span.rows for span in plan.spans(Kind.F, 0)) == size:
        return plan
    cut = Cut.even(present.rows, -(-present.rows // size), plan.n_stages)
    return plan if present == cut else replace(plan, jobs=(cut,))


def make_candidate(
    schedule: Schedule | Policy, plan: Plan, costs: Costs, memory_limit: Limit, held: Sequence[int]
) -> Candidate | None:
    """Return the candidate of `schedule` on `plan` with at most `held` micro-batches in each stage; None if it does not
    fit."""
    plan = adapt_plan(plan, schedule)
    m = len(plan.spans(Kind.F, 0))
    peak = tuple(stage_peak(plan, costs, s, min(most, m)) for s, most in enumerate(held))
    if any(a > b for a, b in zip(peak, limits_of(memory_limit, plan.n_ranks), strict=True)):
        return None
    return Candidate(schedule, plan, peak)


def nothing_fits(plan: Plan, costs: Costs, memory_limit: Limit, held: Sequence[int]) -> InputError:
    """Return the error for when not even stages that hold so few micro-batches fit: names the one that lacks most."""
    limits = limits_of(memory_limit, plan.n_ranks)
    m = len(plan.spans(Kind.F, 0))
    peaks = [stage_peak(plan, costs, s, min(most, m)) for s, most in enumerate(held)]
    stage = max(range(plan.n_stages), key=lambda s: peaks[s] - limits[s])
    resident = costs.resident_bytes(stage, plan)
    rows = max(span.rows for span in plan.spans(Kind.F, stage))
    return InputError(
        f"stage {stage} needs {bytes_text(peaks[stage])} and may have {bytes_text(limits[stage])}: "
        f"{bytes_text(peaks[stage] - limits[stage])} are missing with 1F1B and micro-batches of {rows} "
        f"sample{'s' if rows > 1 else ''} (weights and states {bytes_text(resident)}, activations "
        f"{bytes_text(peaks[stage] - resident)}); use more stages, recompute, or raise the limit"
    )
