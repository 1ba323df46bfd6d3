"""Choosing schedule, micro-batches and recomputation: all is simulated that might win, and a table says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace

import numpy as np

from lightning_pipes.cost import Cluster, Device, ModelProfile
from lightning_pipes.ir import DeadlockError, Kind, Plan, PlanError, Policy, ProgramError, Schedule, placement
from lightning_pipes.ir.registry import installed_schedules
from lightning_pipes.planning.fit import Fit, fit_layers, stage_seconds
from lightning_pipes.planning.partition import light_partitions

REFINED = 4
"""How many of the best options have their cuts moved until nothing gets better."""
Progress = Callable[[str, float], None]
"""Told what is tried, and how much of all is done, 0 to 1."""


@dataclass(frozen=True)
class Option:
    """One way to train: a schedule with its settings, micro-batches, recomputation.

    Attributes:
        bound: seconds of a step that it can't beat, whatever the partition.
        fit: its best partition and what comes of it; None where it can't be had, or can't win.
        why_not: what kept it out.
    """

    schedule: Schedule | Policy
    plan: Plan
    bound: float = 0.0
    fit: Fit | None = None
    why_not: str = ""

    @property
    def label(self) -> str:
        """The schedule with its settings, such as "kfkb k=2"."""
        chosen: dict[str, object] = vars(self.schedule) if is_dataclass(self.schedule) else {}
        return " ".join([self.schedule.name, *(f"{name}={value}" for name, value in chosen.items())])

    @property
    def microbatches(self) -> int:
        """The number of micro-batches."""
        return len(self.plan.spans(Kind.F, 0))

    @property
    def recompute(self) -> bool:
        """Whether stages keep only their input."""
        return any(self.plan.recompute)


@dataclass(frozen=True)
class Choice:
    """The fastest option, and all that were looked at, the fastest first."""

    best: Option
    options: tuple[Option, ...]

    @property
    def fit(self) -> Fit:
        """The best option's partition and step time."""
        assert self.best.fit is not None
        return self.best.fit

    def rows(self, most: int = 12) -> list[dict[str, str | int | float]]:
        """The table as data: the best `most` options that were simulated, then those that were not."""
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
                row["slower"] = f"{option.fit.seconds / self.fit.seconds - 1:.1%}"
            else:
                row["why_not"] = option.why_not
            found.append(row)
        return found

    def __str__(self) -> str:
        lines = [f"{'schedule':28} {'micro-batches':>13} {'recompute':>9} {'step':>10} {'peak memory':>12}"]
        for row in self.rows():
            start = f"{row['schedule']:28} {row['microbatches']:13} {row['recompute']:>9}"
            if "why_not" in row:
                lines.append(f"{start} {row['why_not']}")
            else:
                slower = "the best" if row["slower"] == "0.0%" else f"+{row['slower']}"
                lines.append(f"{start} {row['step_ms']:7.1f} ms {row['peak_mib']:8.1f} MiB  {slower}")
        left = len(self.options) - len(self.rows())
        return "\n".join([*lines, f"and {left} more" if left else ""]).rstrip()


def choose(
    profile: ModelProfile,
    ranks: int,
    rows: int,
    cluster: Cluster | None = None,
    schedules: Iterable[Schedule | Policy] | None = None,
    microbatches: Sequence[int] = (),
    recompute: Sequence[bool] = (False, True),
    progress: Progress = lambda what, done: None,
) -> Choice:
    """The fastest way to train batches of `rows` samples on `ranks` ranks, within the devices' memory.

    Only schedules that give the same result as one process come into question. Options are simulated in the order of
    a lower bound, and no more once the bound exceeds what was found.

    Args:
        schedules: by default the variants of all that are installed.
        microbatches: numbers to try; by default from the number of ranks up, doubling.

    Raises:
        PlanError: nothing fits; says what the closest one lacks.
    """
    cluster = cluster or Cluster((Device(),) * ranks)
    numbers = [m for m in dict.fromkeys(microbatches or _numbers(ranks, rows)) if m <= rows]
    given = list(schedules) if schedules is not None else list(installed_variants(ranks, max(numbers)))
    options = [
        _bounded(profile, schedule, ranks, rows, m, again, cluster)
        for schedule in given
        for m in numbers
        for again in recompute
    ]
    options.sort(key=lambda option: option.bound)
    best: Option | None = None
    found: list[Option] = []
    for number, option in enumerate(options):
        progress(f"{option.label}, {option.microbatches} micro-batches", number / len(options))
        if option.why_not:
            found.append(option)
        elif best is not None and best.fit is not None and option.bound >= best.fit.seconds:
            found.append(replace(option, why_not=f"can't beat the best: at least {1e3 * option.bound:.1f} ms"))
        else:
            try:
                fit = fit_layers(profile, option.schedule, option.plan, cluster, trials=0)
                tried = replace(option, fit=fit)
            except (PlanError, DeadlockError, ProgramError) as error:
                tried = replace(option, why_not=str(error))
            found.append(tried)
            if tried.fit is not None and (best is None or best.fit is None or tried.fit.seconds < best.fit.seconds):
                best = tried
    if best is None:
        if not found:
            raise PlanError("there is no schedule to choose from")
        nearest = next((option for option in found if option.bound), found[0])  # one that could be bounded at all
        raise PlanError(f"no schedule fits: {nearest.why_not}")
    found.sort(key=_place)
    for number, option in enumerate(found[:REFINED]):
        if option.fit is not None:
            found[number] = replace(option, fit=fit_layers(profile, option.schedule, option.plan, cluster))
    found.sort(key=_place)
    return Choice(found[0], tuple(found))


def _place(option: Option) -> tuple[bool, float]:
    return option.fit is None, option.bound if option.fit is None else option.fit.seconds


def installed_variants(ranks: int, microbatches: int) -> Iterator[Schedule | Policy]:
    """Every installed schedule with the settings that it says are worth a try, itself with its defaults otherwise.

    A schedule says so by a method `variants(n_ranks, microbatches)` of its class; none at all for one that does not
    give the same result as one process, such as one that keeps several versions of the weights.
    """
    for entry in installed_schedules().values():
        factory = entry.load()
        variants = getattr(factory, "variants", None)
        if variants is not None:
            yield from variants(ranks, microbatches)
        elif not hasattr(factory, "versions"):
            yield factory()


def _numbers(ranks: int, rows: int) -> list[int]:
    found = [1]
    while found[-1] < rows:
        found.append(found[-1] * 2)
    return [m for m in [*found[:-1], min(found[-1], rows)] if m >= min(ranks, rows) // 2]


def _bounded(
    profile: ModelProfile, schedule: Schedule | Policy, ranks: int, rows: int, m: int, again: bool, cluster: Cluster
) -> Option:
    """The option with a step time that no partition of it can beat: the heaviest rank's work, no stage waiting."""
    where = placement(schedule, ranks)
    split = getattr(schedule, "splits_backward", False)
    recompute = tuple(again and s < len(where) - 1 for s in range(len(where))) if again else ()
    plan = replace(Plan.even(len(where), m, rows, ranks=where, recompute=recompute), split_backward=split)
    option = Option(schedule, plan)
    if len(profile.layers) < len(where):
        return replace(option, why_not=f"{len(profile.layers)} layers can't fill {len(where)} stages")
    loads = stage_seconds(profile, plan, cluster)
    n = len(profile.layers)
    zero = np.zeros(n + 1)
    if len(where) == ranks:
        (layers, *_) = light_partitions(loads, zero, slacks=(1.0,))
        work = m * (max(float(loads[s][span.start, span.stop]) for s, span in enumerate(layers)) + 2 * profile.overhead)
    else:  # several stages a rank: the best that sharing the work out by speed can do
        speeds = [cluster.devices[r].speed for r in range(ranks)]
        whole = float(loads[0][0, n]) * cluster.devices[where[0]].speed
        work = m * whole / sum(speeds)
    largest = max(span.rows for span in plan.spans(Kind.F, 0))
    return replace(option, bound=work * rows / (m * largest))  # fewer rows take no less than their share
