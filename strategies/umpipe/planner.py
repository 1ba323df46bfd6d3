"""Planner that decides how finely each stage, direction and link cuts a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from lightning_pipes.cost import Cluster, CostModel, Deployment, Device, ModelProfile
from lightning_pipes.cost.units import bytes_text, seconds_text
from lightning_pipes.ir import Cut, Kind, Plan, PlanError, Policy, Program, Schedule, Span
from lightning_pipes.planning.fit import Fit, evaluate_plan, fit_layers, improve_cuts
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.planner import EvenPlanner, Planner, Problem
from lightning_pipes.sim import makespan
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.umpipe.branch_and_bound import bound_choices, evolve_choices
from lightning_pipes.strategies.umpipe.fitting import Choices, fit_choices, value_choice
from lightning_pipes.strategies.umpipe.network import align_spans, spans_of_size
from lightning_pipes.strategies.umpipe.overlapped import Merge
from lightning_pipes.strategies.umpipe.pricing import CutOption, drifted_costs, link_times, room_of, stage_options

MICROBATCH_CHOICES = ("few", "powers", "all")
"""The numbers of micro-batches among which the planner chooses: 1, 2, 3, 4, 6, 8, 12, ...; powers of two; all numbers.

More numbers make the search slower, and the best of "few" is almost always as good.
"""
SEARCH_METHODS = ("exact", "genetic")
"""The searches for a cut with all forwards first: by bounds, which prove the result, or by the paper's TiDGAP."""
MAX_SIMULATED_CUTS = 3
"""The number of the best unequal cuts that are simulated, in addition to all equal cuts."""
MIN_UNEQUAL_GAIN = 0.01
"""The minimum share of the best equal cut's time that an unequal cut must save. Measured times are not exact."""
MAX_TRIED_PARTITIONS = 6
"""The number of partitions that are tried for each equal cut."""
MAX_MEASURED_SIZES = 6
"""The maximum number of sizes for which layers are measured. Times of other sizes are interpolated linearly."""
MIN_TIME_CHANGE = 0.1
"""The relative change of a stage's or link's time, compared with the profile, above which a batch may be cut again."""
MIN_REPLAN_GAIN = 0.03
"""The minimum share of a step that another cut must save during training."""
N_START_PARTITIONS = 3
"""The number of partitions for which the best cut is searched."""
MAX_ALTERNATIONS = 3
"""The maximum number of rounds that move layers for a cut and then search for the best cut of these layers."""


class Counts(NamedTuple):
    """The number of micro-batches of each stage and direction, and the number of messages on each link.

    If the links of a direction are empty, each link sends the micro-batches of the sending stage.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    forward_links: tuple[int, ...] = ()
    backward_links: tuple[int, ...] = ()

    def cut(self, rows: int, stages: int, least: int = 1) -> Cut:
        """Return the cut of a batch of `rows` samples into these numbers of micro-batches.

        If the batch is too small for a count of micro-batches with `least` samples each, its micro-batches have `least`
        samples.

        Raises:
            PlanError: there is not one number for each stage and link.
        """
        entries = {"forward": stages, "backward": stages, "forward_links": stages - 1, "backward_links": stages - 1}
        for what, needed in entries.items():
            got = getattr(self, what)
            if len(got) != needed and (got or not what.endswith("links")):
                of = "links" if what.endswith("links") else "stages"
                raise PlanError(
                    f"{what} {got} has {len(got)} numbers, but the pipeline has {needed} {of}; give one number for each"
                )
        forward = tuple(spans_of(rows, p, least) for p in self.forward)
        backward = tuple(
            align_spans(spans_of(rows, q, least), spans, least) for q, spans in zip(self.backward, forward, strict=True)
        )
        # The last stage has no next stage, and the first one has no previous stage. Their entries are not used.
        there = (*(spans_of(rows, p, least) for p in self.forward_links), forward[-1]) if self.forward_links else ()
        back = (backward[0], *(spans_of(rows, q, least) for q in self.backward_links)) if self.backward_links else ()
        return Cut(rows, forward, backward, there, back)


def spans_of(rows: int, count: int, least: int = 1) -> tuple[Span, ...]:
    """Return `count` micro-batches of ceil(rows / count) samples, of which the last one may be shorter.

    There are fewer micro-batches if some of them would be empty or have fewer than `least` samples.
    """
    return spans_of_size(rows, max(-(-rows // count), least), least)


def sizes_of(rows: int, most: int | None, among: str, least: int = 1) -> tuple[int, ...]:
    """Return the sizes of chunks among which the planner chooses, in ascending order.

    Args:
        rows: the number of samples in the batch.
        most: the maximum number of micro-batches. None means one for each sample.
        among: the numbers of micro-batches to consider; see `MICROBATCH_CHOICES`.
        least: the minimum number of samples in a chunk.
    """
    most = rows if most is None else min(most, rows)
    counts = {"all": range(1, most + 1), "powers": [1 << n for n in range(most.bit_length())]}
    counts["few"] = [n for n in (*counts["powers"], *(3 * n for n in counts["powers"])) if n <= most]
    return tuple(sorted({max(-(-rows // count), min(least, rows)) for count in counts[among]}))


@dataclass(frozen=True)
class UnequalPlanner(Planner):
    """Planner that cuts a batch as the user specifies, or in the way that is fastest by the profile.

    If there is neither a specification nor a profile, it cuts the batch evenly.

    With a profile, the planner computes a price for each way to cut a batch on a stage or link, based on how the engine
    runs it. A descent selects candidates, and the simulator makes the final decision. An equal cut is kept unless
    another cut saves more than 1 % of its time. `Problem.microbatches` is the maximum number of micro-batches of any
    stage or link. If the layers of the stages are not decided, the planner optimizes the cut of the model and the cut
    of the batch in alternation.

    Attributes:
        given: the numbers of micro-batches that the user has set.
        overlapped: whether backwards may run before all forwards have run.
        among: the numbers of micro-batches among which the planner chooses; see `MICROBATCH_CHOICES`.
        memory_limit: the bytes that a rank may hold, in addition to the limit of its device. None means no such limit.
        every: the number of training batches between two checks of the measured times.
        search: the search for a cut with all forwards first; see `SEARCH_METHODS`.
    """

    given: Counts | None = None
    overlapped: bool = False
    among: str = MICROBATCH_CHOICES[0]
    memory_limit: int | None = None
    every: int = 100
    search: str = SEARCH_METHODS[0]

    @property
    def user_chose_microbatches(self) -> bool:
        return self.given is not None

    @property
    def may_cut_unequally(self) -> bool:
        return self.given is None

    @property
    def has_memory_limit(self) -> bool:
        return self.memory_limit is not None

    def plan(self, problem: Problem) -> Plan:
        even = EvenPlanner().plan(problem)
        if self.given is not None:
            if problem.microbatches is not None:
                raise PlanError(
                    f"{problem.schedule.name}: microbatches={problem.microbatches} is set, but the setting forward, "
                    f"{self.given.forward}, already specifies the micro-batches of each stage; remove one of them"
                )
            return replace(even, jobs=(self.given.cut(problem.rows, even.n_stages, problem.least),))
        if problem.profile is None or even.n_stages == 1 or even.n_stages > len(problem.profile.layers):
            return even
        if even.layers:
            return self._cut(even, problem)
        return self._jointly(even, problem)

    def profile_sizes(self, rows: int, stages: int, microbatches: int | None) -> tuple[int, ...]:
        """Return the sizes for which layers are measured.

        These are the whole batch, its half, and so on, at most `MAX_MEASURED_SIZES` sizes. If the user has set the
        numbers of micro-batches, they are the sizes of these micro-batches.
        """
        if self.given is not None:
            sizes = {-(-rows // min(count, rows)) for counts in self.given for count in counts}
        else:
            sizes = {*sizes_of(rows, microbatches, "powers")[::-1][:MAX_MEASURED_SIZES]}
        return tuple(sorted(sizes))

    def replan(self, plan: Plan, problem: Problem) -> Plan | None:
        """Return another cut with the same layers, or None to keep the plan.

        A cut is returned if the time of a stage or link differs from the profile by more than `MIN_TIME_CHANGE`, and if
        the cut saves more than `MIN_REPLAN_GAIN` of a step with the measured times.
        """
        if self.given is not None or problem.profile is None or problem.costs is None:
            return None
        usual = evaluate_plan(problem.profile, _order(problem, plan), plan, _deployment(problem)).costs
        costs, drift = drifted_costs(usual, problem.costs, plan)
        if drift <= MIN_TIME_CHANGE:
            return None
        other = self._fastest(replace(plan, whole_forward=(), limits=()), problem, costs)
        now, then = (makespan(_order(problem, each), replace(each, layers=()), costs) for each in (plan, other))
        return other if then < (1 - MIN_REPLAN_GAIN) * now else None

    def _jointly(self, even: Plan, problem: Problem) -> Plan:
        """Return a plan that decides both the layers and the cut of the batch.

        The planner partitions the layers for each equal cut and searches for the best cut of the best partitions. It
        then moves layers and searches again, as long as this makes the step faster.
        """
        assert problem.profile is not None
        profile, deployment = problem.profile, _deployment(problem)
        limited = deployment if self.memory_limit is None else deployment.with_memory_limit(self.memory_limit)
        sizes = sizes_of(problem.rows, problem.microbatches, "powers", problem.least)
        starts: list[tuple[Span, ...]] = []
        for place in [limited] if limited == deployment else [limited, deployment]:
            fits = []
            for size in sizes:
                spans = spans_of_size(problem.rows, size, problem.least)
                same = replace(even, jobs=(Cut(problem.rows, (spans,) * even.n_stages),))
                with suppress(PlanError):  # this cut does not fit into memory
                    fits.append(fit_layers(profile, problem.schedule, same, place, trials=MAX_TRIED_PARTITIONS))
            fits.sort(key=lambda fit: fit.seconds)
            starts += list(dict.fromkeys(fit.plan.layers for fit in fits))[:N_START_PARTITIONS]
        if self.memory_limit is not None:
            starts.append(_balance_bytes(profile, even.n_stages, sizes[0]))
        if not starts:
            starts = [fit_layers(profile, problem.schedule, even, deployment).plan.layers]  # mostly raises an error

        def best_of(every: Iterable[tuple[Span, ...]]) -> Fit:
            found, failure = [], PlanError("no partition was tried")
            for layers in every:
                try:
                    plan = self._cut(replace(even, layers=layers), problem)
                except PlanError as error:  # not even the smallest chunks fit into memory_limit on some stage
                    failure = error
                else:
                    found.append(evaluate_plan(profile, _order(problem, plan), plan, deployment))
            if not found:
                raise failure
            return min(found, key=lambda fit: fit.seconds)

        best = best_of(dict.fromkeys(starts))
        for _ in range(MAX_ALTERNATIONS):
            try:
                other = best_of([improve_cuts(profile, best, limited).plan.layers])
            except PlanError:
                break
            if other.seconds >= best.seconds:
                break
            best = other
        return best.plan

    def _cut(self, base: Plan, problem: Problem) -> Plan:
        """Return `base`, with its layers, in the fastest cut by the profile."""
        assert problem.profile is not None
        costs = evaluate_plan(problem.profile, _order(problem, base), base, _deployment(problem)).costs
        return self._fastest(base, problem, costs)

    def explain_plan(self, problem: Problem, plan: Plan) -> str:
        """Explain the cut: the time of a step compared with the best equal cut, and the gap to the bound.

        The gap is included only if all forwards come first.
        """
        if self.given is not None or problem.profile is None or not plan.layers or plan.n_stages == 1:
            return ""
        costs = evaluate_plan(problem.profile, _order(problem, plan), plan, _deployment(problem)).costs
        search = self._make_search(replace(plan, whole_forward=(), limits=()), problem, costs)
        equal = search.best_equal()
        if equal is None:
            return ""
        gap = None
        if not self.overlapped and (chosen := search.choices.choice_of_plan(plan)) is not None:
            bound = bound_choices(search.choices).lower_bound
            gap = max(0, value_choice(search.choices, search.merge, chosen) - bound) / max(1, bound)
        return explain_cut(
            problem.schedule.name, plan, search.simulate_step(plan), equal, search.simulate_step(equal), gap
        )

    def _fastest(self, base: Plan, problem: Problem, costs: CostModel) -> Plan:
        search = self._make_search(base, problem, costs)
        if self.search == "genetic" and not self.overlapped:
            evolved = evolve_choices(search.choices)
            found = sorted((value_choice(search.choices, search.merge, choice), choice) for choice in evolved)
        else:
            starts = () if self.overlapped else bound_choices(search.choices).starts
            found = fit_choices(search.choices, search.merge, search.base.limits, starts, base.ranks)
        if not found:
            return base
        unequal = min((search.plan(choice) for _, choice in found[:MAX_SIMULATED_CUTS]), key=search.simulate_step)
        equal = search.best_equal() or unequal
        return (
            unequal if search.simulate_step(unequal) < (1 - MIN_UNEQUAL_GAIN) * search.simulate_step(equal) else equal
        )

    def _make_search(self, base: Plan, problem: Problem, costs: CostModel) -> _CutSearch:
        sizes = sizes_of(problem.rows, problem.microbatches, self.among, problem.least)
        merge, limits, largest = Merge.ALL_FORWARDS_FIRST, (), (problem.rows,) * base.n_stages
        if self.overlapped:
            merge = Merge.BACKWARD_FIRST
            largest, caps = zip(*self._room(base, problem, costs, sizes), strict=True)
            limits = caps if min(caps) < problem.rows else ()
        choices = choices_of(costs, base, problem.rows, sizes, largest, problem.least)
        return _CutSearch(choices, merge, replace(base, limits=limits), problem, costs)

    def _room(self, plan: Plan, problem: Problem, costs: CostModel, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the largest chunk of each stage and the maximum number of its samples in flight.

        The largest chunk is the largest of which two fit into memory, or the smallest chunk if there is none.

        Raises:
            PlanError: a stage has no memory for the smallest chunk.
        """
        found = []
        for stage, rank in enumerate(plan.ranks):
            device = None if problem.deployment is None else problem.deployment.pipeline.devices[rank].memory
            limit = min((n for n in (self.memory_limit, device) if n is not None), default=None)
            if limit is None:
                found.append((problem.rows, problem.rows))
                continue
            room = {n: min(problem.rows, room_of(costs, plan, stage, limit, n)) for n in sizes}
            fits = [n for n in sizes if room[n] >= n]
            if not fits:
                raise PlanError(
                    f"{problem.schedule.name}: the memory limit of stage {stage} is {bytes_text(limit)}, which is too "
                    f"small for a chunk of {sizes[0]} sample{'s' * (sizes[0] != 1)} in addition to "
                    f"{bytes_text(costs.resident_bytes(rank, plan))} of weights and states. Use more stages, "
                    "recompute, or raise the limit"
                )
            largest = max((n for n in fits if room[n] >= min(2 * n, problem.rows)), default=fits[0])
            found.append((largest, room[largest]))
        return found


@dataclass(frozen=True)
class _CutSearch:
    """The cuts of a batch that the stages of `base` can run within its limits."""

    choices: Choices
    merge: Merge
    base: Plan
    problem: Problem
    costs: CostModel

    def plan(self, choice: Sequence[int]) -> Plan:
        return self.choices.plan(choice, self.base)

    def simulate_step(self, plan: Plan) -> int:
        """Return the simulated time of a step in nanoseconds."""
        return makespan(_order(self.problem, plan), replace(plan, layers=()), self.costs)

    def best_equal(self) -> Plan | None:
        """Return the fastest plan with one size everywhere, or None if no size is within the limits of the stages.

        If ranks have several stages, the plans are also tried in the order of `Interleaved`. It is better than running
        what is ready if all stages are alike.
        """
        sizes = {option.forward for option in self.choices.stages[0]}
        every = [each for size in sorted(sizes) if (each := self.choices.equal_choice(size)) is not None]
        plans = [self.plan(each) for each in every if self._holds(each)]
        if self.base.n_stages > self.base.n_ranks and not self.base.limits:
            order = Interleaved(self.base.n_stages // self.base.n_ranks)
            plans += [in_order(plan, order.program(plan)) for plan in plans]
        return min(plans, key=self.simulate_step, default=None)

    def _holds(self, choice: Sequence[int]) -> bool:
        """Return whether the chunks of every stage are within its limit."""
        limits = self.base.limits
        options = (every[n] for every, n in zip(self.choices.stages, choice, strict=False))
        return not limits or all(option.forward <= limit for option, limit in zip(options, limits, strict=True))


def in_order(plan: Plan, program: Program) -> Plan:
    """Return `plan` with the order of `program` fixed on each rank."""
    return replace(plan, after={b: (a,) for row in program.head for a, b in pairwise(row)})


def explain_cut(name: str, plan: Plan, took: int, equal: Plan, equal_took: int, gap: float | None = None) -> str:
    """Return a sentence for users about a cut: its micro-batches by stage and direction, and the time of a step.

    Args:
        name: the name of the schedule.
        plan: the plan with the cut.
        took: the time of a step with `plan`, in nanoseconds.
        equal: the plan with the best equal cut.
        equal_took: the time of a step with `equal`, in nanoseconds.
        gap: the maximum share by which another cut may be faster, or None if it is unknown.
    """
    stages = range(plan.n_stages)
    there, back = ([len(plan.spans(kind, s)) for s in stages] for kind in (Kind.F, Kind.B))
    same = len(equal.spans(Kind.F, 0))
    what = f"{name} cuts a batch of {plan.jobs[0].rows} samples into "
    if len({*there, *back}) == 1:
        order = " in the order of interleaved" if plan.after else ""
        what += (
            f"{same} equal micro-batches on every stage{order}. A step takes an estimated {seconds_text(took)}, and "
        )
        what += f"no other cut that was found is more than {MIN_UNEQUAL_GAIN:.0%} faster"
    else:
        counts = f"{', '.join(map(str, there))} micro-batches on stages 0 to {stages[-1]}"
        both = counts if there == back else f"{counts}, and {', '.join(map(str, back))} for the backward"
        what += f"{both}. A step takes an estimated {seconds_text(took)}, compared with {seconds_text(equal_took)} for "
        what += f"{same} equal micro-batches, the best equal cut"
    if gap is None:
        return what
    return f"{what}. No cut with these sizes is {f'more than {gap:.1%} ' if gap else ''}faster"


def choices_of(
    costs: CostModel, plan: Plan, rows: int, sizes: Sequence[int], largest: Sequence[int], least: int = 1
) -> Choices:
    """Return all options of the stages and links of `plan`, priced by `costs`.

    Args:
        costs: the cost model.
        plan: the plan with the stages and links.
        rows: the number of samples in the batch.
        sizes: the numbers of samples in a chunk among which to choose, in ascending order.
        largest: the largest chunk of each stage.
        least: the minimum number of samples in a chunk.
    """
    stages = []
    for stage in range(plan.n_stages):
        fits = [size for size in sizes if size <= largest[stage]]
        stages.append(tuple(stage_options(costs, plan, stage, fits)))
    links = []
    for stage in range(plan.n_stages - 1):
        both = link_times(costs, plan, stage, sizes)
        there, back = (tuple(CutOption(n, n, t, t) for n, t in zip(sizes, times, strict=True)) for times in both)
        links.append((there, back))
    return Choices(rows, tuple(stages), tuple(links), least)


def _deployment(problem: Problem) -> Deployment:
    return problem.deployment or Deployment(Cluster((Device(),) * problem.ranks))


def _balance_bytes(profile: ModelProfile, stages: int, rows: int) -> tuple[Span, ...]:
    """Return the partition whose largest stage needs the least memory with a single micro-batch of `rows` samples."""
    costs = profile.stage_costs([Span(i, i + 1) for i in range(len(profile.layers))])
    columns = zip(costs.weight_bytes, costs.state_bytes, costs.activation_bytes, strict=True)
    return even_partition([weights + states + rows * saved for weights, states, saved in columns], stages)


def _order(problem: Problem, plan: Plan) -> Program | Policy:
    schedule = problem.schedule
    return schedule.program(plan) if isinstance(schedule, Schedule) else schedule
