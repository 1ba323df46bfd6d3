"""Ways to train side by side, and the fastest of them: a table that says why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.ir import MAX_FORWARDS, Kind, Plan, PlanError, Policy, Schedule
from lightning_pipes.ir.registry import installed_schedules
from lightning_pipes.planning.bounds import step_bound
from lightning_pipes.planning.fit import Fit
from lightning_pipes.planning.planner import Problem, planner_of, solve_plan
from lightning_pipes.planning.staleness import Iterations

MOST_TRIED = 2**15
"""Forwards of a batch on all ranks, in what is tried: more take long to simulate, and gain next to nothing."""
POLICY_SIZE = 30_000
"""Computations of the largest step that is simulated with a policy that the user has not named."""


UNEQUAL_CUTS = "stages or links cut a batch into different micro-batches, which this module does not allow"
NEVER = "gradients so stale never reach the target"


def installed_variants(ranks: int, microbatches: int, stale: bool = False) -> Iterator[Schedule | Policy]:
    """Yield every installed schedule with the settings that it says are worth a try: `ScheduleTraits.list_variants`.

    Args:
        stale: also those of fixed order whose gradients are stale, but for those that differ by their planner only.
    """
    for entry in installed_schedules().values():
        schedule = entry.load()
        yield from schedule.list_variants(ranks, microbatches)
        if stale and issubclass(schedule, Schedule) and not schedule.flushes and not planner_of(schedule()).every:
            yield schedule()


def most_microbatches(ranks: int, rows: int) -> int:
    """Return the most micro-batches that are tried: one for each sample, or as many as can be simulated in reasonable
    time."""
    return max(1, min(rows, max(2 * ranks, MOST_TRIED // ranks), MAX_FORWARDS // ranks))


def numbers_to_try(ranks: int, rows: int) -> list[int]:
    """Return the numbers of micro-batches: from about the number of ranks up, doubling, to `most_microbatches`."""
    found, most = [1], most_microbatches(ranks, rows)
    while found[-1] < most:
        found.append(found[-1] * 2)
    return [m for m in [*found[:-1], min(found[-1], most)] if m >= min(ranks, most) // 2]


def list_options(
    profile: ModelProfile,
    ranks: int,
    rows: int,
    deployment: Deployment,
    schedules: Sequence[Schedule | Policy] | None,
    numbers: Iterable[int],
    recompute: Sequence[bool],
    iterations: Iterations | None = None,
    equal_cuts: bool = False,
) -> Iterator[Option]:
    """Yield every combination, each with a step time that it can't beat.

    Args:
        iterations: as in `choose_option`.
        equal_cuts: as in `choose_option`.
    """
    bounds: dict[tuple[object, ...], float] = {}
    for m in numbers:
        for schedule in schedules if schedules is not None else installed_variants(ranks, m, iterations is not None):
            for again in recompute:
                too_large = True  # where not even stages can be placed
                try:
                    too_large = len(schedule.place_stages(ranks)) * m > MAX_FORWARDS
                    plan = solve_plan(Problem(schedule, ranks, rows, m, again, profile=profile, deployment=deployment))
                except PlanError as error:
                    yield Option(schedule, m, again, None, math.inf, why_not=str(error), too_large=too_large)
                    continue
                more = 1.0 if iterations is None else iterations(max(plan.versions)) / iterations(1)
                is_unequal = any(len(cut.distinct_spans) > 1 for cut in plan.jobs)
                unequal = UNEQUAL_CUTS if equal_cuts and is_unequal else ""
                why_not = unequal or _impossible(profile, plan) or ("" if math.isfinite(more) else NEVER)
                too_large = not why_not and schedules is None and _is_slow(schedule, plan)
                if too_large:
                    why_not = (
                        f"{_computations(plan)} computations take long to simulate where no order is fixed; name the "
                        "schedule to insist"
                    )
                key = plan.ranks, plan.jobs, again, plan.split_backward, schedule.flushes
                if not why_not and key not in bounds:  # which is of batches that don't overlap
                    bounds[key] = step_bound(profile, plan, deployment) if schedule.flushes else 0.0
                found = Option.from_plan(schedule, plan, bounds.get(key, math.inf), why_not, too_large)
                yield replace(found, more_batches=more)


def _impossible(profile: ModelProfile, plan: Plan) -> str:
    """Return why there is nothing to simulate, if so."""
    if len(profile.layers) < plan.n_stages:
        return f"{len(profile.layers)} layers can't fill {plan.n_stages} stages"
    if plan.split_backward and not profile.has_split:
        return "the profile has no times of I and W"
    return ""


def _is_slow(schedule: Schedule | Policy, plan: Plan) -> bool:
    """Return whether to simulate a policy would take long."""
    return not isinstance(schedule, Schedule) and _computations(plan) > POLICY_SIZE


def _computations(plan: Plan) -> int:
    return 2 * plan.n_stages * len(plan.spans(Kind.F, 0))


@dataclass(frozen=True)
class Option:
    """One way to train: a schedule with its settings, micro-batches, recomputation.

    Attributes:
        microbatches: their number.
        recompute: whether stages keep only their input.
        plan: None where it can't be made.
        bound: seconds of a step that it can't beat, whatever the partition.
        fit: its best partition and what comes of it; None where it can't be had, or can't win.
        why_not: what kept it out.
        too_large: whether it might win, and would take too long to simulate.
        more_batches: by how much its stale gradients need more batches until the target than exact ones.
    """

    schedule: Schedule | Policy
    microbatches: int
    recompute: bool
    plan: Plan | None
    bound: float = 0.0
    fit: Fit | None = None
    why_not: str = ""
    too_large: bool = False
    more_batches: float = 1.0

    @property
    def seconds(self) -> float:
        """Seconds of a step, times the batches that exact gradients would save; infinite without a fit."""
        return math.inf if self.fit is None else self.fit.seconds * self.more_batches

    @classmethod
    def from_plan(
        cls, schedule: Schedule | Policy, plan: Plan, bound: float, why_not: str = "", too_large: bool = False
    ) -> Option:
        """Return the option of a plan, before anything is simulated."""
        microbatches = len(plan.spans(Kind.F, 0))
        return cls(schedule, microbatches, any(plan.recompute), plan, bound, why_not=why_not, too_large=too_large)

    @property
    def n_forwards(self) -> int:
        """The forwards of a batch on all stages; 0 without a plan."""
        return 0 if self.plan is None else self.microbatches * self.plan.n_stages

    @property
    def label(self) -> str:
        """The schedule with its settings, such as "kfkb k=2"; without those that are empty."""
        chosen: dict[str, object] = vars(self.schedule) if is_dataclass(self.schedule) else {}
        settings = [
            f"{name}={value}" for name, value in chosen.items() if value not in (None, ()) and value is not False
        ]
        return " ".join([self.schedule.name, *settings])


@dataclass(frozen=True)
class Choice:
    """The fastest option, and all that were looked at, the fastest first.

    Attributes:
        not_searched: sentences on what might be faster and was not simulated, and how to have it simulated.
    """

    best: Option
    options: tuple[Option, ...]
    not_searched: tuple[str, ...] = ()

    @property
    def fit(self) -> Fit:
        """The best option's partition and step time."""
        assert self.best.fit is not None
        return self.best.fit

    def rows(self, most: int = 12) -> list[dict[str, str | int | float]]:
        """Return the table as data: the best `most` options that were simulated, then those that were not."""
        found: list[dict[str, str | int | float]] = []
        for option in self.options[:most]:
            row: dict[str, str | int | float] = {
                "schedule": option.label,
                "microbatches": option.microbatches,
                "recompute": "yes" if option.recompute else "no",
            }
            if option.fit is not None:
                row["step_ms"] = round(1e3 * option.fit.seconds, 3)
                row["peak_mib"] = round(max(option.fit.peak_bytes) / 2**20, 1)
                row["slower"] = f"{option.seconds / self.best.seconds - 1:.1%}"
                if not option.schedule.flushes:
                    row["more_batches"] = round(option.more_batches, 4)
            else:
                row["why_not"] = option.why_not
            found.append(row)
        return found

    def __str__(self) -> str:
        rows = self.rows()
        width = max([28, *(len(str(row["schedule"])) for row in rows)])
        lines = [f"{'schedule':{width}} {'micro-batches':>13} {'recompute':>9} {'step':>10} {'peak memory':>12}"]
        for number, row in enumerate(rows):
            start = f"{row['schedule']:{width}} {row['microbatches']:13} {row['recompute']:>9}"
            if "why_not" in row:
                lines.append(f"{start} {row['why_not']}")
            else:
                slower = "chosen" if not number else f"+{row['slower']}"
                stale = f" (stale gradients, {row['more_batches']} x the batches)" if "more_batches" in row else ""
                lines.append(f"{start} {row['step_ms']:7.1f} ms {row['peak_mib']:8.1f} MiB  {slower}{stale}")
        left = len(self.options) - len(rows)
        return "\n".join([*lines, f"and {left} more" if left else "", *self.not_searched]).rstrip()
