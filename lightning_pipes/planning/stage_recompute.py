"""The choice of the stages that recompute, so that every rank fits into its memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import ClassVar

from lightning_pipes.cost import Cluster, CostModel, Deployment, Device, ModelProfile
from lightning_pipes.cost.deployment import as_deployment
from lightning_pipes.cost.units import bytes_text
from lightning_pipes.ir import Instruction, Kind, Plan, PlanError, Policy, Program, Schedule
from lightning_pipes.planning.fit import Fit, evaluate_plan, finite_orders, fit_layers, price_stages
from lightning_pipes.planning.memory import row_peak
from lightning_pipes.planning.planner import (
    UNDECIDED,
    Planner,
    Problem,
    Recompute,
    Solution,
    planner_of,
    recompute_setting,
)
from lightning_pipes.sim import simulate

MAX_EXACT_STAGES = 6
"""The number of stages of a rank up to which all subsets of them are considered."""
MAX_CUTS = 4
"""The largest number of times that layers are cut again because other stages recompute."""
MAX_LISTED_RANKS = 4
"""The largest number of ranks whose memory a sentence lists."""


@dataclass(frozen=True)
class RecomputeChoice:
    """The stages that recompute, and the resulting memory.

    Attributes:
        stages: the numbers of the stages that recompute.
        kept_microbatches: the micro-batches whose activations these stages keep, as in `Plan.kept_microbatches`.
        plain_peaks: the peak memory of each rank in bytes if no stage recomputes.
        peaks: the peak memory of each rank in bytes if these stages recompute.
        limits: the memory limit of each rank in bytes, or None.
    """

    stages: tuple[int, ...]
    kept_microbatches: tuple[tuple[int, int], ...]
    plain_peaks: tuple[int, ...]
    peaks: tuple[int, ...]
    limits: tuple[int | None, ...]

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return all(limit is None or size <= limit for size, limit in zip(self.peaks, self.limits, strict=True))

    def check(self, plan: Plan, costs: CostModel) -> None:
        """Check that every rank has enough memory.

        Raises:
            PlanError: a rank has not. The message names the rank that lacks the most memory, and its stages.
        """
        if self.fits:
            return
        short = [0 if limit is None else size - limit for size, limit in self._pairs]
        rank = max(range(plan.n_ranks), key=lambda r: short[r])
        weights = costs.resident_bytes(rank, plan)
        stages = plan.stages[rank]
        again = ", ".join(str(stage) for stage in stages if stage in self.stages)
        how = f"although stage {again} recomputes" if again else "and recomputation would not reduce this"
        raise PlanError(
            f"recompute='auto': stage {', '.join(map(str, stages))} on rank {rank} needs "
            f"{bytes_text(self.peaks[rank])} and has {bytes_text(self.limits[rank] or 0)}, {how} "
            f"({bytes_text(weights)} are weights and optimizer states, {bytes_text(self.peaks[rank] - weights)} are "
            "activations). Every rank must have enough memory for its stages. Use more ranks, more micro-batches, or a "
            "schedule that holds fewer micro-batches"
        )

    def explain(self, plan: Plan) -> str:
        """Return a clause for the user that names the stages that recompute, and the ranks that require it."""
        if not self.stages:
            known = [(size / limit, -rank) for rank, (size, limit) in enumerate(self._pairs) if limit]
            if not known:
                return "no stage recomputes, because no rank has a memory limit"
            rank = -max(known)[1]
            used = f"{bytes_text(self.peaks[rank])} of {bytes_text(self.limits[rank] or 0)} on rank {rank}"
            return f"no stage recomputes, because every rank has enough memory ({used})"
        named = " and ".join(filter(None, [", ".join(map(str, self.stages[:-1])), str(self.stages[-1])]))
        verb = f"stage {named} recomputes" if len(self.stages) == 1 else f"stages {named} recompute"
        ranks = sorted({plan.ranks[stage] for stage in self.stages})
        some = [
            f"stage {stage}: {every - kept} of every {every} micro-batches"
            for stage, (kept, every) in enumerate(self.kept_microbatches)
            if kept
        ]
        reasons = [
            f"rank {rank} would need {bytes_text(self.plain_peaks[rank])} of {bytes_text(self.limits[rank] or 0)} "
            f"without it, and needs {bytes_text(self.peaks[rank])} with it"
            for rank in ranks[:MAX_LISTED_RANKS]
        ]
        if len(ranks) > MAX_LISTED_RANKS:
            reasons.append(f"so do {len(ranks) - MAX_LISTED_RANKS} other ranks")
        parts = f" ({', '.join(some)})" if some else ""
        return f"{verb}{parts}, because {'; '.join(reasons)}"

    @property
    def _pairs(self) -> list[tuple[int, int | None]]:
        return list(zip(self.peaks, self.limits, strict=True))


def with_stages(plan: Plan, stages: Iterable[int], early: bool = False, kept: tuple[tuple[int, int], ...] = ()) -> Plan:
    """Return the plan in which exactly these stages recompute.

    Args:
        plan: the plan.
        stages: the numbers of the stages.
        early: see `Plan.early_recompute`.
        kept: see `Plan.kept_microbatches`.
    """
    chosen = {*stages}
    again = tuple(stage in chosen for stage in range(plan.n_stages)) if chosen else ()
    return replace(
        plan, recompute=again, early_recompute=early and bool(chosen), kept_microbatches=kept if chosen else ()
    )


def explain_recomputation(profile: ModelProfile, fit: Fit, deployment: Deployment) -> str:
    """Return a clause that names the stages that recompute in a plan, and the ranks that require it."""
    plain = evaluate_plan(profile, fit.order, with_stages(fit.plan, ()), deployment).peak_bytes
    limits = tuple(device.memory for device in deployment.pipeline.devices[: fit.plan.n_ranks])
    stages = tuple(stage for stage, again in enumerate(fit.plan.recompute) if again)
    return RecomputeChoice(stages, fit.plan.kept_microbatches, plain, fit.peak_bytes, limits).explain(fit.plan)


def choose_stages(
    order: Program | Policy, plan: Plan, costs: CostModel, limits: Sequence[int | None]
) -> RecomputeChoice:
    """Return the stages that recompute so that each rank fits into its limit, at the smallest cost in time.

    The memory of a rank depends only on its own instructions. For each rank, the stages with the fewest seconds of
    recomputed forwards are therefore chosen independently of other ranks. The last stage never recomputes. If a rank
    does not fit with any of its stages, the choice with the smallest peak is returned; see `RecomputeChoice.fits`.

    The order of a policy depends on the times of the stages, and thus on the stages that recompute. Stages are then
    added until the simulated order fits.

    Args:
        order: the finite order of the plan.
        plan: the plan. Its recomputation is ignored.
        costs: the seconds and bytes of the stages.
        limits: the bytes of each rank; None for a rank without a limit.
    """
    plan = with_stages(plan, ())
    if isinstance(order, Program):
        plain = _peaks(order, plan, costs)
        stages = _choose_for_program(order, plan, costs, limits)
    else:
        plain = simulate(order, plan, costs).peak_bytes
        stages = _choose_for_policy(order, plan, costs, limits)
    kept = _keep_microbatches(order, plan, costs, limits, stages) if isinstance(order, Program) else ()
    chosen = with_stages(plan, stages, kept=kept)
    peaks = _peaks(order, chosen, costs) if isinstance(order, Program) else simulate(order, chosen, costs).peak_bytes
    return RecomputeChoice(stages, kept, plain, peaks, tuple(limits))


def _peaks(program: Program, plan: Plan, costs: CostModel) -> tuple[int, ...]:
    """Return the peak of each rank. It is the same if R is an instruction of its own directly before the backward."""
    return tuple(row_peak(row, rank, plan, costs) for rank, row in enumerate(program.head))


def _choose_for_program(
    program: Program, plan: Plan, costs: CostModel, limits: Sequence[int | None], chosen: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Return the stages that recompute in a program. They include the stages that are already `chosen`."""
    seconds = [
        sum(costs.seconds_at(Kind.R, stage, span.rows) for span in plan.spans(Kind.B, stage))
        for stage in range(plan.n_stages)
    ]
    found = [*chosen]
    for rank, limit in enumerate(limits):
        if limit is None:
            continue
        given = tuple(stage for stage in chosen if plan.ranks[stage] == rank)
        open_stages = [s for s in plan.stages[rank] if s < plan.n_stages - 1 and s not in given]

        def peak(stages: Sequence[int], rank: int = rank, given: tuple[int, ...] = given) -> int:
            return row_peak(program.head[rank], rank, with_stages(plan, (*given, *stages)), costs)

        choose = _choose_exactly if len(open_stages) <= MAX_EXACT_STAGES else _choose_greedily
        found += choose(open_stages, seconds, limit, peak)
    return tuple(sorted(found))


def _keep_microbatches(
    program: Program, plan: Plan, costs: CostModel, limits: Sequence[int | None], stages: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the micro-batches whose activations recomputing stages can keep, as in `Plan.kept_microbatches`.

    A stage that holds n micro-batches at a time keeps the first a of every n consecutive ones, for the largest a that
    fits. The stages of a rank with the longest forwards keep micro-batches first.
    """
    if any(len(cut.distinct_spans) > 1 for cut in plan.jobs):
        return ()  # a backward could need activations that are kept and others that are not
    kept = [(0, 1)] * plan.n_stages
    for stage in sorted(stages, key=lambda s: -costs.seconds_at(Kind.R, s, plan.spans(Kind.B, s)[0].rows)):
        rank = plan.ranks[stage]
        row, limit, every = program.head[rank], limits[rank], _held_microbatches(program.head[rank], stage)
        assert limit is not None, "a rank without a limit does not recompute"
        for number in range(every - 1, 0, -1):
            kept[stage] = number, every
            if row_peak(row, rank, with_stages(plan, stages, kept=tuple(kept)), costs) <= limit:
                break
            kept[stage] = 0, 1
    return tuple(kept) if any(number for number, _ in kept) else ()


def _held_microbatches(row: Sequence[Instruction], stage: int) -> int:
    """Return the largest number of micro-batches that a stage holds between forward and backward."""
    held = most = 0
    for i in row:
        if i.stage == stage and i.kind in (Kind.F, Kind.B, Kind.W):
            held += 1 if i.kind is Kind.F else -1
            most = max(most, held)
    return most


def _choose_exactly(
    stages: Sequence[int], seconds: Sequence[float], limit: int, peak: Callable[[Sequence[int]], int]
) -> Sequence[int]:
    subsets = chain.from_iterable(combinations(stages, n) for n in range(len(stages) + 1))
    in_turn = sorted(subsets, key=lambda subset: (sum(seconds[s] for s in subset), len(subset), subset))
    fitting = (subset for subset in in_turn if peak(subset) <= limit)
    found = next(fitting, None)
    return min(in_turn, key=peak) if found is None else found


def _choose_greedily(
    stages: Sequence[int], seconds: Sequence[float], limit: int, peak: Callable[[Sequence[int]], int]
) -> Sequence[int]:
    """Add the stage that saves the most bytes per second until the rank fits, and then drop unnecessary stages."""
    chosen: list[int] = []
    now = peak(chosen)
    while now > limit and len(chosen) < len(stages):
        left = {s: peak([*chosen, s]) for s in stages if s not in chosen}
        best = max(left, key=lambda s: (now - left[s]) / seconds[s] if seconds[s] else math.inf)
        chosen, now = [*chosen, best], left[best]
    for stage in sorted(chosen, key=lambda s: -seconds[s]):
        fewer = [s for s in chosen if s != stage]
        if now <= limit and peak(fewer) <= limit:
            chosen = fewer
    return chosen


def _choose_for_policy(policy: Policy, plan: Plan, costs: CostModel, limits: Sequence[int | None]) -> tuple[int, ...]:
    chosen: tuple[int, ...] = ()
    while True:
        now = with_stages(plan, chosen)
        program = simulate(policy, now, costs).program()
        further = _choose_for_program(program, plan, costs, limits, chosen)
        if further == chosen:  # every rank fits, or no other stage of the ranks that do not fit can recompute
            return chosen
        chosen = further


@dataclass(frozen=True)
class RecomputePlanner(Planner):
    """Chooses the stages that recompute, for the plans of another planner.

    The plans of the inner planner without recomputation, and with recomputation in all stages, are the first
    candidates. In each of them, only those stages recompute that have to, so that no stage does if memory is
    sufficient. Because some stages then take longer, layers are cut again, a few times, and the candidate with the
    shortest simulated step is chosen.

    The choice stays open, and no stage recomputes, if the bytes of layers are unknown or if no order can be simulated;
    `undecided_reason` returns the reason. Problems in which recomputation is decided are passed to the inner planner.

    Attributes:
        inner: the planner that makes the plans.
    """

    inner: Planner
    wants_profile: ClassVar[bool] = True

    @property
    def user_chose_microbatches(self) -> bool:
        return self.inner.user_chose_microbatches

    @property
    def may_cut_unequally(self) -> bool:
        return self.inner.may_cut_unequally

    @property
    def uses_profile(self) -> bool:
        return True

    @property
    def has_memory_limit(self) -> bool:
        return True

    def plan(self, problem: Problem) -> Plan:
        return self.solve(problem).plan

    def solve(self, problem: Problem) -> Solution:
        """Return the solution with the chosen stages, in which `Problem.recompute` is decided if possible.

        Raises:
            PlanError: no plan of the inner planner fits, even if stages recompute.
        """
        if problem.recompute != UNDECIDED:
            return self.inner.solve(problem)
        if undecided_reason(problem):
            return self.inner.solve(problem)
        found = choose_recomputation(
            lambda setting: self.inner.solve(replace(problem, recompute=setting)),
            varies=not problem.layers or self.inner.uses_profile,
        )
        again, plan, choice = found.solution.problem, found.solution.plan, found.choice
        why = "\n".join(filter(None, [found.solution.why, f"recompute='auto': {choice.explain(plan)}"]))
        decided = replace(again, recompute=recompute_setting(plan), kept_microbatches=plan.kept_microbatches)
        return replace(found.solution, problem=decided, why=why)

    def profile_sizes(self, rows: int, stages: int, microbatches: int | None) -> tuple[int, ...]:
        return self.inner.profile_sizes(rows, stages, microbatches)

    def most_rows(self, rows: int, stages: int, microbatches: int | None) -> int:
        return self.inner.most_rows(rows, stages, microbatches)


def undecided_reason(problem: Problem) -> str:
    """Return the reason why the stages that recompute can't be chosen for a problem, or an empty text if they can."""
    schedule = problem.schedule
    if problem.profile is None or problem.deployment is None:
        return "the layers are not measured"
    is_policy = isinstance(schedule, Policy)
    if is_policy and not schedule.flushes:
        return f"schedule {schedule.name!r} orders overlapping batches while they run"
    simulates = is_policy or planner_of(schedule).has_memory_limit
    if simulates and schedule.splits_backward and not problem.profile.has_split:
        return f"schedule {schedule.name!r} splits backwards, and the times of the two parts are not measured"
    return ""


@dataclass(frozen=True)
class RecomputedSolution:
    """A solution with layers and recomputation.

    Attributes:
        solution: the solution. `Plan.recompute` of its plan is decided.
        choice: the stages that recompute, and the resulting memory.
        fit: the simulated step; None if its time is unknown.
    """

    solution: Solution
    choice: RecomputeChoice
    fit: Fit | None

    @property
    def seconds(self) -> float:
        """The simulated seconds of a step, or 0 if they are unknown."""
        return 0.0 if self.fit is None else self.fit.seconds


def choose_recomputation(
    solve: Callable[[Recompute], Solution], varies: bool, settings: Sequence[Recompute] = (False, True)
) -> RecomputedSolution:
    """Return the fastest solution that fits into the memory of its devices, in which as few stages recompute as needed.

    Args:
        solve: returns the solution, with layers, for a value of `Problem.recompute`. The problem of the solution has a
            profile and a deployment. It may raise a `PlanError` if no partition fits.
        varies: whether layers, or other parts of the solution, depend on the value. Otherwise, the first solution that
            fits is returned.
        settings: the values to begin with.

    Raises:
        PlanError: no solution fits. The message names the rank that lacks the most memory with recomputation.
    """
    settings = [*settings]
    fitting: list[RecomputedSolution] = []
    refused: list[PlanError] = []
    for number in range(MAX_CUTS):
        if number >= len(settings):
            break
        try:
            found = _recompute_where_needed(solve(settings[number]))
        except PlanError as error:
            refused.append(error)
            continue
        fitting.append(found)
        if not varies or all(limit is None for limit in found.choice.limits):
            break
        chosen = recompute_setting(found.solution.plan)
        if chosen not in settings:
            settings.append(chosen)
    if not fitting:
        raise refused[-1]
    # layers that were cut for these stages explain themselves better than layers that were cut for others
    return min(reversed(fitting), key=lambda each: each.seconds)


def fit_recomputed(
    profile: ModelProfile,
    schedule: Schedule | Policy,
    plan: Plan,
    cluster: Cluster | Deployment | None = None,
    trials: int = 60,
    late: bool = False,
    settings: Sequence[Recompute] = (False, True),
) -> Fit:
    """Return the fit of a plan in which as few stages recompute as the memory of the devices requires.

    Args:
        profile: the seconds and bytes of the layers.
        schedule: the schedule that orders the plan.
        plan: the plan. Its recomputation is ignored. If it has layers, they are kept; otherwise, the layers are fitted.
        cluster: the devices of one pipeline, or a deployment with several replicas; by default devices without limits.
        trials: see `fit_layers`.
        late: see `Problem.late_recompute`.
        settings: the recomputation for which layers are fitted first. Without False, some stage must recompute.

    Raises:
        PlanError: no partition fits, even if stages recompute; or see `fit_layers`.
    """
    deployment = as_deployment(cluster or Cluster((Device(),) * plan.n_ranks))
    problem = Problem(
        schedule, plan.n_ranks, plan.jobs[0].rows, profile=profile, deployment=deployment, late_recompute=late
    )
    early = isinstance(schedule, Schedule) and not late

    def cut(setting: Recompute) -> Solution:
        stages = replace(problem, recompute=setting).recomputing_stages(plan.n_stages)
        asked = with_stages(plan, (stage for stage, again in enumerate(stages) if again), early)
        cut = asked if plan.layers else fit_layers(profile, schedule, asked, deployment, trials).plan
        return Solution(problem, cut)

    found = choose_recomputation(cut, not plan.layers, settings).fit
    assert found is not None, "the layers could not be fitted without times"
    return found


def _recompute_where_needed(solution: Solution) -> RecomputedSolution:
    """Return the solution in which those stages recompute that have to.

    Raises:
        PlanError: a rank does not fit, whichever stages recompute.
    """
    problem, plan = solution.problem, solution.plan
    profile, deployment, schedule = problem.profile, problem.deployment, problem.schedule
    assert profile is not None
    assert deployment is not None
    order = schedule.program(replace(plan, layers=())) if isinstance(schedule, Schedule) else schedule
    costs = price_stages(profile, plan, deployment)
    of_ranks = [[device.memory, planner_of(schedule).memory_limit] for device in deployment.pipeline.devices]
    limits = [min((m for m in each if m is not None), default=None) for each in of_ranks[: plan.n_ranks]]
    choice = choose_stages(finite_orders(order)[-1], replace(plan, layers=()), costs, limits)
    choice.check(plan, costs)
    early = isinstance(schedule, Schedule) and not problem.late_recompute
    plan = with_stages(plan, choice.stages, early, choice.kept_microbatches)
    timed = profile.has_split or not plan.split_backward
    fit = evaluate_plan(profile, order, plan, deployment) if timed else None
    return RecomputedSolution(replace(solution, plan=plan), choice, fit)
