"""Ways to order a batch between which a run may change without moving anything."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_pipes.cost import Costs
from lightning_pipes.ir import Cut, InputError, Kind, Plan, Policy, Schedule, adapt_plan
from lightning_pipes.planning.formatting import schedule_label
from lightning_pipes.planning.memory import stage_peak
from lightning_pipes.planning.planner import EvenPlanner, planner_of
from lightning_pipes.sim.loops.memory import Limit, limits_of
from lightning_pipes.sim.units import bytes_text


@dataclass(frozen=True)
class Candidate:
    """One of them.

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
    """A planner that knows what a run may change to while it goes on."""

    @abstractmethod
    def list_candidates(
        self, plan: Plan, costs: Costs, memory_limit: Limit = None, sizes: Sequence[int] = ()
    ) -> tuple[Candidate, ...]:
        """The candidates that may run on `plan`, the schedule that names this planner included, within so many bytes a
        rank.

        Args:
            costs: what is known of times and bytes now; asked again when these have changed.
            sizes: samples of a micro-batch to choose from; by default the plan's own.

        Raises:
            InputError: nothing fits; names the stage and what is missing.
        """


def tuning_planner(schedule: Schedule | Policy) -> TuningPlanner:
    """The planner of a schedule that can change while a run goes on.

    Raises:
        InputError: it can't.
    """
    planner = planner_of(schedule)
    if not isinstance(planner, TuningPlanner):
        raise InputError(f"schedule {schedule.name} does not say what to change to; begin with 'kfkb'")
    return planner


@lru_cache(maxsize=64)
def cut_into(plan: Plan, size: int) -> Plan:
    """The same plan with micro-batches of `size` samples at most, as even as can be: ceil(rows / size) of them.

    Raises:
        InputError: the plan has several jobs, or a size that is not positive.
    """
    if len(plan.jobs) > 1 or size < 1:
        raise InputError(f"micro-batches of {size} samples for {len(plan.jobs)} jobs; needs at least 1, for one job")
    rows = plan.jobs[0].rows
    cut = Cut.even(rows, -(-rows // size), plan.n_stages)
    return plan if plan.jobs == (cut,) else replace(plan, jobs=(cut,))


def make_candidate(
    schedule: Schedule | Policy, plan: Plan, costs: Costs, memory_limit: Limit, held: Sequence[int]
) -> Candidate | None:
    """`schedule` on `plan`, whose stages hold that many micro-batches at most; None if that does not fit."""
    plan = adapt_plan(plan, schedule)
    m = len(plan.spans(Kind.F, 0))
    peak = tuple(stage_peak(plan, costs, s, min(most, m)) for s, most in enumerate(held))
    if any(a > b for a, b in zip(peak, limits_of(memory_limit, plan.n_ranks), strict=True)):
        return None
    return Candidate(schedule, plan, peak)


def nothing_fits(plan: Plan, costs: Costs, memory_limit: Limit, held: Sequence[int]) -> InputError:
    """The error for when not even stages that hold so few micro-batches fit: names the one that lacks most."""
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
