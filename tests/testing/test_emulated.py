"""Emulated layers take the given time on the clock of the package, and the fidelity benchmark measures this time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.harness.emulated import EmulatedLayer, EmulatedStep, sleeping_layer, step_seconds
from lightning_pipes.cost import Link
from lightning_pipes.engine.compute.autograd import SavedForward, backward, enter_stage, leave_stage
from lightning_pipes.engine.compute.split import backward_inputs
from lightning_pipes.ir import I, Kind, Span
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.sim import simulate
from tests.virtual_clock import TICK, VirtualClock

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fidelity():
    from benchmarks import fidelity

    return fidelity


@pytest.fixture(autouse=True)
def virtual_clock(monkeypatch):
    VirtualClock().patch(monkeypatch)


def timed(work):
    """Return the seconds that a call takes, and its result."""
    began = read_seconds()
    result = work()
    return read_seconds() - began, result


def exactly(seconds):
    """Return an approximate value that allows for a few reads of the clock."""
    return pytest.approx(seconds, abs=3 * TICK / 1e9)


def forward(layer):
    """Run the forward of a layer, and return its seconds and the saved forward."""
    saved = SavedForward(Span(0, 2), None)
    seconds, _ = timed(lambda: leave_stage(layer(enter_stage(torch.ones(2, 3), (True,), saved)), saved))
    return seconds, saved


class TestEmulatedLayers:
    @pytest.mark.parametrize("weights", [0.0, 0.03])
    def test_take_their_time(self, weights):
        layer = EmulatedLayer(sleeping_layer(0.01, 0.05, weights))
        seconds, saved = forward(layer)
        assert seconds == exactly(0.01)
        seconds, _ = timed(lambda: backward([(saved, [torch.ones(2, 3)])], last=False))
        assert seconds == exactly(0.05)
        assert all(p.grad is not None for p in layer.parameters())

    def test_in_two_parts(self):
        layer = EmulatedLayer(sleeping_layer(0.0, 0.25, weights=0.2))
        _, saved = forward(layer)
        first, left = timed(lambda: backward_inputs([(saved, [torch.ones(2, 3)])], last=False))
        assert not left.inseparable
        assert first == exactly(0.05)
        (entered,) = saved.entered
        assert torch.equal(entered.grad, torch.ones(2, 3))
        second, _ = timed(left.compute)
        assert second == exactly(0.2)

    def test_by_rows_and_speed(self):
        profile = replace(sleeping_layer(0.0, 0.0), forward=((1, 0.01), (2, 0.03)))
        seconds, _ = forward(EmulatedLayer(profile, speed=0.5))
        assert seconds == exactly(0.06)


def test_steps_end_with_the_last_rank():
    ranks = [EmulatedStep(((10, 40), (50, 60)), ()), EmulatedStep(((20, 70), (55, 57)), ())]
    assert step_seconds(ranks) == pytest.approx([60e-9, 10e-9])


class TestFidelity:
    @pytest.mark.parametrize("transfer", [0.0, 0.005])
    def test_overheads_are_found_in_what_was_recorded(self, fidelity, transfer):
        """Overheads are recovered from trainings that were simulated with them, with different schedules."""
        link = Link(fidelity.MESSAGE / transfer, burst=8192) if transfer else Link()
        links = {(a, b): link for a in range(4) for b in range(4) if a != b}
        kinds = {Kind.F: 1e-3, Kind.B: 2e-3, Kind.I: 4e-3, Kind.W: 8e-3}
        overheads = fidelity.Overheads(5e-4, kinds, 3e-4)
        trainings = []
        for name in ("zero_bubble", "1f1b"):
            cell = fidelity.equal_stages(name, microbatches=8)
            run = simulate(cell.emulation.order, cell.plan, cell.costs(links, overheads))
            assert cell.predicted(links, overheads) == run.makespan / 1e9
            none = I(0, cell.plan.spans(Kind.I, 0)[0])  # the engine does not compute input gradients on stage 0
            events = [
                tuple(
                    e._replace(end=e.start) if e.instruction._replace(span=none.span) == none else e
                    for e in run.events
                    if e.rank == r
                )
                for r in range(4)
            ]
            trainings.append((cell, [EmulatedStep(((0, run.makespan),), (mine,)) for mine in events]))
        found = fidelity.Overheads.of(trainings, links)
        assert found.computation == pytest.approx(kinds)
        assert found.between == pytest.approx(overheads.between)
        assert found.message == pytest.approx(overheads.message, rel=0.1)

    def test_regret_is_relative_to_the_best_measured(self, fidelity):
        cell = fidelity.equal_stages("1f1b")
        candidates = [fidelity.Candidate(cell, 1.0, t, t == 1.1) for t in (1.0, 1.1, 1.2)]
        assert fidelity.regret(candidates) == pytest.approx(0.1)

    def test_kfkb_with_k_1_is_1f1b(self, fidelity):
        one, other = fidelity.equal_stages("kfkb", k=1), fidelity.equal_stages("1f1b")
        assert one.emulation.order.to_lines() == other.emulation.order.to_lines()

    def test_a_slow_rank_can_be_made_up_for(self, fidelity):
        """The number of layers in the benchmark allows a cut with which all ranks take the same time."""
        layers, slow = fidelity.MANY, fidelity.SLOW_RANK
        shares = [layers / (4 - 1 / 3) * (2 / 3 if rank == slow else 1) for rank in range(4)]
        assert shares == pytest.approx([12, 8, 12, 12])
