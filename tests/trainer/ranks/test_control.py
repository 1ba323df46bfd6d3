"""Tests of the messages between ranks outside of the pipeline, with and without a mesh of sockets."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipes.engine import FailureWatch
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks, scale_timeout, watch_ranks
from lightning_pipes.trainer.ranks import control as controls
from lightning_pipes.trainer.ranks.control import Control, PendingGather, close_all

MESH, NONE, HOSTS = "mesh", "none", "hosts"
"""The first case uses a mesh. The others use none, because there are too many ranks or one is on another host."""


def joined(rank: int, ranks: int, how: str, idle: Callable[[Callable[[], bool]], None] | None = None) -> Control:
    """Return a control that is connected with or without a mesh."""
    dist.init_process_group("gloo")
    control = Control(range(ranks), FailureWatch(None, rank), timedelta(seconds=scale_timeout(20)), idle=idle)
    if how == NONE:
        controls.MAX_CONNECTED_RANKS = 1
    if how == HOSTS:
        controls.host_id = lambda: "here" if rank else "there"  # type: ignore[attr-defined]
    control.connect_broadcasts()
    assert (control._mesh is not None) == (how == MESH)
    return control


def everything(rank: int, how: str) -> list[Any]:
    """Return the results of all kinds of calls on this rank."""
    control = joined(rank, 3, how)
    controls._PIECE_BYTES = 1000  # less than the objects that are gathered below
    base = torch.arange(1_000_000)
    mine = [torch.full((400 * rank,), rank), nn.Parameter(torch.ones(2))]
    sent = {"big": torch.arange(5000) + rank, "view": base[rank : rank + 2], "leaf": nn.Parameter(torch.ones(1))}
    later = control.prepare_broadcast(2)
    found = control.broadcast(sent if rank == 1 else None, 1)
    asked = [control.start_any(rank == 2, False), control.start_any(False, rank == 0)]
    all_found = [
        int(found["big"][0]),
        found["view"].tolist(),
        control.broadcast("short", 0),
        control.gather("x" * rank, 2),
        gathered_lists(control.gather(mine, 1), mine),
        control.all_gather(rank**2),
        control.any(rank == 1, False),
        float(control.all_reduce(torch.tensor(float(rank)))),
        [answer() for answer in reversed(asked)],
        later(("later", torch.tensor(0.5)) if rank == 2 else None),
        control.prepare_broadcast(0)({"big": torch.ones(9999)} if rank == 0 else None)["big"].sum().item(),
    ]
    control.close()
    assert control.any(rank == 0) == [True]  # this opens new connections
    control.close()
    return all_found


def gathered_lists(found: list[list[torch.Tensor]] | None, mine: list[torch.Tensor]) -> list[Any] | None:
    """Return the numbers in gathered lists of tensors, and whether the tensors of this rank were not copied."""
    if found is None:
        return None
    same = [ours.data_ptr() == own.data_ptr() for ours, own in zip(found[1], mine, strict=True)]
    return [[(t.numel(), float(t.sum()), t.requires_grad) for t in tensors] for tensors in found] + same


@pytest.mark.parametrize("how", [MESH, NONE, HOSTS])
def test_control(how: str) -> None:
    """Check the results of every kind of call on three ranks, with and without a mesh."""
    for rank, found in enumerate(run_ranks(everything, 3, how, timeout=30)):
        gathered = ["", "x", "xx"] if rank == 2 else None
        lists = [[(400 * n, 400.0 * n * n, False), (2, 2.0, False)] for n in range(3)]
        asked = [[False, True], [True, False]]
        later = ("later", torch.tensor(0.5))
        assert found == [
            1,
            [1, 2],
            "short",
            gathered,
            [*lists, True, True] if rank == 1 else None,
            [0, 1, 4],
            [True, False],
            3.0,
            asked,
            later,
            9999.0,
        ]


def in_parts(rank: int, how: str) -> list[Any]:
    control = joined(rank, 4, how)
    part = control.split([(0, 1), (2, 3)])
    found = [part.any(rank == 1), control.any(rank == 1), part.broadcast(rank, part.ranks[0])]
    control.close()
    return found


@pytest.mark.parametrize("how", [MESH, NONE])
def test_parts(how: str) -> None:
    """Check that calls of two parts of a control, and of the whole, do not mix."""
    assert run_ranks(in_parts, 4, how, timeout=30) == [[[r < 2], [True], 0 if r < 2 else 2] for r in range(4)]


def ahead(rank: int, size: int) -> list[int]:
    """Return the first byte of each of 50 broadcasts from rank 0.

    If messages are small, rank 1 receives the second one only after rank 0 has sent all of them. Rank 0 must therefore
    not wait for rank 1.
    """
    control = joined(rank, 2, MESH)
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    found = []
    for number in range(50):
        thing = control.broadcast(bytes([number]) * size if rank == 0 else None, 0)
        if rank == 1 and number == 0 and size < 10_000:
            store.wait(["through"])
        found.append((thing[0], len(thing)))
    if rank == 0:
        store.set("through", "")
    assert {length for _, length in found} == {size}
    assert control.any(False) == [False]
    control.close()
    return [first for first, _ in found]


@pytest.mark.parametrize("size", [100, 16_000, 100_000])
def test_the_source_goes_ahead(size: int) -> None:
    assert run_ranks(ahead, 2, size, timeout=60) == [list(range(50))] * 2


def waits_for_the_dead(rank: int, how: str) -> str:
    """Return the error of a call that waits for a rank that has ended."""
    control = joined(rank, 2, how)
    control.any(False)
    if rank == 1:
        os._exit(0)
    with pytest.raises(PipelineError) as caught:
        control.any(False)
    # the watch reports this while the rank waits
    assert str(control.watch.doing).startswith("a collective call of 2 ranks in ")
    return str(caught.value)


@pytest.mark.parametrize("how", [MESH, NONE])
def test_no_rank_waits_for_dead_ranks(how: str) -> None:
    first, _ = watch_ranks(waits_for_the_dead, 2, how, timeout=60)
    assert first.value.startswith("another rank has ended without an error message while this rank waited for it")
    assert not re.search("no answer for|[Tt]imed out", first.value), "the wait has ended by its timeout"


def idles(rank: int) -> list[bool]:
    """Return the answers that an idle function saw.

    If an idle function is set, it runs repeatedly until the message has arrived.
    """
    dist.init_process_group("gloo")
    seen: list[bool] = []
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    connected = threading.Event()

    def idle(come: Any) -> None:
        if connected.is_set():  # it also runs while the connections are opened
            seen.append(come())
        if len(seen) == 3:
            store.set("three", "")

    control = Control(range(2), FailureWatch(None, rank), timedelta(seconds=scale_timeout(20)), idle=idle)
    control.connect()
    connected.set()
    if rank == 1:
        store.wait(["three"])
    answer = control.start_any(rank == 1)
    if rank == 1:
        while not answer.has_arrived():
            time.sleep(0.001)
    assert answer() == [True]
    control.close()
    return seen


def test_something_else_is_done_meanwhile() -> None:
    seen, none = run_ranks(idles, 2, timeout=30)
    assert len(seen) >= 3
    assert not any(seen[:3])
    assert none == []


def looks_meanwhile(rank: int, how: str) -> list[list[bool]]:
    """Return the answers of calls that this rank saw, in order.

    On rank 0, one call waits while its idle function makes another call and reads its answer as soon as it has arrived.
    """
    asked: list[PendingGather[list[bool]]] = []
    seen: list[list[bool]] = []

    def idle(_: Any) -> None:
        if asked and not seen:
            store.set("waiting", "")
            while not asked[0].has_arrived():
                time.sleep(0.001)
            seen.append(asked[0]())

    control = joined(rank, 2, how, None if rank else idle)
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    if rank == 1:
        store.wait(["waiting"])
    asked.append(control.start_any(rank == 1))
    seen.append(asked[0]())
    control.close()
    return seen


@pytest.mark.parametrize("how", [MESH, NONE, HOSTS])
def test_an_answer_is_looked_at_while_another_call_waits_for_it(how: str) -> None:
    assert run_ranks(looks_meanwhile, 2, how, timeout=30) == [[[True], [True]], [[True]]]


def test_connections_end_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that connections are closed at the same time.

    Each of the six ends only when all others are being closed, too.
    """
    everybody, closed = threading.Barrier(6), []

    class Group:
        def __del__(self) -> None:
            closed.append(everybody.wait(timeout=scale_timeout(30)))

    monkeypatch.setattr(controls, "MAX_CONNECTED_RANKS", 1)
    monkeypatch.setattr(dist, "new_group", lambda *args, **kwargs: Group())
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    made = [Control((0, 1), FailureWatch(None, 0), timedelta(seconds=1)) for _ in range(3)]
    for control in made:
        control.connect()
        control.connect_broadcasts()
    close_all(made)
    assert sorted(closed) == list(range(6))
