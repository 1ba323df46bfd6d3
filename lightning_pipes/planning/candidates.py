"""Candidates: plans and orders to which a run can change without moving layers."""

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
    """A plan to which the tuner may switch.

    Attributes:
        schedule: the schedule that orders the plan.
        plan: the plan. It differs from the plan of the run only in the micro-batches.
        peak_bytes: the peak memory of each rank in bytes, according to the memory model.
    """

    schedule: Schedule | Policy
    plan: Plan
    peak_bytes: tuple[int, ...]

    @property
    def n_microbatches(self) -> int:
        """The number of micro-batches of a batch."""
        return len(self.plan.spans(Kind.F, 0))

    @property
    def label(self) -> str:
        """The schedule with its settings and the number of micro-batches, such as "kfkb k=2, 8 micro-batches"."""
        return f"{schedule_label(self.schedule)}, {self.n_microbatches} micro-batches"


class TuningPlanner(EvenPlanner):
    """A planner that offers candidates to which a run can change during training."""

    @abstractmethod
    def list_candidates(
        self, plan: Plan, costs: Costs, memory_limit: Limit = None, sizes: Sequence[int] = ()
    ) -> tuple[Candidate, ...]:
        """Return the candidates for `plan` within `memory_limit`, including the schedule of this planner.

        Args:
            plan: the plan of the run.
            costs: the times and bytes that were measured so far.
            memory_limit: the memory limit of the ranks in bytes; None for no limit.
            sizes: the sizes of a micro-batch, in samples, to choose from; by default the size in `plan`.

        Raises:
            InputError: no candidate fits. The message names the stage and the missing bytes.
        """


def tuning_planner(schedule: Schedule | Policy) -> TuningPlanner:
    """Return the planner of a schedule that can change during training.

    Raises:
        InputError: the planner of the schedule is not a `TuningPlanner`.
    """
    planner = planner_of(schedule)
    if not isinstance(planner, TuningPlanner):
        raise InputError(f"schedule {schedule.name} has no candidates that it can change to; start with 'kfkb'")
    return planner


@lru_cache(maxsize=64)
def cut_into(plan: Plan, size: int) -> Plan:
    """Return the plan with ceil(rows / size) micro-batches of at most `size` samples, as even as possible.

    If the largest micro-batch on every stage already has `size` samples, the plan is returned unchanged, even if fewer
    micro-batches would suffice. A different number of micro-batches would change the order in which gradients are
    summed.

    Raises:
        InputError: the plan has several jobs, or `size` is not positive.
    """
    if len(plan.jobs) > 1 or size < 1:
        raise InputError(
            f"a plan of {len(plan.jobs)} jobs can't be cut into micro-batches of {size} samples. Pass a plan with one "
            "job, and a size of at least 1"
        )
    (present,) = plan.jobs
    if len(present.distinct_spans) == 1 and max(span.rows for span in plan.spans(Kind.F, 0)) == size:
        return plan
    cut = Cut.even(present.rows, -(-present.rows // size), plan.n_stages)
    return plan if present == cut else replace(plan, jobs=(cut,))


def make_candidate(
    schedule: Schedule | Policy, plan: Plan, costs: Costs, memory_limit: Limit, held: Sequence[int]
) -> Candidate | None:
    """Return the candidate of `schedule` on `plan`, or None if it does not fit into memory.

    Args:
        schedule: the schedule of the candidate.
        plan: its plan.
        costs: the bytes of the stages.
        memory_limit: the memory limit of the ranks in bytes; None for no limit.
        held: the largest number of micro-batches that each stage holds.
    """
    plan = adapt_plan(plan, schedule)
    m = len(plan.spans(Kind.F, 0))
    peak = tuple(stage_peak(plan, costs, s, min(most, m)) for s, most in enumerate(held))
    if any(a > b for a, b in zip(peak, limits_of(memory_limit, plan.n_ranks), strict=True)):
        return None
    return Candidate(schedule, plan, peak)


def nothing_fits(plan: Plan, costs: Costs, memory_limit: Limit, held: Sequence[int]) -> InputError:
    """Return the error for the case that no candidate fits, even if stages hold only `held` micro-batches.

    The message names the stage that exceeds its limit by the most bytes.
    """
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
