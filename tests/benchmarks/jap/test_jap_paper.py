"""Compare the simulations of benchmarks/papers/jap/figures.py with independent sums and bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import STEP, B, Cut, F, Kind, Plan, Span
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.hanayo import Hanayo
from lightning_pipes.strategies.jap import ArrayProblem, Effort, Job, problem_from_plan, solve_array, stream_jobs
from lightning_pipes.strategies.one_f_one_b import OneFOneB

SMALL = {"iterations": 12, "jobs": 8, "orders": 20}
GIB = 2**30


@pytest.fixture
def bench():
    from benchmarks.papers.jap import figures as jap_paper
    from benchmarks.papers.jap import schemes as jap_replay
    from benchmarks.papers.jap import schemes as jap_schemes
    from benchmarks.papers.jap import single as bpipe
    from benchmarks.papers.jap import single as jap_single

    return SimpleNamespace(bpipe=bpipe, paper=jap_paper, replay=jap_replay, schemes=jap_schemes, single=jap_single)


@pytest.fixture
def epoch(bench):
    def made(model="BERT-large", **hardware):
        return bench.schemes.of_model(model, bench.schemes.Hardware(**hardware), **SMALL)

    return made


def random_problem(jobs, stages, seed=0):
    rng = np.random.default_rng(seed)
    forward, backward, update, there, back = rng.integers(1, 9, (5, jobs, stages))
    return ArrayProblem(forward, backward, update=update, transfer=there, transfer_back=back)


# BPipe ----------------------------------------------------------------------------------------------------------------


def most_at_once(ran, stages, jobs):
    """Return the largest number of activations on each stage, counted from the recorded events."""
    most = []
    for s in range(stages):
        changes = []
        for n in range(jobs):
            for owner in {s, stages - 1 - s}:
                leaves = ran.ends.get(("OUT", n, owner))
                if owner == s:
                    changes += [(ran.starts["F", n, s], 1), (ran.ends["B", n, s], -1)]
                    if leaves is not None:
                        changes += [(leaves, -1), (ran.starts["IN", n, s], 1)]
                elif leaves is not None:
                    changes += [(ran.starts["OUT", n, owner], 1), (ran.ends["IN", n, owner], -1)]
        counts = np.cumsum([change for _, change in sorted(changes)])
        most.append(int(counts.max()))
    return most


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 8, 11])
@pytest.mark.parametrize("slow", [0, 3, 60])
def test_no_stage_of_bpipe_holds_more_than_its_share(bench, stages, slow):
    for jobs in (1, 3, 8, 21):
        moving = np.random.default_rng(jobs).integers(0, slow + 1, (jobs, stages))
        ran = bench.bpipe.bpipe(random_problem(jobs, stages, seed=jobs), moving)
        assert max(most_at_once(ran, stages, jobs)) <= math.ceil((stages + 2) / 2)
        lent = {s for what, _, s in ran.starts if what == "OUT"}
        assert lent == {s for s in range(stages) if min(jobs, stages - s) > math.ceil((stages + 2) / 2)}
        for (what, n, s), start in ran.starts.items():
            if what == "IN":
                assert ran.ends["OUT", n, s] <= start <= ran.ends["IN", n, s] <= ran.starts["B", n, s]


def test_bpipe_is_1f1b_where_moving_takes_no_time(bench):
    plan, costs = Plan((0, 1, 2, 3, 4, 5), (Cut.even(1, 1, 6),) * 9), CostModel.uniform(6, 2e-9, 3e-9)
    free = np.zeros((9, 6), np.int64)
    one = Plan.even(6, 9)
    exact = simulate(OneFOneB().program(one), one, costs).makespan
    assert bench.bpipe.bpipe(problem_from_plan(plan, costs), free).makespan == exact
    assert bench.bpipe.bpipe(problem_from_plan(plan, costs), free + 50).makespan > exact


# Schemes --------------------------------------------------------------------------------------------------------------


def test_vanilla_is_the_sum_of_its_blocks(epoch):
    one = epoch()
    total = 0.0
    for number, rows in enumerate(one.sizes):
        batches = SMALL["iterations"] * 8 // rows
        walk = sum(one.line.seconds_at(kind, s, rows) for kind in (Kind.F, Kind.B) for s in range(8))
        walk += 2 * sum(size * rows / 300e9 for size in one.line.forward_bytes) + one.line.seconds_at(Kind.STEP, 0)
        total += batches * walk
        assert number < 8
    assert one.vanilla().time / 1e9 == pytest.approx(total, rel=1e-6)
    alone = one.in_rounds(1)  # an array of one job
    assert alone.time == one.vanilla().time


def test_utilisation_is_a_share_and_nothing_is_faster_than_the_work_of_a_stage(bench, epoch):
    one = epoch("GPT-2-1.5B")
    for name, run in bench.paper.SCHEMES.items():
        spent = run(one)
        assert 0 < spent.utilisation(8) <= 1, name
        assert spent.time * 8 >= spent.forward + spent.backward + spent.overhead + spent.switching
    busiest = max(
        sum(
            SMALL["iterations"]
            * 8
            // rows
            * (one.line.seconds_at(Kind.F, s, rows) + one.line.seconds_at(Kind.B, s, rows))
            for rows in one.sizes
        )
        for s in range(8)
    )
    assert one.ours().time / 1e9 >= busiest


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ResNet-152", "GPT-2-1.5B"])
def test_more_memory_is_never_worse(bench, epoch, model):
    sizes = [24, 40, 80]
    for run in (
        *(lambda e, how=how: e.one_by_one(how) for how in bench.single.SINGLE.values()),
        bench.schemes.Epoch.vanilla,
    ):
        times = [spent.time if (spent := run(epoch(model, memory=n * GIB))) else math.inf for n in sizes]
        assert times == sorted(times, reverse=True)
    mode = bench.schemes.Mode(recompute=True)
    for swapped in (False, True):
        fit = [epoch(model, memory=n * GIB).array_size(mode, swapped=swapped) for n in sizes]
        assert fit == sorted(fit)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_as_many_jobs_as_fit(bench, recompute, swapped):
    """Check the number of jobs that fit, for GPT-2 and 32 rows.

    The bytes of every stage come from the profile. They must fit for this number of jobs, and must not fit for one
    more.
    """
    hardware = bench.schemes.Hardware(memory=60 * GIB)
    one = bench.schemes.of_model("GPT-2-1.5B", hardware)
    fit = one.array_size(bench.schemes.Mode(recompute), swapped=swapped)

    def needed(jobs, s):
        costs = one.line
        weights, gradients = costs.weight_bytes[s], costs.weight_bytes[s]
        state = weights + costs.state_bytes[s] - gradients
        activations, inputs = 32 * costs.activation_bytes[s], (32 * costs.forward_bytes[s - 1] if s else 0)
        places = min(2, jobs) if swapped else jobs
        kept, again = (inputs, activations) if recompute else (activations, 0)
        return places * state + jobs * kept + again + gradients + 32 * costs.working_bytes[s]

    assert fit > 0
    assert max(needed(fit, s) for s in range(8)) <= 60 * GIB
    assert fit == 64 or max(needed(fit + 1, s) for s in range(8)) > 60 * GIB


def test_siblings_stand_where_a_schedule_has_micro_batches(bench):
    sizes = (8, 16, 8)
    program, plan = bench.schemes.arrayed(GPipe(), sizes, 2)
    assert program.to_lines()[1] == "F1 j1:F1 j2:F1 B1 STEP1 j1:B1 j1:STEP1 j2:B1 j2:STEP1".replace(
        "F1", "F1.0"
    ).replace("B1", "B1.0")
    costs = CostModel.uniform(2, 1e-9, 2e-9)
    assert simulate(program, plan, costs).makespan == (3 + 2 - 1) * 3  # the same as three micro-batches
    waves, turned = bench.schemes.arrayed(Hanayo(waves=1), sizes, 2)
    assert turned.ranks == (0, 1, 1, 0)
    assert [sum(i.kind is Kind.F for i in row) for row in waves.head] == [6, 6]


def test_switches_that_nothing_hides_are_counted_where_the_job_changes(epoch):
    one = epoch("GPT-2-1.5B")
    with_, without = one.paper(), one.without_low_cost_switching()
    assert without.time > with_.time
    transfer = 8 * sum(f.state for f in one.footprints(one._recomputing)) / 64e9
    batches = sum(SMALL["iterations"] * 8 // rows for rows in one.sizes)
    # In any good order, the backwards of the last stage follow their forwards.
    last = 8 * one.footprints(one._recomputing)[-1].state / 64e9
    assert batches * transfer <= without.switching / 1e9 <= batches * (2 * transfer - 0.9 * last)
    # On one job, a backward follows its forward on every stage.
    alone = one.in_rounds(1, switch=[1e-3 * (s + 1) for s in range(8)])
    assert alone.switching / 1e9 == pytest.approx(batches * 0.036)


@pytest.mark.parametrize("method", ["search", "longest first", "algorithm 1"])
def test_saved_switches_are_changes_that_an_order_does_not_have(bench, method):
    problem = replace(random_problem(5, 4), switch=np.tile([1, 10, 100, 1000], (5, 1)))
    solution = solve_array(problem, method, Effort(200))
    changes = [1 + sum(a % 5 != b % 5 for a, b in pairwise(row)) for row in solution.order.tolist()]
    counted = 2 * problem.switch.sum() - bench.schemes.saved_switches(problem, solution.order)
    assert counted == np.dot(changes, [1, 10, 100, 1000])


# Swapped states -------------------------------------------------------------------------------------------------------


def test_replayed_with_room_for_all_is_what_the_stream_says(bench):
    costs = CostModel.uniform(2, 1e-9, 2e-9, step=1e-9)
    array = stream_jobs([Job(Cut.even(1, 1, 2), 4)] * 3, costs)
    room = bench.replay.replayed(array.program.head, array.plan, costs, [10, 10], [30, 30], [[0, 1]], math.inf)
    assert room == (array.time, 0)
    assert simulate(array.program, array.plan, costs).makespan == array.time


def test_replayed_by_hand(bench):
    """Check one stage with room for the state of one of two jobs.

    Every block waits 10 ns for its state, except the first job's backward, which follows its forward. It waits 10 ns
    more if a modified state must be written back first.
    """
    costs = CostModel.uniform(1, 1e-9, 2e-9)
    plan = Plan((0,), (Cut.even(1, 1, 1),) * 2)
    span = Span(0, 1)
    rows = ((F(0, span), B(0, span), STEP(0), F(0, span, 1), B(0, span, 1), STEP(0, 1)),)
    one = bench.replay.replayed(rows, plan, costs, [10], [10], [[0]], 1e9)
    assert one == (10 + 3 + 20 + 3, 30)
    two = bench.replay.replayed(rows, plan, costs, [10], [20], [[0]], 1e9)
    assert two == (10 + 3 + 7 + 3, 17)  # the second state is loaded while the first job runs


# Figures --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(bench):
    return bench.paper.Runs(["BERT-large"], **SMALL)


@pytest.mark.parametrize(
    "name", ["f7", "f8", "f9", "f10a", "f10b", "f10c", pytest.param("f10d", marks=pytest.mark.slow), "f11"]
)
def test_figures(bench, runs, name, tmp_path):
    tables = bench.paper.FIGURES[name](runs)
    for table in tables:
        assert all(len(row) == len(table.columns) for row in table.rows.values())
        assert str(table).count("\n") == len(table.rows)
    found = bench.paper.keys(name, tables)
    assert found
    assert all(isinstance(value, float) for value in found.values())
    if name == "f11":
        assert all(0 <= part < 1 for table in tables for row in table.rows.values() for part in row)
        one = runs.epoch("BERT-large", bench.paper.USUAL)
        work = {rows: [one.line.seconds_at(Kind.F, s, rows) for s in range(8)] for rows in one.sizes}
        forward = sum(SMALL["iterations"] * 8 // rows * sum(work[rows]) for rows in one.sizes)
        for scheme in ("Vanilla", "rounds"):  # whole batches
            assert tables[0].rows[scheme][0] == pytest.approx(
                forward / 8 / runs.seconds("BERT-large", scheme), rel=1e-6
            )
    if name in ("f7", "f11"):
        bench.paper.draw(tables, tmp_path / "figure.png", name)
        assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_figure_7_from_its_own_numbers(bench):
    runs = bench.paper.Runs(["BERT-large", "VGG-19"], **SMALL)
    times, over, gains, less = bench.paper.f7(runs)
    assert times.rows["ours"] == [runs.seconds(m, "ours") for m in runs.models]
    best = min(times.rows[n][0] for n in bench.single.SINGLE)
    assert gains.rows["ours over the best of them"][0] == pytest.approx(best / times.rows["ours"][0])
    assert over.rows["Hanayo"][1] == pytest.approx(times.rows["Hanayo"][1] / times.rows["ours"][1])
    by_hand = [1 - times.rows["ours"][n] / times.rows["GPipe"][n] for n in range(2)]
    assert less.rows["ours against GPipe"] == [pytest.approx(sum(by_hand) / 2)]
