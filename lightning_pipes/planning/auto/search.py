"""The search for the fastest way to train: every option that might be the fastest is simulated."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

from lightning_pipes.cost import Cluster, Deployment, Device, ModelProfile
from lightning_pipes.cost.deployment import as_deployment
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import MAX_FORWARDS, DeadlockError, Plan, PlanError, Policy, Program, ProgramError, Schedule
from lightning_pipes.planning.auto.choice import Choice, Option, list_options, most_microbatches, numbers_to_try
from lightning_pipes.planning.candidates import TuningPlanner
from lightning_pipes.planning.fit import Fit, evaluate_plan, fit_layers, improve_cuts
from lightning_pipes.planning.formatting import Progress, schedule_label
from lightning_pipes.planning.planner import (
    UNDECIDED,
    Planner,
    Problem,
    Recompute,
    Solution,
    planner_of,
    recompute_setting,
)
from lightning_pipes.planning.stage_recompute import explain_recomputation, fit_recomputed
from lightning_pipes.planning.staleness import Iterations
from lightning_pipes.sim import makespan
from lightning_pipes.sim.loops.kernel import UNLIMITED

MAX_REFINED_OPTIONS = 4
REFINED_TIME_RATIO = 1.05
"""`MAX_REFINED_OPTIONS` is the number of the best options whose cuts are improved by moving single layers. Only options
whose step time is less than `REFINED_TIME_RATIO` times the best step time are improved."""
MAX_BOUND_RATIO = 0.995
"""An option whose lower bound is at least this multiple of the best step time is not simulated."""
LARGE_STEP_FORWARDS = 2_000
"""The number of forwards in a step above which an option is also skipped if related options take more than
`RELATED_TIME_RATIO` times the best step time."""
RELATED_TIME_RATIO = 1.15
MAX_SIMULATED_FORWARDS = 2**21
"""The largest total number of forwards of the large options that one search simulates. Each option counts once."""
UNFIT_OPTIONS_PER_SIMULATION = 4
"""This number of options that do not fit into memory costs as much as one option that is simulated."""
SKIPPED_PREFIX = "not simulated: "
"""The prefix of `Option.why_not` for options that were skipped because of the step times of related options."""
MAX_LISTED_OPTIONS = 8
"""The largest number of options that a sentence lists by name."""


def choose_option(
    profile: ModelProfile,
    ranks: int,
    rows: int,
    cluster: Cluster | Deployment | None = None,
    schedules: Iterable[Schedule | Policy] | None = None,
    microbatches: Sequence[int] = (),
    recompute: Sequence[Recompute] = (False, UNDECIDED),
    progress: Progress = lambda what, done: None,
    least: int = 1,
    iterations: Iterations | None = None,
    equal_cuts: bool = False,
    late_recompute: bool = False,
) -> Choice:
    """Return the fastest way to train batches of `rows` samples on `ranks` ranks within the memory of the devices.

    By default, only schedules that compute the same result as a single process are considered. If `iterations` is
    given, schedules with stale gradients are considered too, and the option with the smallest product of the number of
    batches and the seconds of a batch is chosen (DynPipe, S IV-C). The number of batches is T(S) for a plan that keeps
    S versions of the weights, and T(1) for exact gradients.

    Options are simulated in the order of a lower bound of their step time. Once the lower bound of an option is less
    than 0.5 % below the best simulated time, the option is not simulated. The search limits its own time and memory:
    options that are too large to be simulated are skipped, and `Choice.not_searched` lists them.

    Args:
        profile: the seconds and bytes of the layers.
        ranks: the number of ranks of one pipeline.
        rows: the number of samples that one pipeline receives in a batch. Each replica has its own samples.
        cluster: the devices of one pipeline, or a deployment with several replicas; by default devices without limits.
        schedules: the schedules to compare; by default the variants of all installed schedules.
        microbatches: the numbers of micro-batches to try; by default numbers that double, starting at about half the
            number of ranks.
        recompute: the settings of recomputation to try, as in `Problem.recompute`. `UNDECIDED` tries recomputation in
            all stages except the last, and, if that fits, in as few of them as necessary. It is only simulated if the
            option does not fit without recomputation, or if memory then does not allow the most even stages.
        progress: is called with a description of the current work and the share of the work that is done, from 0 to 1.
        least: the smallest number of samples of a micro-batch, if `microbatches` is not given.
        iterations: T(S), the number of batches until the target is reached; None excludes stale gradients.
        equal_cuts: whether all stages and links must cut a batch into the same micro-batches.
        late_recompute: whether stages recompute only when the gradient has arrived; see `Problem.late_recompute`.

    Raises:
        PlanError: there is no schedule, or no option fits. The message names what the closest option lacks.
    """
    deployment = as_deployment(cluster or Cluster((Device(),) * ranks))
    tried = microbatches or [m for m in numbers_to_try(ranks, rows) if rows // m >= least] or [1]
    # if batches overlap, a single micro-batch per batch fills the pipeline
    if iterations is not None and not microbatches:
        tried = [1, *tried]
    numbers = [m for m in dict.fromkeys(tried) if m <= rows]
    given = list(schedules) if schedules is not None else None
    with _without_garbage_collection():
        every = []
        options = list_options(
            profile, ranks, rows, deployment, given, numbers, recompute, iterations, equal_cuts, late_recompute
        )
        for option in options:
            progress(f"bound of {option.label}, {option.microbatches} micro-batches", 0.0)
            every.append(option)
        search = _Search(profile, deployment)
        in_turn = sorted(every, key=lambda o: (o.bound, bool(o.recompute), -o.microbatches))
        steps = len(in_turn) + MAX_REFINED_OPTIONS
        for number, option in enumerate(in_turn):
            progress(f"{option.label}, {option.microbatches} micro-batches", number / steps)
            search.evaluate_option(option)
        if given is None:
            search.add_retuned()
        found = sorted(search.found, key=_by_time)
        most = 0 if microbatches else most_microbatches(ranks, rows)
        left_out = tuple(_describe_not_searched(found, ranks, most, rows // least))
        if not found:
            raise PlanError("there is no schedule to choose from")
        if found[0].fit is None:
            raise PlanError(" ".join([f"no schedule fits: {found[0].why_not}", *left_out]))
        close = REFINED_TIME_RATIO * found[0].seconds
        for number, option in enumerate(found[:MAX_REFINED_OPTIONS]):
            progress(f"cuts of {option.label}", (len(in_turn) + number) / steps)
            if option.fit is not None and option.seconds < close:
                found[number] = replace(option, fit=improve_cuts(profile, option.fit, deployment))
        found.sort(key=_by_time)
    return Choice(found[0], tuple(found), left_out)


def _describe_not_searched(found: Sequence[Option], ranks: int, most: int, possible: int) -> Iterator[str]:
    """Yield sentences on options that may be faster but were not simulated.

    Args:
        found: all options.
        ranks: the number of ranks of one pipeline.
        most: the largest number of micro-batches that was tried; 0 if the caller gave the numbers.
        possible: the largest number of micro-batches that the batch allows.
    """
    if 0 < most < possible:
        can = MAX_FORWARDS // ranks
        way_out = (
            "set microbatches=[...] to try more of them"
            if can > most
            else (
                f"an order has at most {MAX_FORWARDS} forwards on all stages; pipelines with fewer ranks and more "
                "replicas may have more"
            )
        )
        yield f"Not searched: {most + 1} to {possible} micro-batches; {way_out}."
    large: dict[str, list[int]] = {}
    for option in found:
        if option.too_large:
            large.setdefault(option.label, []).append(option.microbatches)
    if large:
        names = [f"{label} ({', '.join(map(str, sorted(set(numbers))))})" for label, numbers in large.items()]
        more = f" and {len(names) - MAX_LISTED_OPTIONS} more" if len(names) > MAX_LISTED_OPTIONS else ""
        yield (
            "Not searched, because the plan is too large with this number of micro-batches: "
            f"{', '.join(names[:MAX_LISTED_OPTIONS])}{more}. To simulate one of them, name a schedule, or use fewer "
            "micro-batches or fewer ranks."
        )
    beside = sum(option.why_not.startswith(SKIPPED_PREFIX) for option in found)
    if beside:
        yield f"Not simulated: {beside} large options, because related options take much longer than the best one."


class _Search:
    """Evaluates options one by one and fits layers to each option that may be the fastest.

    `found` contains all evaluated options; `Option.why_not` is the reason for every option without a fit.
    """

    def __init__(self, profile: ModelProfile, deployment: Deployment) -> None:
        self._profile, self._deployment = profile, deployment
        self._best = math.inf
        # the keys are label, number of micro-batches, and whether stages recompute
        self._seconds: dict[tuple[str, int, bool], float] = {}
        self._before: dict[tuple[type, int, bool], float] = {}  # seconds of the last schedule of each class
        self._left_out: set[tuple[str, int]] = set()  # label and number of micro-batches, without recomputation
        self._limited: set[tuple[str, int]] = set()  # the same for options whose partition memory limits
        self._simulated = 0  # number of forwards
        self.found: list[Option] = []

    def evaluate_option(self, option: Option) -> None:
        """Simulate the option, or skip it with a reason. Options must arrive in ascending order of their bounds."""
        why_not = option.why_not or self._reason_to_skip(option)
        if why_not:
            self._leave_out(replace(option, why_not=why_not))
            return
        large = option.n_forwards if option.n_forwards > LARGE_STEP_FORWARDS else 0
        if large and self._simulated and self._simulated + large > MAX_SIMULATED_FORWARDS:
            why_not = f"too many: the search has simulated {self._simulated} forwards, and stops there"
            self._leave_out(replace(option, why_not=why_not, too_large=True))
            return
        seconds = math.inf
        try:
            assert option.plan is not None, "the reason would be given"
            option = self._fit_option(option)
            seconds = option.seconds
            if option.fit is not None and option.fit.is_limited and not option.recompute:
                self._limited.add((option.label, option.microbatches))
            self._best = min(self._best, seconds)
        except (PlanError, DeadlockError, ProgramError) as error:
            option = replace(option, why_not=str(error))
        self._simulated += large if option.fit is not None else large // UNFIT_OPTIONS_PER_SIMULATION
        self._note(option, seconds)
        self.found.append(option)
        self._forget_orders()

    def _leave_out(self, option: Option) -> None:
        if not option.recompute:
            self._left_out.add((option.label, option.microbatches))
        self.found.append(option)

    def _fit_option(self, option: Option) -> Option:
        """Return the option with its best partition, in which no more stages recompute than necessary.

        Raises:
            PlanError: no partition fits.
        """
        given = option.plan
        assert given is not None
        profile, deployment, schedule = self._profile, self._deployment, option.schedule
        if option.recompute != UNDECIDED:
            return replace(option, fit=fit_layers(profile, schedule, given, deployment, trials=0))
        late = isinstance(schedule, Schedule) and not given.early_recompute
        fit = fit_recomputed(profile, schedule, given, deployment, trials=0, late=late, settings=(True,))
        return replace(option, fit=fit, recompute=recompute_setting(fit.plan))

    def _forget_orders(self) -> None:
        """Drop the orders of large plans unless their cuts may still be improved."""
        ordered = [n for n, o in enumerate(self.found) if o.fit is not None and isinstance(o.fit.given, Program)]
        ordered.sort(key=lambda n: _by_time(self.found[n]))
        for number in ordered[MAX_REFINED_OPTIONS:]:
            option = self.found[number]
            if option.fit is not None and option.n_forwards > LARGE_STEP_FORWARDS:
                self.found[number] = replace(option, fit=option.fit.without_order(option.schedule))

    def add_retuned(self) -> None:
        """Add the fastest candidates of planners that take the links into account.

        They are built for the best numbers of micro-batches, with the cuts that were found for these, and help if links
        are slow.
        """
        fits = [
            o
            for o in sorted(self.found, key=_by_time)
            if o.fit and o.schedule.flushes and o.fit.plan.n_stages == o.fit.plan.n_ranks
        ]
        best = {(o.microbatches, o.recompute): o for o in reversed(fits[:MAX_REFINED_OPTIONS])}
        planners = dict.fromkeys(planner_of(o.schedule) for o in self.found)
        for option in reversed(best.values()):
            if option.n_forwards > LARGE_STEP_FORWARDS:
                continue
            for planner in planners:
                if isinstance(planner, TuningPlanner) and option.fit is not None:
                    self._tune_option(planner, option, option.fit)

    def _tune_option(self, planner: TuningPlanner, option: Option, fit: Fit) -> None:
        devices = self._deployment.pipeline.devices[: fit.plan.n_ranks]
        limits = [UNLIMITED if device.memory is None else device.memory for device in devices]
        try:
            offered = planner.list_candidates(replace(fit.plan, layers=()), fit.costs, limits)
        except PlanError:
            return
        orders = [c.schedule.program(c.plan) if isinstance(c.schedule, Schedule) else c.schedule for c in offered]
        steps = [makespan(order, c.plan, fit.costs) for order, c in zip(orders, offered, strict=True)]
        number = min(range(len(steps)), key=steps.__getitem__)
        if steps[number] / 1e9 < self._best * MAX_BOUND_RATIO:
            chosen = offered[number]
            made = evaluate_plan(
                self._profile, orders[number], replace(chosen.plan, layers=fit.plan.layers), self._deployment
            )
            self._best = min(self._best, made.seconds)
            option = Option.from_plan(chosen.schedule, chosen.plan, option.bound)
            self.found.append(replace(option, fit=made))

    def _note(self, option: Option, seconds: float) -> None:
        m, again = option.microbatches, bool(option.recompute)
        self._seconds[option.label, m, again] = self._before[type(option.schedule), m, again] = seconds

    def _reason_to_skip(self, option: Option) -> str:
        """Return the reason why the option is certainly not the fastest or, in a large plan, is unlikely to be."""
        m, again = option.microbatches, bool(option.recompute)
        if option.bound >= self._best * MAX_BOUND_RATIO:
            return f"can't beat the best: at least {1e3 * option.bound:.1f} ms"
        fits = self._seconds.get((option.label, m, False), math.inf) < math.inf
        if again and fits and (option.label, m) not in self._limited:
            return "fits without recomputation, which would only make it slower"
        if option.recompute == UNDECIDED and (option.label, m) in self._left_out:
            return "not compared without recomputation, which would only make it slower"
        if option.n_forwards <= LARGE_STEP_FORWARDS:
            return ""
        for others, seconds in (
            ("with twice as many micro-batches", self._seconds.get((option.label, 2 * m, again), 0.0)),
            ("with other settings", self._before.get((type(option.schedule), m, again), 0.0)),
        ):
            if seconds > RELATED_TIME_RATIO * self._best or seconds == math.inf:
                self._note(option, seconds)
                takes = "does not fit" if seconds == math.inf else f"takes {1e3 * seconds:.1f} ms"
                return f"{SKIPPED_PREFIX}{others} it {takes}"
        return ""


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the cyclic garbage collector in the context.

    The search creates millions of instructions without reference cycles, and looking for cycles takes a third of its
    time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _by_time(option: Option) -> tuple[bool, float]:
    return option.fit is None, option.bound if option.fit is None else option.seconds


@dataclass(frozen=True)
class AutoPlanner(Planner):
    """Chooses the fastest installed schedule, its micro-batches, recomputation and layers with `choose_option`.

    A plan does not contain its schedule. `solve` therefore returns the chosen schedule in the problem of the solution,
    and `plan` chooses everything except the schedule. The number of micro-batches and recomputation are kept if the
    problem specifies them. Without a profile, the planner of the problem's schedule makes the plan.

    Attributes:
        iterations: see `choose_option`.
        equal_cuts: see `choose_option`.
    """

    iterations: Iterations | None = None
    equal_cuts: bool = False
    wants_profile: ClassVar[bool] = True

    @property
    def may_cut_unequally(self) -> bool:
        return not self.equal_cuts

    @property
    def uses_profile(self) -> bool:
        return True

    def plan(self, problem: Problem) -> Plan:
        return self._solve_problem(problem, [problem.schedule]).plan

    def solve(self, problem: Problem) -> Solution:
        return self._solve_problem(problem, None)

    def profile_sizes(self, rows: int, stages: int, microbatches: int | None) -> tuple[int, ...]:
        if microbatches is not None:
            return super().profile_sizes(rows, stages, microbatches)
        whole = [] if self.iterations is None else [rows]
        return tuple(sorted({max(1, n) for n in (1, rows // (4 * stages), -(-rows // stages), *whole)}))

    def most_rows(self, rows: int, stages: int, microbatches: int | None) -> int:
        if microbatches is not None:
            return super().most_rows(rows, stages, microbatches)
        return rows if self.iterations is not None else -(-rows // max(1, stages // 2))

    def _solve_problem(self, problem: Problem, schedules: Sequence[Schedule | Policy] | None) -> Solution:
        profile, rows = problem.profile, problem.rows
        if profile is None:
            return planner_of(problem.schedule).solve(problem)
        choice = choose_option(
            profile,
            problem.ranks,
            rows,
            problem.deployment,
            schedules,
            microbatches=() if problem.microbatches is None else [min(problem.microbatches, rows)],
            recompute=(False, UNDECIDED) if problem.recompute in (False, UNDECIDED) else (problem.recompute,),
            least=problem.least,
            iterations=self.iterations,
            equal_cuts=self.equal_cuts,
            late_recompute=problem.late_recompute,
        )
        best, plan = choice.best, choice.fit.plan
        why = _format_reason(choice)
        if best.recompute and problem.recompute in (False, UNDECIDED) and problem.deployment is not None:
            why += f"; {explain_recomputation(profile, choice.fit, problem.deployment)}"
        solved = replace(
            problem,
            schedule=best.schedule,
            microbatches=best.microbatches,
            recompute=best.recompute,
            kept_microbatches=plan.kept_microbatches,
            layers=plan.layers,
        )
        return Solution(solved, plan, why, str(choice))


def _format_reason(choice: Choice) -> str:
    best = choice.best
    again = best.recomputation_text
    again += "" if best.schedule.flushes else f", stale gradients (x {best.more_batches:.3g} batches)"
    pieces = f"{best.microbatches} micro-batch{'es' if best.microbatches > 1 else ''}"
    return (
        f"schedule='auto' selected {schedule_label(best.schedule)} with {pieces}{again}, and stages that begin at "
        f"layers {choice.fit.cuts}. The predicted step time is {seconds_text(1e9 * choice.fit.seconds)}"
    )
