"""Clocks of neighbours that differ by what we set, over links that take unequally long: no real time passes.
And on hosts of their own."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from lightning_pipes.engine import Engine, Item, Mailbox
from lightning_pipes.engine.messages import clocks
from lightning_pipes.engine.messages.clocks import clock_id, measure_offsets
from lightning_pipes.engine.messages.message import Decoder, Encoder
from lightning_pipes.ir import SENDS, Kind, Plan
from lightning_pipes.planning.measured import Averages, StepSample
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing import netlab
from lightning_pipes.testing.emulated import Emulation, sleeping_layer
from lightning_pipes.testing.ranks import run_ranks, scale_timeout
from tests.engine.pipes import batch, connect, layers, make_stages

MS = 1_000_000


class Skewed:
    """One end of a line: stamps by a clock that is ahead; a message takes so long, every third of rank 0 longer."""

    def __init__(self, boxes, rank, time, ahead, takes):
        self.mailbox, self.boxes, self.rank = boxes[rank], boxes, rank
        self.time, self.ahead, self.takes, self.count = time, ahead, takes, 0

    def send(self, rank, key, tree, flags=()):
        sent = self.time[0] + self.ahead[self.rank]
        self.time[0] += self.takes[self.rank] + (
            50 * MS if self.rank == 0 and self.count % 3 == 0 else 0
        )  # held up now and then
        self.count += 1
        wire, tensors = Encoder().encode(key, tree, flags, sent)
        wire.copy_tensors(tensors)
        message = Decoder().decode(wire.buffer, 0, 0)
        self.boxes[rank].put(message._replace(arrived=self.time[0] + self.ahead[rank]))


def offsets(monkeypatch, ahead, takes, names=("a", "b")):
    boxes, time = [Mailbox(), Mailbox()], [10**12]
    ends = [Skewed(boxes, rank, time, ahead, takes) for rank in (0, 1)]
    monkeypatch.setattr(
        "lightning_pipes.engine.messages.clocks.time.monotonic_ns", lambda: time[0] + ahead[0]
    )  # rank 0 asks
    found = {}
    plan = Plan.even(2, 2)
    threads = [
        threading.Thread(target=lambda r=rank: found.update({r: measure_offsets(plan, r, ends[r], name=names[r])}))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=scale_timeout(20))
    return found


@pytest.mark.parametrize("ahead", [(0, 0), (0, 7 * 3600 * 10**9), (123456, -987654321)])
def test_equal_ways_give_the_offset(monkeypatch, ahead):
    found = offsets(monkeypatch, ahead, (MS, MS))
    assert found == {0: {1: ahead[0] - ahead[1]}, 1: {0: ahead[1] - ahead[0]}}


def test_unequal_ways_err_by_half_their_difference(monkeypatch):
    found = offsets(monkeypatch, (0, 5 * MS), (MS, 3 * MS))
    assert found[0][1] == -5 * MS + MS
    assert found[1][0] == -found[0][1]


def test_one_clock_needs_no_correction(monkeypatch):
    assert offsets(monkeypatch, (0, 5 * MS), (MS, 3 * MS), names=("a", "a")) == {0: {1: 0}, 1: {0: 0}}


def test_nobody_knows_the_clock(monkeypatch):
    assert offsets(monkeypatch, (0, 5 * MS), (MS, MS), names=("", "")) == {0: {1: -5 * MS}, 1: {0: 5 * MS}}


def real(rank: int, kind: str) -> dict[str, object]:
    plan = Plan.even(3, 4, rows=8)
    watch, transport = connect(rank, plan, kind)
    same = measure_offsets(plan, rank, transport)
    measured = measure_offsets(plan, rank, transport, name=f"clock of {rank}")  # as if on other hosts
    engine = Engine(
        plan, OneFOneB().program(plan), make_stages(plan, rank, layers()), transport, rank=rank, watch=watch
    )
    engine.set_clocks()
    engine._offsets = dict.fromkeys(engine._offsets, 3600 * 10**9)  # as if the neighbours' clocks were an hour behind
    engine.inject(Item(0, 8, batch()))
    engine.drain()
    moved = [e.end - e.start for e in engine.events if e.instruction.kind in SENDS]
    engine.close()
    watch.close()
    return {"same": same, "measured": measured, "clock": clock_id(), "moved": moved}


@pytest.mark.parametrize("kind", ["local", "gloo"])
def test_three_ranks(kind):
    found = run_ranks(real, 3, kind, timeout=30)
    assert len({r["clock"] for r in found}) == 1
    assert [r["same"] for r in found] == [{1: 0}, {0: 0, 2: 0}, {1: 0}]
    for rank, r in enumerate(found):
        assert set(r["measured"]) == {n for n in (rank - 1, rank + 1) if 0 <= n < 3}
        assert all(abs(n) < 20 * MS for n in r["measured"].values())  # one clock in truth
        assert r["moved"]
        assert not any(r["moved"])  # what arrives before it was sent has no duration, and is told by that


HOUR = 3600 * 10**9
MESSAGE, BANDWIDTH = 64 * 1024, 2e6


def across(rank: int) -> list[StepSample]:
    """Steps on two hosts whose clocks are an hour apart; before the third one, rank 1's is set back by ten seconds,
    and only the fourth is after clocks were compared again."""
    torch.set_num_threads(1)
    real, ahead = time.monotonic_ns, [rank * HOUR]
    time.monotonic_ns = lambda: real() + ahead[0]
    clocks.clock_id = lambda: f"clock of {rank}"
    plan = Plan.even(2, 4, layers=even_partition([1.0, 1.0], 2))
    layer = sleeping_layer(0.001, 0.002, message_bytes=MESSAGE)
    emulation = Emulation(plan, OneFOneB().program(plan), (layer,) * 2, (1.0,) * 2)
    watch, transport = connect(rank, plan)
    engine = Engine(plan, emulation.order, emulation.stages(rank), transport, rank=rank, watch=watch)
    engine.set_clocks()
    found = []
    for number in range(4):
        ahead[0] -= 10 * 10**9 if number == 2 and rank == 1 else 0
        if number == 3:
            engine.set_clocks()
        dist.barrier()
        since = time.monotonic_ns()
        engine.inject(Item(0, 4))
        engine.drain()
        found.append(StepSample.from_events(engine.events, plan, since))
    engine.close()
    watch.close()
    return found


@pytest.mark.alone  # beside others a message may be held up for longer than it takes
@pytest.mark.root
@pytest.mark.skipif(bool(netlab.lab_unavailable_reason()), reason=netlab.lab_unavailable_reason())
def test_hosts_whose_clocks_differ_and_jump():
    with netlab.NetLab(2, BANDWIDTH) as lab:
        found = lab.run_ranks(across, timeout=60)
    averages = Averages()
    for number, step in enumerate(zip(*found, strict=True)):
        averages.add(step)
        assert (averages.impossible > 0) == (number == 2)
        for kind, stage in ((Kind.SF, 0), (Kind.SB, 1)):
            takes = averages.costs().seconds_at(kind, stage, 1)
            assert takes == pytest.approx(MESSAGE / BANDWIDTH, rel=0.2)  # more than what others' noise adds
