"""Check when and where layers are moved, in pipelines whose true step times are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from lightning_pipes.cost import CostModel, Link, ModelProfile
from lightning_pipes.ir import Kind, Plan, Schedule, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.ir.replication import replicate_plan
from lightning_pipes.planning.planner import Problem, planner_of, solve_plan
from lightning_pipes.planning.replanning import MAX_OBSERVATIONS, HostedStage, Observation, Predicted, replay_of
from lightning_pipes.sim import makespan
from lightning_pipes.strategies.dynpipe import DynPipe, DynPlanner
from lightning_pipes.strategies.dynpipe.planner import move_seconds
from lightning_pipes.strategies.dynpipe.repartition import WindowReplay
from lightning_pipes.strategies.dynpipe.slowdown import SlowdownModel
from tests.cases import for_each
from tests.strategies.dynpipe.neighbourhood import (
    Neighbourhood,
    Slowdown,
    constant_slowdown,
    layered_model,
    rare_slowdown,
)

SOME = (1.0, 1.3, 0.7, 1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.0)
"""Relative seconds of layers with unequal weights."""


def place(slowdown: Slowdown, name: str = "1f1b", ranks: int = 4, m: int = 8, **more: Any) -> Neighbourhood:
    seconds = more.pop("seconds", SOME)
    profile = layered_model([1e-3 * t for t in seconds])
    if name == "zero_bubble":
        layers = tuple(replace(x, input_backward=x.forward, weight_backward=x.forward) for x in profile.layers)
        profile = replace(profile, layers=layers)
    return Neighbourhood(profile, make_schedule(name), ranks, 2 * m, m, slowdown, **more)


def asked(world: Neighbourhood, plan: Plan, looks: int = 2, first: int = 0, **more: Any) -> Problem:
    """Return the problem after `looks` windows of 20 batches have been observed."""
    seen = tuple(world.observe_window(plan, first + 20 * n, 20, more.get("free", ())) for n in range(looks))
    more.pop("free", None)
    return replace(world.make_problem(plan.layers), observations=seen, **more)


def least_of_all(world: Neighbourhood, stages: int) -> float:
    """Return the seconds of a true step with the best of all partitions."""
    n = len(world.profile.layers)
    cuts = combinations(range(1, n), stages - 1)
    every = [tuple(Span(a, b) for a, b in zip((0, *c), (*c, n), strict=True)) for c in cuts]
    tables = [world.operation_seconds(world.plan(layers), 1000, 2) for layers in every]
    together = {key: np.concatenate([each[key] for each in tables]) for key in tables[0]}
    plan = world.plan()
    return float(replay_of(world.order(plan), plan, 2).step_seconds(together).mean(axis=1).min())


def seconds(world: Neighbourhood, plan: Plan, first: int = 1000, batches: int = 20) -> float:
    """Return the mean seconds of a true step over batches that the planner has not observed."""
    return float(world.steps(plan, first, batches).mean())


def lived(world: Neighbourhood, looks: int, believed: ModelProfile | None = None) -> tuple[list[Plan], float, float]:
    """Return the plan of every 20 batches, the seconds of all batches, and the seconds without any move.

    A move takes the time that the planner expects. The planner uses the profile `believed`, by default the true
    profile.
    """
    plan = even = world.plan()
    seen: tuple[Observation, ...] = ()
    plans, took, stays, before = [], 0.0, 0.0, ()
    for look in range(looks):
        plans.append(plan)
        took += 20 * seconds(world, plan, 20 * look)
        stays += 20 * seconds(world, even, 20 * look)
        seen = (*seen, world.observe_window(plan, 20 * look, 20))[-MAX_OBSERVATIONS:]
        left = 20 * (looks - look - 1)
        problem = replace(
            world.make_problem(plan.layers), observations=seen, earlier_observations=before, remaining=left
        )
        new = DynPlanner().replan(plan, replace(problem, profile=believed or world.profile))
        if new is not None:
            took += move_seconds(world.profile, plan, new.layers, world.deployment)
            before, plan, seen = (*before, *((plan, each) for each in seen))[-MAX_OBSERVATIONS:], new, ()
    return plans, took, stays


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [
        ("1f1b", 4, 1.5),
        ("dynpipe", 4, 3.0),
        *(
            pytest.param(name, ranks, factor, marks=pytest.mark.slow)
            for name in ("1f1b", "dynpipe")
            for ranks in (4, 8)
            for factor in (1.5, 2.0, 3.0)
        ),
    ],
)
@pytest.mark.parametrize("onset", [41, 50, 59])
def test_it_recovers_within_60_batches(name: str, ranks: int, factor: float, onset: int) -> None:
    """Check that steps come within 10 % of the best partition in the 60 batches after a slowdown."""
    slow = [factor if rank == 1 else 1.0 for rank in range(ranks)]
    layers = 10 if ranks == 4 else 14
    world = place(
        constant_slowdown(slow, since=onset), name, ranks=ranks, seconds=np.linspace(0.8, 1.2, layers).tolist()
    )
    plans, *_ = lived(world, 8)
    after = plans[-(-(onset + 60) // 20)]
    assert seconds(world, after, batches=2) <= 1.1 * least_of_all(world, ranks)


@pytest.mark.parametrize("name", ["1f1b", "dynpipe"])
def test_a_neighbour_that_was_there_when_layers_were_measured(name: str) -> None:
    """Check a profile that was measured while another program slowed down one device.

    The program ends after 100 batches. The planner must not take the measured layers for slow ones, or a device for a
    fast one.
    """

    def slowdown(rank: int, first: int, batches: int) -> np.ndarray:
        return np.where((np.arange(first, first + batches) < 100) & (rank == 1), 3.0, 1.0)[:, None]

    world = place(slowdown, name, seconds=[10.0] * 16)
    even = world.plan()
    believed = world.profile.scaled([3.0 if 4 <= layer < 8 else 1.0 for layer in range(16)])
    plans, took, stays = lived(world, 20, believed)
    assert seconds(world, plans[-1]) <= 1.01 * seconds(world, even)
    assert took < stays


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 3))])
@pytest.mark.parametrize(
    ("name", "stays_for", "most"),
    [("1f1b", 200, 0.95), ("dynpipe", 200, 1.06), pytest.param("1f1b", 60, 1.2, marks=pytest.mark.slow)],
)
def test_neighbours_of_all_ranks(name: str, stays_for: int, most: float, seed: int) -> None:
    """Check slowdowns that come and go on every rank for random times.

    If they are long on average, moving layers saves time, although not in each case. If they last about as long as the
    planner needs to detect them, some time is lost, because the decision comes too late.
    """
    rng = np.random.default_rng(seed)
    until = np.cumsum(rng.exponential(stays_for, (4, 60)), axis=1)
    factors = np.where(rng.random((4, 60)) < 0.5, rng.uniform(1, 2.5, (4, 60)), 1.0)

    def slowdown(rank: int, first: int, batches: int) -> np.ndarray:
        at = np.minimum(np.searchsorted(until[rank], np.arange(first, first + batches)), 59)
        return np.asarray(factors[rank, at][:, None])

    _, took, stays = lived(place(slowdown, name), 40)
    assert took < most * stays


@for_each("name", ["1f1b", "kfkb", "gpipe", "zero_bubble", "dynpipe", "pipedream_2bw"])
@for_each("factors", [(1.0, 2.0, 1.0, 1.0), (3.0, 1.0, 1.0, 1.5)])
def test_it_finds_the_best_of_all_partitions(name: str, factors: Sequence[float]) -> None:
    world = place(constant_slowdown(factors), name)
    plan = world.plan()
    new = DynPlanner().replan(plan, asked(world, plan))
    assert new is not None
    assert seconds(world, new, batches=2) <= 1.01 * least_of_all(world, 4)
    assert seconds(world, new) < 0.9 * seconds(world, plan)


def test_several_stages_a_rank() -> None:
    world = place(constant_slowdown((1.0, 2.0)), "interleaved", ranks=2)
    plan = world.plan()
    assert plan.n_stages == 4
    new = DynPlanner().replan(plan, asked(world, plan))
    assert new is not None
    assert seconds(world, new, batches=2) <= 1.01 * least_of_all(world, 4)


def medians(world: Neighbourhood, plan: Plan) -> float:
    """Return the seconds of a step if every operation takes the median time of its stage."""
    found = world.observe_window(plan, 0, 20)
    known = {key: ((1, float(np.median(table))),) for key, table in found.operations.items()}
    costs = CostModel({**found.costs.seconds, **known})
    return makespan(world.order(plan), plan, costs) / 1e9


@pytest.mark.parametrize(
    ("name", "share", "factor"),
    [
        ("1f1b", 0.04, 8.0),
        ("1f1b", 0.1, 4.0),
        ("dynpipe", 0.04, 8.0),
        pytest.param("1f1b", 0.02, 15.0, marks=pytest.mark.slow),
        pytest.param("dynpipe", 0.1, 4.0, marks=pytest.mark.slow),
        pytest.param("dynpipe", 0.02, 15.0, marks=pytest.mark.slow),
    ],
)
def test_rare_operations_count(name: str, share: float, factor: float) -> None:
    """Check that rare slow operations of one stage are part of the prediction.

    The step is predicted within 5 %, also for another partition and for batches with other slow operations. Medians are
    far too low.
    """
    world = place(rare_slowdown(1, factor, share, seed=3), name, m=16)
    plan = world.plan()
    problem = asked(world, plan, looks=3)
    new = DynPlanner(gain=0.02).replan(plan, problem)
    assert new is not None
    for each in (plan, new):
        predicted = predict(problem, plan, each)
        assert predicted == pytest.approx(seconds(world, each, batches=100), rel=0.05)
    if name == "1f1b":
        assert medians(world, plan) < 0.88 * seconds(world, plan, batches=100)


def predict(problem: Problem, plan: Plan, other: Plan) -> float:
    """Return the seconds of a step with another partition, predicted from all windows of `plan`."""
    assert problem.profile is not None
    models = [SlowdownModel(problem.profile, plan, seen, problem.deployment) for seen in problem.observations]
    assert isinstance(problem.schedule, Schedule)
    return float(np.mean(WindowReplay(models, problem.schedule.program(plan)).predict_change(other.layers).new))


def shared_core(others: int, since: int, seed: int, work: float, quantum: float = 3e-3) -> Slowdown:
    """Return a slowdown of two ranks, each of which shares its core with other programs.

    The scheduler gives every program a time slice of one quantum. Both cores run `others` additional programs, and the
    core of rank 0 runs one more from batch `since` on.

    Args:
        work: processor seconds of an operation.
    """

    def slowdown_of(rank: int, first: int, batches: int) -> np.ndarray:
        waits = [quantum * (others + (rank == 0 and n >= since)) for n in range(first, first + batches)]
        begun = [np.random.default_rng((seed, rank, n)).uniform(0, quantum, 16) for n in range(first, first + batches)]
        turns = np.floor((np.array(begun) + work) / quantum)  # the turns that end before the operation ends
        return np.asarray(1 + turns * np.array(waits)[:, None] / work)

    return slowdown_of


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_neighbour_takes_half_of_a_core(others: int, seed: int) -> None:
    """Check the experiment of benchmarks/dynpipe.py on a virtual clock.

    There are two stages of 24 layers in all and a window of 5 batches. A program starts on the core of stage 0 at batch
    18, and layers must have moved by batch 40. If two more programs run on either core, the new program makes the
    operations only about a third slower, and layers must still move.
    """
    work = 12 * 0.9e-3
    world = Neighbourhood(
        layered_model([0.45e-3] * 24),
        make_schedule("1f1b"),
        2,
        16,
        8,
        shared_core(others, 18, seed, work),
    )
    plan, seen = world.plan(), ()
    planner = DynPlanner(every=5)
    for at in range(5, 45, 5):
        seen = (*seen, world.observe_window(plan, at - 5, 5))
        new = planner.replan(plan, replace(world.make_problem(plan.layers), observations=seen, remaining=48 - at))
        if new is not None:
            break
    assert 18 < at <= 40
    assert new is not None
    assert new.layers[0].rows < 12
    assert seconds(world, new) < 1.1 * least_of_all(world, 2)
    assert seconds(world, new) < 0.95 * seconds(world, plan)


class TestNothingMoves:
    """Check that layers stay if a move would not pay off."""

    @pytest.mark.parametrize("name", ["1f1b", "dynpipe"])
    def test_when_all_stages_are_slowed_alike(self, name: str) -> None:
        world = place(constant_slowdown((2.0,) * 4), name, seconds=(1.0,) * 12)
        plan = world.plan()
        assert DynPlanner().replan(plan, asked(world, plan)) is None

    @pytest.mark.parametrize(
        ("name", "period", "most"),
        [
            ("1f1b", 5, 0),
            ("1f1b", 40, 4),
            ("dynpipe", 20, 0),
            *(
                pytest.param(*case, marks=pytest.mark.slow)
                for case in [("1f1b", 2, 0), ("1f1b", 20, 0), ("dynpipe", 2, 0), ("dynpipe", 5, 0), ("dynpipe", 40, 4)]
            ),
        ],
    )
    def test_while_a_neighbour_comes_and_goes(self, name: str, period: int, most: int) -> None:
        """Check a slowdown that is present half of the time.

        A short slowdown must not cause any move. A slowdown that lasts just as long as the planner needs to detect it
        causes a few useless moves.
        """

        def slowdown(rank: int, first: int, batches: int) -> np.ndarray:
            there = np.arange(first, first + batches) // period % 2 == 1
            return np.where(there & (rank == 2), 1.4, 1.0)[:, None]

        world = place(slowdown, name, seconds=(1.0,) * 16)
        plans, took, stays = lived(world, 29)
        assert len({*plans}) - 1 <= most
        assert took < 1.05 * stays

    def test_before_it_has_been_so_for_several_looks(self) -> None:
        world = place(constant_slowdown((1.0, 2.0, 1.0, 1.0), since=20))
        plan = world.plan()
        assert DynPlanner().replan(plan, asked(world, plan, looks=1, first=20)) is None
        assert DynPlanner().replan(plan, asked(world, plan, looks=2)) is None  # the first window had no slowdown
        assert DynPlanner().replan(plan, asked(world, plan, looks=3)) is not None
        assert DynPlanner(windows=1).replan(plan, asked(world, plan, looks=2)) is not None

    def test_while_everything_takes_as_long_as_in_looks_before(self) -> None:
        """Check that the planner does not decide again while times stay the same.

        It decides again only if the number of windows has doubled, and periodically because times may drift.
        """
        world = place(constant_slowdown((1.0, 2.0, 1.0, 1.0)))
        plan = world.plan()
        quick = DynPlanner(horizon=10**9)
        for looks in (2, 4, 8):
            assert quick.replan(plan, asked(world, plan, looks=looks)) is not None
        assert quick.replan(plan, asked(world, plan, looks=5)) is None
        # the number of windows no longer grows
        assert quick.replan(plan, asked(world, plan, looks=MAX_OBSERVATIONS)) is None
        assert quick.replan(plan, asked(world, plan, looks=5, remaining=20 * 9)) is None
        assert quick.replan(plan, asked(world, plan, looks=5, remaining=20 * 8)) is not None
        changes = place(constant_slowdown((1.0, 2.0, 1.0, 1.0), since=40))
        assert quick.replan(plan, asked(changes, plan, looks=5)) is not None

    def test_when_it_takes_longer_than_it_saves(self) -> None:
        world = place(constant_slowdown((1.0, 2.0, 1.0, 1.0)))
        plan = world.plan()
        new = DynPlanner().replan(plan, asked(world, plan))
        assert new is not None
        saved = seconds(world, plan) - seconds(world, new)
        takes = move_seconds(world.profile, plan, new.layers, world.deployment)
        most = int(takes / saved)
        assert most >= 1 or takes > 0
        slow = replace(world, link=Link(bandwidth=world.link.bandwidth / 1e3))
        again = asked(slow, plan, remaining=4)
        assert DynPlanner().replan(plan, again) is None
        assert DynPlanner(horizon=4).replan(plan, replace(again, remaining=None)) is None
        assert DynPlanner().replan(plan, replace(again, remaining=10**6)) is not None

    def test_when_a_stream_has_to_run_dry_for_too_little(self) -> None:
        """Check that the flush of a stream counts as a cost of the move.

        Stages finish their batches and fill again, which takes as long as half a batch on 4 stages with 8
        micro-batches.
        """
        world = place(constant_slowdown((1.0, 1.5, 1.0, 1.0)), "dynpipe", link=Link(bandwidth=1e15))
        plan = world.plan()
        new = DynPlanner().replan(plan, asked(world, plan))
        assert new is not None
        saved = seconds(world, plan) - seconds(world, new)
        least = 4 / 8 * seconds(world, plan) / saved
        assert least > 1.01
        assert DynPlanner().replan(plan, asked(world, plan, remaining=int(least))) is None
        assert DynPlanner().replan(plan, asked(world, plan, remaining=int(least) + 2)) is not None

    def test_without_what_it_needs(self) -> None:
        world = place(constant_slowdown((1.0, 2.0, 1.0, 1.0)))
        plan = world.plan()
        whole = asked(world, plan)
        for less in (replace(whole, profile=None), replace(whole, observations=())):
            assert DynPlanner().replan(plan, less) is None
        torn = replace(whole.observations[1], operations={(Kind.F, 0): np.ones((20, 8))})
        assert DynPlanner().replan(plan, replace(whole, observations=(whole.observations[0], torn))) is None

    def test_of_layers_that_share_a_parameter(self) -> None:
        """Check that layers which share a parameter stay together, or stay on different stages.

        The pairs are layers 0 and 9 at both ends, layers 3 and 4 in one stage, and layers 4 and 5 in two stages.
        """
        world = place(constant_slowdown((1.0, 2.0, 1.0, 1.0)))
        plan = world.plan()
        spans = [tuple(span) for span in plan.layers]
        for tied in ((0, 9), (3, 4), (4, 5)):
            new = DynPlanner().replan(plan, asked(world, plan, tied=(tied,)))
            assert new is not None
            were, are = (
                [next(s for s, x in enumerate(p) if x[0] <= n < x[1]) for n in tied] for p in (spans, new.layers)
            )
            assert were == are or len({*were}) == len({*are}) == 1


def test_a_bad_measurement_is_no_operation() -> None:
    """Check that a missing measurement is treated as if it had the typical time of its stage."""
    world = place(constant_slowdown((1.0, 2.0, 1.0, 1.0)))
    plan = world.plan()
    whole = asked(world, plan)
    expected = DynPlanner().replan(plan, whole)
    for look in whole.observations:
        look.operations[Kind.F, 0][3, 2] = np.nan  # type: ignore[index]
    assert DynPlanner().replan(plan, whole) == expected


def test_free_memory_limits_the_layers_of_a_device() -> None:
    """Check that a device only takes the layers that fit into its free memory.

    A layer needs 4 MB, and only rank 3 has room for one more layer.
    """
    world = place(constant_slowdown((1.0, 2.0, 1.0, 1.0)), seconds=(1.0,) * 12)
    plan = world.plan()
    free = (10**6, None, 10**6, 5 * 10**6)
    new = DynPlanner().replan(plan, asked(world, plan, free=free))
    assert new is not None
    grown = [after.rows - before.rows for before, after in zip(plan.layers, new.layers, strict=True)]
    assert grown == [0, -1, 0, 1]
    for memory, moves in ((13 * 10**6, False), (17 * 10**6, True)):  # room for three layers on each device, or for four
        limited = replace(world, memory=memory)
        assert (DynPlanner().replan(plan, asked(limited, plan)) is not None) is moves


def test_only_neighbours_take_over_what_moves_step_by_step() -> None:
    world = place(constant_slowdown((1.0, 3.0, 1.0, 1.0)), seconds=(1.0,) * 16)
    plan = world.plan()
    planner = planner_of(DynPipe(incremental=True))
    assert isinstance(planner, DynPlanner)
    far = DynPlanner().replan(plan, asked(world, plan))
    near = planner.replan(plan, asked(world, plan))
    assert far is not None
    assert near is not None
    assert max(abs(a.start - b.start) for a, b in zip(plan.layers, near.layers, strict=True)) == 1
    assert max(abs(a.start - b.start) for a, b in zip(plan.layers, far.layers, strict=True)) > 1
    assert seconds(world, far) < seconds(world, near) < seconds(world, plan)


class Worse:
    """Predicts a slowdown of the stage on the last rank that is proportional to its number of layers."""

    def __init__(self, known: bool = True, bias: float = 1.0) -> None:
        self.known, self.bias, self.asked = known, bias, 0

    def predict(self, rows: Sequence[tuple[Mapping[str, float], HostedStage]]) -> Predicted:
        self.asked += 1
        ratios = [1.0 + device.get("busy", 0.0) * stage.layers for device, stage in rows]
        return Predicted(self.bias * np.array(ratios), np.full(len(rows), self.known))


def test_a_predictor_says_what_other_layers_suffer() -> None:
    """Check that the planner uses a predictor for the slowdown of a changed stage.

    Another program slows down the stage on rank 3 by 0.3 for each of its layers, so that with fewer layers each of them
    is faster. The last measured factor alone would move more layers than is best.
    """

    def slowdown(rank: int, first: int, batches: int) -> np.ndarray:
        return np.full((1, 1), 1.0 + 0.3 * layers[rank] if rank == 3 else 1.0)

    layers = [4, 4, 4, 4]
    world = place(slowdown, seconds=(1.0,) * 16, m=16)
    plan = world.plan()
    whole = asked(world, plan)
    devices = ({}, {}, {}, {"busy": 0.3})
    whole = replace(
        whole, observations=tuple(replace(x, devices=devices, free=(None,) * 4) for x in whole.observations)
    )
    found = {}
    for name, predictor in {
        "none": None,
        "knows": Worse(),
        "biased": Worse(bias=1.7),
        "does not know": Worse(known=False),
    }.items():
        new = DynPlanner(predictor=predictor).replan(plan, whole)
        assert new is not None
        found[name] = new.layers
    assert found["biased"] == found["knows"]
    assert found["does not know"] == found["none"]
    true = {}
    for name in ("none", "knows"):
        layers[:] = [span.rows for span in found[name]]
        true[name] = seconds(world, world.plan(found[name]), batches=1)
    assert true["knows"] < true["none"]


def test_after_a_move_in_vain_the_next_one_has_to_promise_more() -> None:
    """Check that a useless move raises the gain which the planner requires for the next one.

    Stage 1 is slow because layer 4 takes three times as long as in its profile, not because the device is slow. Moving
    a layer away therefore saves less than predicted.
    """
    true = place(constant_slowdown((1.0,) * 4), seconds=[3.0 if n == 4 else 1.0 for n in range(16)])
    believed = place(constant_slowdown((1.0,) * 4), seconds=(1.0,) * 16)
    plan = believed.plan()
    planner = DynPlanner()

    def problem(of: Plan, looks: int, before: Any) -> Problem:
        seen = tuple(true.observe_window(of, 20 * n, 20) for n in range(looks))
        return replace(believed.make_problem(of.layers), observations=seen, earlier_observations=before)

    moves: list[Plan] = [plan]
    before: tuple[tuple[Plan, Observation], ...] = ()
    for _ in range(12):
        now = problem(moves[-1], 8 if before else 2, before)
        new = planner.replan(moves[-1], now)
        if new is None:
            break
        before = (*before, *((moves[-1], look) for look in now.observations))
        moves.append(new)
    assert 2 <= len(moves) <= 4
    again = planner.replan(moves[-1], problem(moves[-1], 2, ()))
    assert again is not None  # without the history it would have moved again
    assert seconds(true, moves[-1]) <= seconds(true, plan)


def looked(
    planner: DynPlanner, worlds: Sequence[Neighbourhood], plan: Plan | None = None, first: int = 0
) -> list[Plan]:
    """Return the plan in each window of these worlds, in order, and the plan after the last window."""
    at = worlds[0]
    plans, seen, before = [plan or at.plan()], (), ()
    for n, world in enumerate(worlds):
        seen = (*seen, world.observe_window(plans[-1], first + 20 * n, 20))
        problem = replace(at.make_problem(plans[-1].layers), observations=seen, earlier_observations=before)
        new = planner.replan(plans[-1], problem)
        if new is not None:
            before, seen = (*before, *((plans[-1], look) for look in seen)), ()
        plans.append(new or plans[-1])
    return plans


@pytest.mark.parametrize("name", ["1f1b", "dynpipe"])
def test_layers_stop_following_short_visits_of_neighbours(name: str) -> None:
    """Check slowdowns that last two windows and then appear on another rank, where every move is too late.

    Moves soon stop, because windows of earlier plans count too. When a slowdown finally stays, layers move.
    """
    quiet, *slow = (
        place(constant_slowdown([2.0 if rank == at else 1.0 for rank in range(4)]), name, seconds=(1.0,) * 16)
        for at in (9, 0, 1, 2, 3)
    )
    plans = looked(DynPlanner(), [slow[n // 2 % 4] for n in range(40)] + [slow[1]] * 16)
    assert len({plan.layers for plan in plans[10:41]}) == 1
    assert plans[-1].layers[1].rows < plans[40].layers[1].rows
    assert seconds(slow[1], plans[-1]) < 0.8 * seconds(slow[1], quiet.plan())


def test_layers_follow_a_neighbour_that_stays() -> None:
    """Check a slowdown that visits the ranks in turn for ten windows each.

    Layers move once for each rank, two or three windows after the slowdown starts.
    """
    worlds = [
        place(constant_slowdown([2.0 if r == n else 1.0 for r in range(4)]), seconds=(1.0,) * 16)
        for n in (0, 1, 2, 3, 0, 1)
    ]
    plans = looked(DynPlanner(), [world for world in worlds for _ in range(10)])
    for n, world in enumerate(worlds):
        assert len({plan.layers for plan in plans[10 * n : 10 * n + 11]}) == 2
        assert seconds(world, plans[10 * n + 3], batches=2) <= 1.05 * least_of_all(world, 4)


@pytest.mark.parametrize("name", ["1f1b", "dynpipe"])
def test_the_price_of_a_move_depends_on_how_layers_move(name: str) -> None:
    """Check the number of remaining batches from which a move pays off, for each kind of relocation.

    If all ranks wait during the transfer, the whole transfer must be regained. If layers are transferred during the
    batches, only the gradients count, but until the transfer ends nothing is gained.
    """
    world = place(constant_slowdown((1.0, 2.0, 1.0, 1.0)), name)
    plan = world.plan()
    new = DynPlanner().replan(plan, asked(world, plan))
    assert new is not None
    saved = seconds(world, plan) - seconds(world, new)
    slow = replace(world, link=Link(bandwidth=world.link.bandwidth / 1e3))
    travels = move_seconds(slow.profile, plan, new.layers, slow.deployment)
    gradients = move_seconds(slow.profile, plan, new.layers, slow.deployment, ("gradients",))
    assert gradients == pytest.approx(travels / 3)  # the optimizer states have twice the size of the weights
    step = float(seconds(slow, plan))
    flush = 0.0 if name == "1f1b" else step * 4 / 8
    for moves, least in {
        "blocking": (travels + flush) / saved,
        "overlapped": travels / step + (gradients + flush) / saved,
        "buffered": travels / step + (gradients + flush) / saved,
    }.items():
        for remaining, wants in ((int(0.8 * least), False), (int(1.3 * least) + 1, True)):
            problem = asked(slow, plan, remaining=remaining, relocation=moves)
            assert (DynPlanner().replan(plan, problem) is not None) is wants, (moves, remaining)


def test_samples_go_to_faster_ranks_of_a_stage_where_that_pays() -> None:
    planner = DynPlanner()

    def shares(name: str, *seconds: list[list[float]], **more: Any) -> Any:
        problem = Problem(make_schedule(name), 2, 16, 1, **more)
        plan = replicate_plan(solve_plan(problem), [2, 1])
        looks = tuple(Observation(CostModel.uniform(2, 1.0, 2.0), replicas=each) for each in seconds)
        return planner.balance_shares(plan, replace(problem, observations=looks))

    slow = [[1.0, 3.0], [0.5]]
    assert shares("1f1b", slow, slow) == slow
    assert shares("1f1b", slow) is None  # one window is not enough
    assert shares("1f1b", slow, [[1.0, 1.0], [0.5]]) is None  # the slowdown has ended
    assert shares("1f1b", *[[[1.0, 1.1], [0.5]]] * 2) is None
    assert shares("1f1b", *[[[1.0, 3.0], [5.0]]] * 2) is None  # another stage takes longer
    assert shares("1f1b", *[[[1.0, math.nan], [0.5]]] * 2) is None
    assert shares("1f1b", *[[[1.0, 90.0], [0.5]]] * 2) == [[1.0, 8.0], [0.5]]  # each rank keeps at least one sample
    assert shares("pipedream", slow, slow) == slow
    assert shares("pipedream", slow, slow, remaining=2) is None  # flushing the pipeline would cost more than it saves
