"""If a rank fails, all other ranks end within seconds and report the rank, the place and the reason."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from lightning_pipes.engine import Engine, Item, PeerFailure, Stage
from lightning_pipes.ir import Plan, PlanError, Schedule, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.ranks import scale_timeout, watch_ranks
from lightning_pipes.testing.reference import Loopback
from tests.engine.pipes import ROWS, batch, body, connect, layers, make_stages

RANKS = 3


def train(rank: int, what: str, victim: int, transport_name: str) -> None:
    """Train until the rank `victim` fails in its second step, in the way that `what` specifies."""
    schedule = make_schedule("1f1b")
    assert isinstance(schedule, Schedule)
    plan = Plan.even(RANKS, 4, ROWS)
    watch, transport = connect(rank, plan, transport_name)
    calls = 0

    def failing(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        nonlocal calls
        calls += 1
        if rank == victim and calls == 6:
            if what == "raise":
                raise ValueError("no such token")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "interrupt":
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
                time.sleep(60)  # until the signal arrives
        return body(stage, item, span, received)

    model = layers(3)
    stages = make_stages(plan, rank, model, body=failing)
    engine = Engine(plan, schedule.program(plan), stages, transport, rank=rank, watch=watch)
    try:
        for number in range(100):
            engine.inject(Item(number, ROWS, batch(number)))
            engine.drain()
    finally:
        engine.close()
        watch.close()


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("what", ["raise", "kill", "interrupt"])
@pytest.mark.parametrize("transport", ["local", "gloo"])
def test_all_ranks_end(what: str, victim: int, transport: str) -> None:
    """After a failure of one rank, all ranks end within 10 seconds, and their errors name that rank."""
    outcomes = watch_ranks(train, RANKS, what, victim, transport, timeout=30)
    for o in outcomes:
        assert o.seconds - outcomes[victim].seconds < scale_timeout(10), o
        assert o.error, o
        if o.rank == victim:
            expected = {"raise": "no such token", "kill": "exit code -9", "interrupt": "KeyboardInterrupt"}[what]
            assert expected in o.error
            if what == "raise":
                assert f"in instruction F{victim}[2:4] (forward of stage {victim}, samples 2 to 3)" in o.error
        else:
            assert PeerFailure.__name__ in o.error
            assert f"rank {victim}" in o.error
            if what == "raise":
                assert "ValueError: no such token" in o.error
                assert f"stage {victim}" in o.error


def test_injected_batch_too_large() -> None:
    schedule = make_schedule("1f1b")
    assert isinstance(schedule, Schedule)
    plan = Plan.even(2, 4, ROWS)
    pipe = Loopback(plan, schedule.program(plan), lambda r: make_stages(plan, r, layers()))
    with pytest.raises(PlanError, match="adopt a plan for the larger batch"):
        pipe.inject(lambda: Item(0, ROWS + 1, batch(0, ROWS + 1)))


def test_wrong_stages() -> None:
    """An engine whose rank does not have the stages of the plan is refused."""
    schedule = make_schedule("1f1b")
    assert isinstance(schedule, Schedule)
    plan = Plan.even(2, 4, ROWS)
    with pytest.raises(PlanError, match="rank 0 needs a stage"):
        Loopback(plan, schedule.program(plan), lambda r: make_stages(plan, 1 - r, layers()))


def nothing(rank: int) -> None:
    """Open and close the channels of a rank without sending a message."""
    plan = Plan.even(RANKS, 4, ROWS)
    watch, transport = connect(rank, plan)
    transport.close()
    watch.close()


def test_open_and_close() -> None:
    outcomes = watch_ranks(nothing, RANKS, timeout=30)
    assert not any(o.error for o in outcomes), outcomes


def test_failure_leaves_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a layer raises an error, the global random state is restored and the engine is closed."""
    schedule = make_schedule("1f1b")
    assert isinstance(schedule, Schedule)
    plan = Plan.even(1, 4, ROWS)
    pipe = Loopback(plan, schedule.program(plan), lambda r: make_stages(plan, r, layers()))
    before = torch.get_rng_state()
    pipe.inject(lambda: Item(0, ROWS, ("not a tensor", None)))
    with pytest.raises(TypeError):
        pipe.progress()
    assert torch.equal(before, torch.get_rng_state())
    assert not pipe.engines[0].is_open
