"""The options that the automatic choice compares, and the table that shows and explains the fastest one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.ir import MAX_FORWARDS, Kind, Plan, PlanError, Policy, Schedule
from lightning_pipes.ir.registry import installed_schedules
from lightning_pipes.planning.bounds import step_bound
from lightning_pipes.planning.fit import Fit
from lightning_pipes.planning.formatting import dataclass_fields
from lightning_pipes.planning.planner import UNDECIDED, Problem, Recompute, planner_of, recompute_setting
from lightning_pipes.planning.stage_recompute import with_stages
from lightning_pipes.planning.staleness import Iterations

MAX_TRIED_FORWARDS = 2**15
"""The largest number of forwards of a batch, over all ranks, in the options that are tried. Larger batches take long to
simulate and gain almost nothing."""
MAX_POLICY_COMPUTATIONS = 30_000
"""The largest number of computations in a step that is simulated with a policy, unless the user names the policy."""


UNEQUAL_CUTS_REASON = "stages or links cut a batch into different micro-batches, which this module does not allow"
STALENESS_REASON = "training never reaches the target with gradients this stale"


def installed_variants(ranks: int, microbatches: int, stale: bool = False) -> Iterator[Schedule | Policy]:
    """Yield every installed schedule with each combination of settings that `ScheduleTraits.list_variants` proposes.

    Args:
        ranks: the number of ranks of the pipeline.
        microbatches: the number of micro-batches of a batch.
        stale: whether to also yield schedules of fixed order whose gradients are stale, with their default settings.
            Schedules whose planner replans during training are left out, because they differ from others only by their
            planner.
    """
    for entry in installed_schedules().values():
        schedule = entry.load()
        yield from schedule.list_variants(ranks, microbatches)
        if stale and issubclass(schedule, Schedule) and not schedule.flushes and not planner_of(schedule()).every:
            yield schedule()


def most_microbatches(ranks: int, rows: int) -> int:
    """Return the largest number of micro-batches to try.

    This is one micro-batch for each sample, or the largest number that can be simulated in a reasonable time.
    """
    return max(1, min(rows, max(2 * ranks, MAX_TRIED_FORWARDS // ranks), MAX_FORWARDS // ranks))


def numbers_to_try(ranks: int, rows: int) -> list[int]:
    """Return the numbers of micro-batches to try, doubled from half the number of ranks up to `most_microbatches`."""
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
    recompute: Sequence[Recompute],
    iterations: Iterations | None = None,
    equal_cuts: bool = False,
    late_recompute: bool = False,
) -> Iterator[Option]:
    """Yield all combinations of schedule, number of micro-batches and recomputation, with bounds of their step times.

    Options that can't be planned or that are excluded are yielded too; `Option.why_not` then contains the reason.

    Args:
        profile: the seconds and bytes of the layers.
        ranks: the number of ranks of one pipeline.
        rows: the number of samples of a batch.
        deployment: the devices and links.
        schedules: the schedules to combine; None for the variants of all installed schedules.
        numbers: the numbers of micro-batches to combine.
        recompute: the settings of recomputation to combine.
        iterations: see `choose_option`.
        equal_cuts: see `choose_option`.
        late_recompute: see `choose_option`.
    """
    bounds: dict[tuple[object, ...], float] = {}
    for m in numbers:
        for proposed in schedules if schedules is not None else installed_variants(ranks, m, iterations is not None):
            for again in recompute:
                too_large = True  # stays True if the stages can't be placed
                try:
                    too_large = len(proposed.place_stages(ranks)) * m > MAX_FORWARDS
                    all_or_given = True if again == UNDECIDED else again
                    problem = Problem(proposed, ranks, rows, m, all_or_given, profile=profile, deployment=deployment)
                    solution = planner_of(proposed).solve(replace(problem, late_recompute=late_recompute))
                except PlanError as error:
                    yield Option(proposed, m, again, None, math.inf, why_not=str(error), too_large=too_large)
                    continue
                plan, schedule = solution.plan, solution.problem.schedule
                more = 1.0 if iterations is None else iterations(max(plan.versions)) / iterations(1)
                # its planner may cut batches of other sizes unequally, or this batch after some steps
                is_unequal = planner_of(schedule).may_cut_unequally
                is_unequal = is_unequal or any(len(cut.distinct_spans) > 1 for cut in plan.jobs)
                unequal = UNEQUAL_CUTS_REASON if equal_cuts and is_unequal else ""
                why_not = (
                    unequal or _explain_impossible(profile, plan) or ("" if math.isfinite(more) else STALENESS_REASON)
                )
                too_large = not why_not and schedules is None and _is_slow(schedule, plan)
                if too_large:
                    work = "ordering" if isinstance(schedule, Schedule) else "simulating"
                    why_not = (
                        f"{work} {_count_computations(plan)} computations takes long; name this schedule to use it"
                    )
                # any of the stages may be the only one that recomputes
                least = with_stages(plan, ()) if again == UNDECIDED else plan
                again_early = least.recompute, least.early_recompute
                key = plan.ranks, plan.jobs, *again_early, plan.split_backward, schedule.flushes
                if not why_not and key not in bounds:  # the bound holds only for batches that do not overlap
                    bounds[key] = step_bound(profile, least, deployment) if schedule.flushes else 0.0
                found = Option.from_plan(schedule, plan, bounds.get(key, math.inf), why_not, too_large)
                yield replace(found, more_batches=more, recompute=again)


def _explain_impossible(profile: ModelProfile, plan: Plan) -> str:
    """Return the reason why the plan can't be simulated with this profile, or an empty string."""
    if len(profile.layers) < plan.n_stages:
        return f"{len(profile.layers)} layers can't fill {plan.n_stages} stages"
    if plan.split_backward and not profile.has_split:
        return "the profile has no times of I and W"
    return ""


def _is_slow(schedule: Schedule | Policy, plan: Plan) -> bool:
    """Return whether making the order takes long, or whether the schedule is a policy and its simulation takes long."""
    is_policy = not isinstance(schedule, Schedule)
    return schedule.is_slow_to_order(plan) or (is_policy and _count_computations(plan) > MAX_POLICY_COMPUTATIONS)


def _count_computations(plan: Plan) -> int:
    return 2 * plan.n_stages * len(plan.spans(Kind.F, 0))


@dataclass(frozen=True)
class Option:
    """One way to train: a schedule with its settings, a number of micro-batches, and the use of recomputation.

    Attributes:
        schedule: the schedule with its settings.
        microbatches: the number of micro-batches of a batch; the largest one if stages or links have different numbers.
        recompute: the stages that keep only their input between forward and backward, as in `Problem.recompute`. It is
            `UNDECIDED` until the option is simulated if no more stages than necessary should recompute.
        plan: the plan without layers; None if the schedule has no such plan.
        bound: a lower bound of the seconds of a step, for every partition.
        fit: the best partition with its step time and memory; None if no partition fits, or if the option can't be the
            fastest.
        why_not: the reason why the option was excluded; empty for options with a fit.
        too_large: whether the option might be the fastest but would take too long to simulate.
        more_batches: the factor by which stale gradients increase the number of batches until the target is reached,
            compared with exact gradients.
    """

    schedule: Schedule | Policy
    microbatches: int
    recompute: Recompute
    plan: Plan | None
    bound: float = 0.0
    fit: Fit | None = None
    why_not: str = ""
    too_large: bool = False
    more_batches: float = 1.0

    @property
    def seconds(self) -> float:
        """The seconds of a step multiplied by `more_batches`; infinite without a fit."""
        return math.inf if self.fit is None else self.fit.seconds * self.more_batches

    @classmethod
    def from_plan(
        cls, schedule: Schedule | Policy, plan: Plan, bound: float, why_not: str = "", too_large: bool = False
    ) -> Option:
        """Return the option of a plan, before anything is simulated."""
        microbatches = max(len(spans) for cut in plan.jobs for spans in cut.distinct_spans)
        return cls(schedule, microbatches, recompute_setting(plan), plan, bound, why_not=why_not, too_large=too_large)

    @property
    def recomputation_text(self) -> str:
        """The stages that recompute, to follow the number of micro-batches in a sentence. Empty if no stage does."""
        if not self.recompute:
            return ""
        what = ", recomputation of some micro-batches" if self.keeps_microbatches else ", recomputation"
        if not isinstance(self.recompute, tuple):
            return what
        return f"{what} in stage{'s' * (len(self.recompute) > 1)} {', '.join(map(str, self.recompute))}"

    @property
    def keeps_microbatches(self) -> bool:
        """Whether a stage recomputes some of its micro-batches and keeps the activations of the others."""
        return self.fit is not None and bool(self.fit.plan.kept_microbatches)

    @property
    def n_forwards(self) -> int:
        """The number of forwards of a batch on all stages; 0 without a plan."""
        return 0 if self.plan is None else self.microbatches * self.plan.n_stages

    @property
    def label(self) -> str:
        """The name of the schedule with its settings, such as "kfkb k=2".

        Settings that are None, empty, or False by default are omitted.
        """
        given = ((f.name, getattr(self.schedule, f.name), f.default) for f in dataclass_fields(self.schedule))
        settings = [
            f"{name}={value}"
            for name, value, default in given
            if value not in (None, ()) and not (value is False is default)
        ]
        return " ".join([self.schedule.name, *settings])


@dataclass(frozen=True)
class Choice:
    """The fastest option, together with all options that were considered.

    Attributes:
        best: the fastest option.
        options: all options, the fastest first. Options without a fit come last.
        not_searched: sentences that name options which might be faster but were not simulated, and how to include them.
    """

    best: Option
    options: tuple[Option, ...]
    not_searched: tuple[str, ...] = ()

    @property
    def fit(self) -> Fit:
        """The partition of the best option with its step time and memory."""
        assert self.best.fit is not None
        return self.best.fit

    def rows(self, most: int = 12) -> list[dict[str, str | int | float]]:
        """Return the table as data, one dictionary for each of the first `most` options.

        Options that were simulated come first and have the keys `step_ms`, `peak_mib` and `slower`. The other options
        have the key `why_not`.
        """
        found: list[dict[str, str | int | float]] = []
        for option in self.options[:most]:
            some = isinstance(option.recompute, tuple) or option.keeps_microbatches
            row: dict[str, str | int | float] = {
                "schedule": option.label,
                "microbatches": option.microbatches,
                "recompute": "some" if some else "yes" if option.recompute else "no",
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
