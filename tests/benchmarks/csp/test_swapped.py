"""Check streams whose layers are swapped in and out of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.papers.csp.emulation.spaces import NLP, Placed, Space, Subnets, balanced, fixed, space_of
from benchmarks.papers.csp.emulation.stream import Ran, Rules, run
from benchmarks.papers.csp.emulation.swapped import ahead, in_turn, nothing, one_step, order_of, swapped
from benchmarks.papers.csp.emulation.swapping import Residents
from benchmarks.papers.csp.emulation.systems import bsp, stale_reads
from lightning_pipes.sim.predictor import PendingBackward, Task, TaskPrediction, WaitingSubnet

STAGES = 4
SPACE = Space("small", 16, 24, NLP)


def random_subnets(seed: int) -> Subnets:
    rng = np.random.default_rng(seed)
    forward, backward = (rng.integers(1, 9, (12, 8)) * 4 for _ in range(2))
    choices = rng.integers(0, 4, (12, 8))
    return Subnets(choices, forward, backward, rng.integers(1, 9, (4, 8))[choices, np.arange(8)])


@pytest.mark.parametrize(
    ("rules", "cut"),
    [
        (Rules(1, overhead=0), balanced),
        (Rules(3, depth=4, message=9, latency=2, overhead=1, moving=3), balanced),
        (Rules(2, bulk=4, checks=False, forwards_first=True, overhead=1), fixed),
        (Rules(2, checks=False, held=(4, 3, 2, 1), overhead=0), fixed),
    ],
)
def test_is_the_plain_stream_where_all_layers_are_there(monkeypatch, rules: Rules, cut) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(Residents, "missing", lambda self, needs: [])
    monkeypatch.setattr(Residents, "use", lambda self, layers: None)
    placed = cut(random_subnets(rules.microbatches), STAGES)
    ran = run(placed, rules)
    found = swapped(placed, rules, 3, nothing())
    assert (found.starts == np.stack([ran.forwards[0], ran.backwards[0]])).all()
    assert (found.makespan, found.stall) == (ran.makespan, 0)


@pytest.mark.parametrize("m", [1, 3])
def test_everything_runs_once_and_nothing_reads_a_stale_layer(m: int) -> None:
    placed, rules = balanced(SPACE.draw(30, m), STAGES), Rules(m)
    for make in (nothing(), one_step(placed), in_turn(rules), ahead(placed, rules, 3)):
        found = swapped(placed, rules, 2, make)
        assert found.starts.min() >= 0
        times = np.stack([placed.forward, placed.backward])[..., None] // m + rules.overhead
        forwards, backwards = np.stack([found.starts, found.starts + times], axis=1)
        assert stale_reads(Ran(placed, rules, forwards, backwards)) == 0
        for stage in range(STAGES):  # one task at a time
            begun = np.concatenate([forwards[0, :, stage].ravel(), backwards[0, :, stage].ravel()])
            ended = np.concatenate([forwards[1, :, stage].ravel(), backwards[1, :, stage].ravel()])
            order = np.argsort(begun)
            assert (begun[order][1:] >= ended[order][:-1]).all()


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_prefetching_is_never_worse_and_the_exact_order_nearly_always_hits(seed: int, m: int) -> None:
    placed, rules = balanced(SPACE.draw(40, seed), STAGES), Rules(m)
    plain = run(placed, rules)
    makes = (nothing(), one_step(placed), in_turn(rules), ahead(placed, rules, 3, plain))
    without, paper, turns, exact = (swapped(placed, rules, 3, make) for make in makes)
    assert without.hit_rate < paper.hit_rate < exact.hit_rate
    assert without.makespan >= paper.makespan
    assert without.makespan >= turns.makespan
    assert without.makespan >= exact.makespan
    assert exact.hit_rate >= exact.switch_hit_rate >= 0.95
    assert exact.stall <= 0.02
    jittered = swapped(placed, rules, 3, ahead(placed, rules, 3, plain), jitter=0.1, seed=seed)
    assert jittered.hit_rate >= 0.95


class Wrong:
    """A predictor that only predicts subnets at the end of the stream."""

    def __init__(self, placed: Placed) -> None:
        self._last = len(placed.subnets) - 1

    def before(
        self, task: Task, queue: Sequence[WaitingSubnet], told: Sequence[PendingBackward] = ()
    ) -> TaskPrediction:
        return TaskPrediction((self._last - task.subnet % 7,))

    def idle(self, queue: Sequence[WaitingSubnet]) -> TaskPrediction:
        return TaskPrediction((self._last,))


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_prediction_costs_little(seed: int) -> None:
    placed, rules = balanced(SPACE.draw(40, seed), STAGES), Rules(2)
    without = swapped(placed, rules, 3, nothing()).makespan
    assert swapped(placed, rules, 3, lambda stage: Wrong(placed)).makespan <= 1.05 * without


def test_hits_are_those_of_layers_that_are_there() -> None:
    """Check one subnet on one stage with the order F B F B: every access to a layer after the first is a hit."""
    placed = balanced(space_of("NLP.c3").draw(1, 0), 1)
    found = swapped(placed, Rules(2, overhead=0), 3, nothing())
    assert found.tasks == (3 * 48, 4 * 48)
    assert found.contexts == found.tasks
    assert found.makespan == run(placed, Rules(2, overhead=0)).makespan + placed.subnets.swap.sum()
    assert found.stalled == placed.subnets.swap.sum()


def test_bulks_whose_layers_take_turns_hit_little() -> None:
    system = bsp()
    subnets = space_of("NLP.c1").draw(24, 0)
    found = swapped(system.cut(subnets, 8), system.rules(Rules(), 8), 3, nothing())
    assert found.hit_rate < 0.2
    assert found.makespan > system.run(subnets, 8, Rules()).makespan


def test_tasks_of_a_stage_in_their_order() -> None:
    placed, rules = balanced(random_subnets(1), STAGES), Rules(2, overhead=0)
    order = order_of(run(placed, rules), 2)
    assert len(order) == len({*order}) == 12 * 2 * 2
    assert order[0] == Task(0, False, 0)


def test_never_more_on_a_device_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[float] = []
    begin = Residents.begin

    def watched(self: Residents, load) -> None:  # type: ignore[no-untyped-def]
        begin(self, load)
        most.append(self.used / self.room)

    monkeypatch.setattr(Residents, "begin", watched)
    placed, rules = balanced(SPACE.draw(30, 0), STAGES), Rules(2)
    swapped(placed, rules, 3, ahead(placed, rules, 3))
    assert 0.9 < max(most) <= 1
