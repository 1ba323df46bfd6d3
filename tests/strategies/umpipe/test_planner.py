from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from lightning_pipes.cost import Cluster, Deployment, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import B, Cut, F, InputError, Kind, Plan, PlanError, Schedule, Span, graph_spans
from lightning_pipes.planning.auto import choose_option
from lightning_pipes.planning.fit import evaluate_plan
from lightning_pipes.planning.planner import Planner, Problem, even_plan, solve_plan
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.deep import Deep
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.umpipe import UM1F1B, UMPipe
from lightning_pipes.strategies.umpipe.planner import Counts, sizes_of, spans_of, spans_of_size
from tests.cases import for_each

ROWS = 32
SIZES = (1, 2, 4, 8, 16, 32)
FLAT, LINEAR = (6e-3, 2e-5), (2e-4, 5e-4)
"""The seconds of a forward that do not depend on the samples, and the seconds of each sample."""


def layer(fixed: float, each: float) -> LayerProfile:
    times = tuple((n, fixed + each * n) for n in SIZES)
    output = ((1, 1e4), (ROWS, 1e4 * ROWS))
    return LayerProfile(
        "", times, tuple((n, 2 * t) for n, t in times), saved=((1, 1e6), (ROWS, 1e6 * ROWS)), output=output
    )


def problem(
    schedule: Schedule | UM1F1B, *layers: tuple[float, float], memory: int | None = None, **more: object
) -> Problem:
    n = len(layers)
    place = Deployment(Cluster((Device(memory),) * n, inside=Link(1e9, 1e-5)))
    decided = tuple(Span(i, i + 1) for i in range(n))
    found = Problem(
        schedule,
        n,
        ROWS,
        layers=decided,
        profile=ModelProfile(tuple(layer(*each) for each in layers)),
        deployment=place,
    )
    return replace(found, **more)


def seconds(asked: Problem, plan: Plan) -> float:
    assert asked.profile is not None
    assert asked.deployment is not None
    schedule = asked.schedule
    order = schedule.program(plan) if isinstance(schedule, Schedule) else schedule
    return evaluate_plan(asked.profile, order, replace(plan, layers=asked.layers), asked.deployment).seconds


def best_equal(asked: Problem, *schedules: Schedule) -> float:
    found = []
    for schedule, m in product(schedules, range(1, ROWS + 1)):
        other = replace(asked, schedule=schedule)
        found.append(seconds(other, even_plan(schedule, asked.ranks, m, ROWS)))
    return min(found)


def test_counts_as_given() -> None:
    asked = Problem(UMPipe((2, 4), (4, 9), (1,), (8,)), 2, 8)
    assert solve_plan(asked).jobs[0] == Cut(
        8,
        (spans_of_size(8, 4), spans_of_size(8, 2)),
        (spans_of_size(8, 2), spans_of_size(8, 1)),
        ((Span(0, 8),), spans_of_size(8, 2)),
        (spans_of_size(8, 2), spans_of_size(8, 1)),
    )
    assert [span.rows for span in spans_of(7, 3)] == [3, 3, 1]
    # a short last batch has fewer samples
    assert solve_plan(replace(asked, rows=3)).spans(Kind.F, 1) == spans_of_size(3, 1)


def test_sizes_to_choose_from() -> None:
    assert sizes_of(10, None, "powers") == (2, 3, 5, 10)  # 8, 4, 2 and 1 micro-batches
    assert sizes_of(10, None, "few") == (2, 3, 4, 5, 10)
    assert sizes_of(10, 3, "all") == (4, 5, 10)


def test_without_a_profile_the_cut_is_even() -> None:
    assert solve_plan(Problem(UM1F1B(), 2, 8, 4)) == even_plan(UM1F1B(), 2, 4, 8)


@pytest.mark.parametrize("schedule", [UMPipe(), UM1F1B()])
def test_stages_of_two_kinds_get_their_own_sizes(schedule: Schedule | UM1F1B) -> None:
    """Check that a stage whose time hardly depends on the samples gets larger chunks, and that the step is faster."""
    asked = problem(schedule, LINEAR, LINEAR, LINEAR, FLAT)
    plan = solve_plan(asked)
    counts = [len(plan.spans(Kind.F, s)) for s in range(4)]
    assert counts[3] < min(counts[:3])
    equal = best_equal(asked, GPipe()) if isinstance(schedule, UMPipe) else best_equal(asked, GPipe(), Deep(2), Deep(6))
    assert seconds(asked, plan) < 0.96 * equal


@for_each("schedule", [UMPipe(), UM1F1B()])
@for_each("kinds", list(product((FLAT, LINEAR), repeat=3)))
def test_never_worse_than_the_best_equal_cut_among_its_numbers(
    schedule: Schedule | UM1F1B, kinds: tuple[tuple[float, float], ...]
) -> None:
    asked = problem(schedule, *kinds)
    equal = [Plan((0, 1, 2), (Cut(ROWS, (spans_of_size(ROWS, size),) * 3),)) for size in sizes_of(ROWS, None, "few")]
    assert seconds(asked, solve_plan(asked)) <= min(seconds(asked, each) for each in equal) + 1e-12


@pytest.mark.parametrize("schedule", [UMPipe(), UM1F1B()])
def test_cut_is_equal_if_nothing_is_gained(schedule: Schedule | UM1F1B) -> None:
    """Check that the cut is equal if stages are equal and times are proportional to the number of samples."""
    cut = solve_plan(problem(schedule, *[(0.0, 1e-3)] * 3)).jobs[0]
    assert len({*cut.forward, *cut.backward, *cut.forward_links, *cut.backward_links}) == 1


def test_all_numbers_are_not_worse() -> None:
    few, every = (problem(UM1F1B(counts=counts), LINEAR, FLAT, LINEAR) for counts in ("few", "all"))
    assert seconds(every, solve_plan(every)) <= 1.01 * seconds(few, solve_plan(few))


def test_layers_and_cut_together() -> None:
    """Check that layers and cut chosen together are within 2 % of the best partition with its own best cut."""
    kinds = [LINEAR, FLAT, LINEAR, LINEAR, FLAT]
    asked = problem(UM1F1B(), *kinds, layers=(), ranks=2)
    made = solve_plan(asked)
    every = [(Span(0, at), Span(at, 5)) for at in range(1, 5)]
    best = min(seconds(replace(asked, layers=x), solve_plan(replace(asked, layers=x))) for x in every)
    assert seconds(replace(asked, layers=made.layers), made) <= 1.02 * best


def two_a_rank(schedule: Schedule | UM1F1B, *kinds: tuple[float, float]) -> Problem:
    """Return a problem with two layers per rank, each of which is a stage."""
    return problem(schedule, *kinds, ranks=len(kinds) // 2)


@pytest.mark.parametrize(
    ("kinds", "share"),
    [
        ((LINEAR,) * 6 + (FLAT,) * 2, 0.96),
        ((FLAT, *(LINEAR,) * 6, FLAT), 1.0),
        ((LINEAR, FLAT) * 3, 1.0),
        ((LINEAR,) * 6, 1.0),
        ((FLAT,) * 4, 1.0),
    ],
)
def test_two_stages_a_rank_against_equal_ones(kinds: tuple[tuple[float, float], ...], share: float) -> None:
    """Check that two stages per rank are no slower than interleaved 1F1B, and faster if layers differ.

    Interleaved 1F1B uses its best number of equal micro-batches.
    """
    asked = two_a_rank(UM1F1B(stages_per_rank=2), *kinds)
    other = replace(asked, schedule=Interleaved(2))
    equal = min(seconds(other, even_plan(other.schedule, asked.ranks, m, ROWS)) for m in SIZES)
    assert seconds(asked, solve_plan(asked)) <= share * equal + 1e-12


def test_two_stages_a_rank_share_its_memory() -> None:
    kinds = (LINEAR, LINEAR, LINEAR, FLAT)
    schedule = UM1F1B(stages_per_rank=2, memory_limit="16MiB")
    asked = two_a_rank(schedule, *kinds)
    plan = solve_plan(asked)
    assert asked.profile is not None
    timeline = simulate(schedule, replace(plan, layers=()), asked.profile.stage_costs(asked.layers))
    assert max(timeline.peak_bytes) <= 16 * 2**20
    assert seconds(asked, plan) > seconds(asked, solve_plan(two_a_rank(UM1F1B(stages_per_rank=2), *kinds)))


def explained(asked: Problem) -> str:
    planner = asked.schedule.make_planner()
    assert isinstance(planner, Planner)
    return planner.explain_plan(asked, solve_plan(asked))


def test_log_explains_the_cut() -> None:
    asked = problem(UM1F1B(), LINEAR, LINEAR, LINEAR, FLAT)
    plan, said = solve_plan(asked), explained(asked)
    counts = ", ".join(str(len(plan.spans(Kind.F, s))) for s in range(4))
    cuts = [(spans_of_size(ROWS, size),) * 4 for size in sizes_of(ROWS, None, "few")]
    equal = min((seconds(asked, Plan(plan.ranks, (Cut(ROWS, cut),))), len(cut[0])) for cut in cuts)
    then, now = seconds_text(round(1e9 * seconds(asked, plan))), seconds_text(round(1e9 * equal[0]))
    assert said.startswith(f"um1f1b cuts a batch of 32 samples into {counts} micro-batches on stages 0 to 3")
    assert (
        f"takes an estimated {then}, compared with {now} for {equal[1]} equal micro-batches, the best equal cut" in said
    )
    assert "no other cut that was found is more than 1% faster" in explained(problem(UMPipe(), *[(0.0, 1e-3)] * 3))
    assert explained(problem(UM1F1B((2, 2)), LINEAR, FLAT)) == ""  # nothing was chosen
    assert explained(problem(UM1F1B(), LINEAR, FLAT, profile=None)) == ""


def test_all_forwards_first_says_how_good_a_cut_can_be() -> None:
    said = explained(problem(UMPipe(), LINEAR, LINEAR, FLAT))
    assert "No cut with these sizes is faster" in said or "% faster" in said


@for_each("schedule", [UMPipe((16, 8), (5, 3), (9,), (9,)), UMPipe(), UM1F1B()])
@for_each("rows", [2, 7, 9, 31, 32])
def test_no_micro_batch_has_fewer_samples_than_it_needs(schedule: Schedule | UM1F1B, rows: int) -> None:
    """Check the sizes for models whose layers need several samples at once."""
    plan = solve_plan(problem(schedule, (1e-9, 1e-3), (1e-9, 1e-3), rows=rows, least=2))
    every = [span for kind in (Kind.F, Kind.B) for s in range(2) for span in plan.spans(kind, s)]
    every += [*plan.spans(Kind.SF, 0), *plan.spans(Kind.SB, 1)]
    every += [part for s in range(2) for span in plan.spans(Kind.F, s) for part in graph_spans(F(s, span), plan)]
    assert min(span.rows for span in every) >= 2
    assert spans_of(1, 3, 2) == (Span(0, 1),)  # the batch has only one sample


def test_forward_and_backward_have_as_many_samples_in_common() -> None:
    """Check the parts that forward and backward micro-batches have in common, which a stage runs one by one.

    An earlier cut of 5 samples into (2, 4) and (4, 1) micro-batches had a part with a single sample.
    """
    for rows, least, p, q in product(range(4, 14), (2, 3), range(1, 6), range(1, 6)):
        cut = Counts((p, 1), (q, 1)).cut(rows, 2, least)
        plan = Plan((0, 1), (cut,))
        parts = [part for span in plan.spans(Kind.F, 0) for part in graph_spans(F(0, span), plan)]
        assert min(part.rows for part in parts) >= least
        assert [part for span in plan.spans(Kind.B, 0) for part in graph_spans(B(0, span), plan)] == parts


def test_memory_limits_what_stages_hold() -> None:
    """Check that no stage holds more than 12 of 32 samples if 12 MiB are available and a sample takes 1 MiB.

    The samples of a chunk that is being computed count as held.
    """
    free, tight = problem(UM1F1B(), LINEAR, LINEAR, FLAT), problem(UM1F1B(memory_limit="12MiB"), LINEAR, LINEAR, FLAT)
    plan = solve_plan(tight)
    assert max(plan.limits) <= 12
    assert solve_plan(free).limits == ()
    timeline = simulate(UM1F1B(), replace(plan, layers=()), tight.profile.stage_costs(tight.layers))  # type: ignore[union-attr]
    assert max(timeline.peak_bytes) <= 12 * 2**20
    assert seconds(tight, plan) > seconds(free, solve_plan(free))


def test_layers_are_cut_within_the_memory_limit() -> None:
    """Check that a limit moves layers if the partition with equal times does not fit into it.

    The last of eight layers takes as long as the others together. Each layer has 2 MiB of weights and states, so that
    seven layers exceed 16 MiB with a micro-batch of one sample, and four do not.
    """
    light, heavy = ((0.0, each) for each in (1e-3, 7e-3))
    layers = [replace(layer(*each), weight_bytes=2**20, optimizer_bytes=2**20) for each in (*[light] * 7, heavy)]
    for limit, least in ((None, 7), ("16MiB", 4)):
        schedule = UM1F1B(memory_limit=limit)
        asked = Problem(schedule, 2, ROWS, profile=ModelProfile(tuple(layers)))
        stages = [span.rows for span in solve_plan(asked).layers]
        assert stages[0] >= least, (limit, stages)
        assert limit is None or max(stages) < 7


def test_mistakes() -> None:
    with pytest.raises(InputError, match="every number in forward must be at least 1"):
        UMPipe((2, 0))
    with pytest.raises(InputError, match="must be one of few, powers, all, got 'some'"):
        UMPipe(counts="some")
    with pytest.raises(InputError, match="forward is missing"):
        UM1F1B(backward=(2, 2))
    with pytest.raises(PlanError, match=r"forward \(2, 2\) has 2 numbers, but the pipeline has 3 stages"):
        solve_plan(Problem(UMPipe((2, 2)), 3, 8))
    with pytest.raises(PlanError, match=r"forward_links \(1, 1\) has 2 numbers, but the pipeline has 1 links"):
        solve_plan(Problem(UMPipe((2, 2), forward_links=(1, 1)), 2, 8))
    with pytest.raises(PlanError, match="remove one of them"):
        solve_plan(Problem(UMPipe((2, 2)), 2, 8, 4))
    with pytest.raises(PlanError, match="too small for a chunk of 1 sample in"):
        solve_plan(problem(UM1F1B(memory_limit=1000), LINEAR, FLAT))
    with pytest.raises(InputError, match="is not a size"):
        UM1F1B(memory_limit="a lot")


def seen_costs(asked: Problem, plan: Plan, factors: tuple[float, ...]) -> object:
    """Return costs as if they had been measured, for the chunk sizes of the plan and with a factor for each stage."""
    assert asked.profile is not None
    costs = asked.profile.stage_costs(asked.layers)
    seconds = {
        (kind, s): tuple(
            (n, factors[s] * costs.seconds_at(kind, s, n)) for n in sorted({x.rows for x in plan.spans(kind, s)})
        )
        for kind in (Kind.F, Kind.B)
        for s in range(plan.n_stages)
    }
    return replace(costs, seconds=seconds)


def test_cut_again_if_the_times_of_a_stage_change() -> None:
    asked = problem(UM1F1B(), LINEAR, LINEAR, LINEAR, (1e-4, 1e-5))
    planner, plan = asked.schedule.make_planner(), solve_plan(asked)
    same = replace(asked, costs=seen_costs(asked, plan, (1.0, 1.05, 1.0, 1.0)))
    assert planner.replan(plan, asked) is None  # nothing has been measured yet
    assert planner.replan(plan, same) is None
    slow = (LINEAR, LINEAR, LINEAR, FLAT)
    seen = replace(asked, costs=seen_costs(problem(UM1F1B(), *slow), plan, (1.0,) * 4))
    other = planner.replan(plan, seen)
    assert other is not None
    assert other.layers == plan.layers
    assert seconds(problem(UM1F1B(), *slow), other) < seconds(problem(UM1F1B(), *slow), plan)


def test_auto_considers_it() -> None:
    asked = problem(UM1F1B(), LINEAR, LINEAR, LINEAR, FLAT)
    assert asked.profile is not None
    choice = choose_option(asked.profile, 4, ROWS, asked.deployment)
    assert choice.best.schedule == UM1F1B()


def test_the_genetic_search_is_a_setting() -> None:
    """Check that the genetic search saves time in a case where one stage hardly depends on the samples.

    The exact search gives the lower bound, and the best equal cut the upper bound.
    """
    layers = (LINEAR, LINEAR, LINEAR, FLAT)
    exact, genetic = (problem(UMPipe(search=search), *layers) for search in ("exact", "genetic"))
    found, proven = seconds(genetic, solve_plan(genetic)), seconds(exact, solve_plan(exact))
    assert proven <= found < best_equal(genetic, GPipe())
    with pytest.raises(InputError, match="search must be one of exact, genetic, got 'annealing'"):
        UMPipe(search="annealing")
