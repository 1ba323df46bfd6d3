"""Choosing schedule, micro-batches and recomputation: all is simulated that might win, and a table says why."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass, replace

from lightning_pipes.cost import Cluster, Deployment, Device, ModelProfile
from lightning_pipes.cost.deployment import deployed
from lightning_pipes.ir import DeadlockError, Kind, Plan, PlanError, Policy, ProgramError, Schedule
from lightning_pipes.ir.registry import installed_schedules
from lightning_pipes.planning.bounds import step_bound
from lightning_pipes.planning.fit import Fit, fit_layers, improved
from lightning_pipes.planning.planner import Problem, even_plan, planned

REFINED = 4
CLOSE = 1.05
"""How many of the best options have their cuts moved until nothing gets better, and how close to the best they are."""
WORTH_IT = 0.995
"""An option that can't be faster than the best by more than this is not simulated."""
MOST_FORWARDS = 2**15
"""Of a batch on all ranks, in what is tried: more take long to simulate, and gain next to nothing."""
LARGE = 2_000
"""Forwards of a step from which on options are left out too if those beside them are FAR from the best."""
FAR = 1.15
POLICY_SIZE = 30_000
"""Computations of the largest step that is simulated with a policy which nobody has named."""
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
    cluster: Cluster | Deployment | None = None,
    schedules: Iterable[Schedule | Policy] | None = None,
    microbatches: Sequence[int] = (),
    recompute: Sequence[bool] = (False, True),
    progress: Progress = lambda what, done: None,
) -> Choice:
    """The fastest way to train batches of `rows` samples on `ranks` ranks, within the devices' memory.

    Only schedules that give the same result as one process come into question. Options are simulated in the order of
    a lower bound, and no more once the bound promises less than 0.5 % on what was found.

    Args:
        rows: samples that a pipeline gets; each replica has its own.
        cluster: the devices of one pipeline, or a deployment of several replicas; by default one without limits.
        schedules: by default the variants of all that are installed.
        microbatches: numbers to try; by default from the number of ranks up, doubling.

    Raises:
        PlanError: nothing fits; says what the closest one lacks.
    """
    place = deployed(cluster or Cluster((Device(),) * ranks))
    numbers = [m for m in dict.fromkeys(microbatches or numbers_to_try(ranks, rows)) if m <= rows]
    given = list(schedules) if schedules is not None else None
    with _without_garbage_collection():
        every = _options(profile, ranks, rows, place, given, numbers, recompute)
        search = _Search(profile, place)
        options = sorted(every, key=lambda o: (o.bound, o.recompute, -o.microbatches))
        for number, option in enumerate(options):
            progress(f"{option.label}, {option.microbatches} micro-batches", number / len(options))
            search.look_at(option)
        found = sorted(search.found, key=_place)
        if not found or found[0].fit is None:
            raise PlanError(f"no schedule fits: {found[0].why_not}" if found else "there is no schedule to choose from")
        close = CLOSE * found[0].fit.seconds
        for number, option in enumerate(found[:REFINED]):
            if option.fit is not None and option.fit.seconds < close:
                found[number] = replace(option, fit=improved(profile, option.fit, place))
        found.sort(key=_place)
    return Choice(found[0], tuple(found))


class _Search:
    """Fits those options that may be the best; `found` has all, with what kept the others out."""

    def __init__(self, profile: ModelProfile, place: Deployment) -> None:
        self._profile, self._place = profile, place
        self._best = math.inf
        self._seconds: dict[tuple[str, int, bool], float] = {}  # by label, micro-batches and recomputation
        self._before: dict[tuple[type, int, bool], float] = {}  # of the last schedule of its kind
        self.found: list[Option] = []

    def look_at(self, option: Option) -> None:
        """Options come in the order of their bounds."""
        why_not = option.why_not or self._hopeless(option)
        if why_not:
            self.found.append(replace(option, why_not=why_not))
            return
        seconds = math.inf
        try:
            fit = fit_layers(self._profile, option.schedule, option.plan, self._place, trials=0)
            option, seconds = replace(option, fit=fit), fit.seconds
            self._best = min(self._best, seconds)
        except (PlanError, DeadlockError, ProgramError) as error:
            option = replace(option, why_not=str(error))
        self._note(option, seconds)
        self.found.append(option)

    def _note(self, option: Option, seconds: float) -> None:
        m, again = option.microbatches, option.recompute
        self._seconds[option.label, m, again] = self._before[type(option.schedule), m, again] = seconds

    def _hopeless(self, option: Option) -> str:
        """Why the option can't be the best or, in a large plan, hardly."""
        m, again = option.microbatches, option.recompute
        if option.bound >= self._best * WORTH_IT:
            return f"can't beat the best: at least {1e3 * option.bound:.1f} ms"
        if again and self._seconds.get((option.label, m, False), math.inf) < math.inf:
            return "fits without recomputation, which only takes time"
        if m * option.plan.n_stages <= LARGE:
            return ""
        for others, seconds in (
            ("with twice the micro-batches", self._seconds.get((option.label, 2 * m, again), 0.0)),
            ("with other settings", self._before.get((type(option.schedule), m, again), 0.0)),
        ):
            if seconds > FAR * self._best or seconds == math.inf:
                self._note(option, seconds)
                takes = "does not fit" if seconds == math.inf else f"takes {1e3 * seconds:.1f} ms"
                return f"not simulated: {others} it {takes}"
        return ""


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Millions of instructions are made and none in cycles: looking for those takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _place(option: Option) -> tuple[bool, float]:
    return option.fit is None, option.bound if option.fit is None else option.fit.seconds


def installed_variants(ranks: int, microbatches: int) -> Iterator[Schedule | Policy]:
    """Every installed schedule with the settings that it says are worth a try: `Traits.variants`."""
    for entry in installed_schedules().values():
        yield from entry.load().variants(ranks, microbatches)


def numbers_to_try(ranks: int, rows: int) -> list[int]:
    """Numbers of micro-batches: from about the number of ranks up, doubling, to one for each sample, or to as many as
    can be simulated in reasonable time."""
    found = [1]
    rows = min(rows, max(2 * ranks, MOST_FORWARDS // ranks))
    while found[-1] < rows:
        found.append(found[-1] * 2)
    return [m for m in [*found[:-1], min(found[-1], rows)] if m >= min(ranks, rows) // 2]


def _options(
    profile: ModelProfile,
    ranks: int,
    rows: int,
    place: Deployment,
    schedules: Sequence[Schedule | Policy] | None,
    numbers: Iterable[int],
    recompute: Sequence[bool],
) -> Iterator[Option]:
    """Every combination, each with a step time that it can't beat."""
    bounds: dict[tuple[object, ...], float] = {}
    for m in numbers:
        for schedule in schedules if schedules is not None else installed_variants(ranks, m):
            for again in recompute:
                try:
                    plan = planned(Problem(schedule, ranks, rows, m, again, profile=profile, place=place))
                except PlanError as error:
                    yield Option(schedule, even_plan(schedule, ranks, m, rows, again), math.inf, why_not=str(error))
                    continue
                why_not = _impossible(profile, schedule, plan, asked_for=schedules is not None)
                key = plan.ranks, plan.jobs, again, plan.split_backward
                if not why_not and key not in bounds:
                    bounds[key] = step_bound(profile, plan, place)
                yield Option(schedule, plan, bounds.get(key, math.inf), why_not=why_not)


def _impossible(profile: ModelProfile, schedule: Schedule | Policy, plan: Plan, asked_for: bool) -> str:
    """Why there is nothing to simulate, if so."""
    if len(profile.layers) < plan.n_stages:
        return f"{len(profile.layers)} layers can't fill {plan.n_stages} stages"
    if plan.split_backward and not profile.has_split:
        return "the profile has no times of I and W"
    size = 2 * plan.n_stages * len(plan.spans(Kind.F, 0))
    if not isinstance(schedule, Schedule) and size > POLICY_SIZE and not asked_for:
        return f"{size} computations take long to simulate where no order is fixed; name the schedule to insist"
    return ""
