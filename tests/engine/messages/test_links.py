"""Links as measured: against links whose speed we set, and on real transports."""

from __future__ import annotations

import pytest
import torch

from lightning_pipes.cost import Link
from lightning_pipes.engine import Mailbox
from lightning_pipes.engine.messages.links import fit_link, measure_links
from lightning_pipes.engine.messages.message import Decoder, Encoder
from lightning_pipes.ir import Plan
from lightning_pipes.testing.ranks import run_ranks
from tests.engine.pipes import connect


def test_the_link_that_fits():
    link = Link(bandwidth=2e8, latency=3e-4)
    times = {size: link.latency + link.send_seconds(size - 64) for size in (64, 4096, 2**20)}
    found = fit_link(times)
    assert found.bandwidth == pytest.approx(2e8)
    assert found.latency == pytest.approx(3e-4)
    assert fit_link({64: 1e-4, 4096: 1e-4}).bandwidth == float("inf")


class Answering:
    """A transport whose other end answers at once, over links of set speeds on a clock of its own."""

    def __init__(self, there: Link, back: Link) -> None:
        self.mailbox, self.now, self.there, self.back = Mailbox(), 0.0, there, back

    def send(self, rank, key, tree, flags=()):
        window, i = key
        self.now += (
            self.there.latency + self.there.send_seconds(tree.nbytes) + self.back.latency + self.back.send_seconds(64)
        )
        reply = (window, i._replace(kind={"RF": "RB", "RB": "RF"}[i.kind], stage={0: 1, 1: 0}[i.stage]))
        wire, tensors = Encoder().encode(reply, torch.zeros(64, dtype=torch.uint8), (), 0)
        wire.copy_tensors(tensors)
        self.mailbox.put(Decoder().decode(wire.buffer, 0, 0))

    def close(self):
        pass


def test_round_trips_need_no_common_clock(monkeypatch):
    link = Link(bandwidth=1e8, latency=2e-4)
    transport = Answering(link, link)
    monkeypatch.setattr("lightning_pipes.engine.messages.links.time.perf_counter", lambda: transport.now)
    monkeypatch.setattr("lightning_pipes.engine.messages.links._Exchange.answer_trips", lambda *args: None)
    found = measure_links(Plan.even(2, 2), 0, transport)
    assert found.keys() == {(0, 1)}
    assert found[0, 1].bandwidth == pytest.approx(1e8, rel=1e-3)
    assert found[0, 1].latency == pytest.approx(2e-4, rel=0.01)


def measured(rank: int, kind: str) -> dict[tuple[int, int], Link]:
    plan = Plan.even(3, 2)
    watch, transport = connect(rank, plan, kind)
    found = measure_links(plan, rank, transport, sizes=(2**14, 2**20), repeats=5)
    transport.close()
    watch.close()
    return found


@pytest.mark.parametrize("kind", ["local", "gloo"])
def test_every_link_of_three_ranks(kind):
    found: dict[tuple[int, int], Link] = {}
    for part in run_ranks(measured, 3, kind, timeout=30):
        found |= part
    assert found.keys() == {(0, 1), (1, 0), (1, 2), (2, 1)}
    for link in found.values():
        assert link.bandwidth > 1e6
        assert 0 < link.latency < 0.1
