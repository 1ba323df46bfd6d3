"""Bulk transfers of tensors between any two ranks during training: received values, and errors that name a rank."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipes.engine import Engine, FailureWatch, Item, PeerFailure
from lightning_pipes.engine.messages.bulk_transfer import GATE_SECONDS, BulkTransfer, TransferHandle
from lightning_pipes.engine.messages.chunks import MAX_IN_FLIGHT
from lightning_pipes.engine.messages.packed_trees import pack_tree
from lightning_pipes.engine.watch.trust import Seal, SignedStore
from lightning_pipes.ir import PipelineError, Plan, PlanError, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.ranks import run_ranks, scale_timeout, watch_ranks
from tests.engine.messages.parcels import content, same
from tests.engine.pipes import ROWS, batch, connect, layers, make_stages, sgd_step, weights


@dataclass
class Momentum:
    """The state of an optimizer that keeps its tensors in objects."""

    average: torch.Tensor
    steps: int


class States(dict[str, Any]):
    """A dictionary of a class of its own."""


def carries_objects(rank: int) -> bool:
    """Exchange objects that hold tensors, with another rank and with this rank, and compare them."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    store = SignedStore(dist.distributed_c10d._get_default_store(), Seal(b"a secret"))
    watch = FailureWatch(store, rank, 2)
    parcels = BulkTransfer(rank, range(2), watch)
    states = States(m=Momentum(torch.arange(5.0) + rank, 3), seen=frozenset([1]))
    sent = [parcels.send(to, "state", states) for to in (0, 1)]
    found = [parcels.receive(source, "state").content for source in (0, 1)]
    for handle in sent:  # closing waits for a limited time only
        handle.wait()
    parcels.close()
    watch.close()
    return all(
        type(states) is States
        and torch.equal(states["m"].average, torch.arange(5.0) + source)
        and (states["m"].steps, states["seen"]) == (3, {1})
        for source, states in enumerate(found)
    )


def test_objects_arrive_as_they_are() -> None:
    """The tensors of dataclasses and of other objects are sent like all other tensors."""
    assert run_ranks(carries_objects, 2) == [True, True]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"a": [1, torch.ones(2, device="meta")]}, r"\['a'\]\[1\]: a tensor of layout"),
        (torch.eye(2).to_sparse(), "this: a tensor of layout"),
        (States(m=Momentum(torch.ones(2, device="meta"), 1)), "'m'.*: a tensor of layout"),
    ],
)
def test_tensors_that_a_parcel_does_not_carry(given: Any, why: str) -> None:
    """Tensors that cannot be sent are refused with their position in the tree."""
    with pytest.raises(PlanError, match=why):
        pack_tree(given, None)


def test_objects_that_a_parcel_does_not_carry() -> None:
    """Objects that cannot be pickled are refused before anything is sent."""
    with pytest.raises(PlanError, match=r"a bulk transfer can't carry an object that can't be pickled: .*lock"):
        pack_tree(("key", threading.Lock()), None)


def office(rank: int, n: int, **options: Any) -> tuple[FailureWatch, BulkTransfer]:
    """Initialize the process group, and return a failure watch and bulk transfers between `n` ranks."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    watch = FailureWatch(dist.distributed_c10d._get_default_store(), rank, n, **options)
    return watch, BulkTransfer(rank, range(n), watch)


def all_pairs(rank: int, n: int, rounds: int) -> list[int]:
    """Exchange trees between all pairs of ranks, check the values, and return the bytes sent and received."""
    watch, parcels = office(rank, n)
    order = random.Random(rank)  # the ranks must not depend on a common order
    pairs = [(a, b, k) for a in range(n) for b in range(n) if rank in (a, b) for k in range(rounds)]
    order.shuffle(pairs)
    sent, expected = [], []
    for a, b, k in pairs:
        if rank == a:
            sent.append(parcels.send(b, ("layer", k), content(a, b)))
        if rank == b:
            expected.append((a, parcels.receive(a, ("layer", k))))
    for source, handle in expected:
        assert same(handle.content, content(source, rank))
    threads = [thread for thread in threading.enumerate() if "bulk transfer" in thread.name]
    assert len(threads) <= 2 * (n - 1)  # one for each peer and direction, for any number of trees
    bytes_ = sum(handle.wait().size for handle in sent)
    assert all(handle.is_done() and handle.seconds > 0 for handle in sent)
    memory = [t.untyped_storage().data_ptr() for _, h in expected for t in h.content.values() if hasattr(t, "numel")]
    assert len({m for m in memory if m}) == len([m for m in memory if m])
    parcels.close()
    watch.close()
    elsewhere = sum(h.size for (a, b, _), h in zip([p for p in pairs if p[0] == rank], sent, strict=True) if b != rank)
    assert parcels.traffic.sent == elsewhere < bytes_
    assert (parcels.traffic.sending > 0) == (n > 1)
    return [parcels.traffic.sent, parcels.traffic.received]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_all_pairs_at_once(n: int) -> None:
    found = run_ranks(all_pairs, n, n, 2 if n < 4 else 1, timeout=120)
    assert all(received > 0 for _, received in found)


def in_any_order(rank: int) -> list[str]:
    """Check transfers that arrive before they are expected, small transfers that overtake, and equal keys in order."""
    watch, parcels = office(rank, 2)
    if rank == 0:
        large = torch.zeros(3_000_000)
        handles = [parcels.send(1, "large", large), *(parcels.send(1, "equal", torch.tensor(k)) for k in range(3))]
        large_ended, *small_ended = (handle.wait()._begun + handle.seconds for handle in handles)
        found = ["overtaken" if max(small_ended) < large_ended else "in turn"]
    else:
        big = parcels.receive(0, "large").content
        found = [str([int(parcels.receive(0, "equal").content) for _ in range(3)]), str(big.shape[0])]
    parcels.close()
    watch.close()
    return found


def test_small_parcels_overtake_large_ones() -> None:
    assert run_ranks(in_any_order, 2) == [["overtaken"], ["[0, 1, 2]", "3000000"]]


def dies(rank: int, how: str) -> None:
    """Let rank 1 die in the middle of a transfer, or before another rank could connect to it."""
    watch, parcels = office(rank, 3, heartbeat_timeout=8.0)
    try:
        if rank == 1 and how == "unconnected":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            parcels.set_gate(lambda: parcels.traffic.sent > 2_000_000 and os.kill(os.getpid(), sign) is None)
            sign = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how]
        for peer in {0, 1, 2} - {rank}:
            parcels.send(peer, "layer", torch.ones(20_000_000))
        for peer in {0, 1, 2} - {rank}:
            parcels.receive(peer, "layer").wait()
        time.sleep(60)
    finally:
        parcels.close()
        watch.close()


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow), "unconnected"])
def test_dead_rank_is_named_and_no_rank_hangs(how: str) -> None:
    """If rank 1 is killed or stopped, the other ranks end within the time limit with errors that name rank 1."""
    alive = [o for o in watch_ranks(dies, 3, how, timeout=60 if how != "stop" else 15) if o.rank != 1]
    for o in alive:
        assert o.seconds < scale_timeout(35), o
        assert PeerFailure.__name__ in o.error
        assert "rank 1" in o.error.split(PeerFailure.__name__)[-1]
    # A rank that never connected may be missed before another rank begins to wait for it.
    assert how == "unconnected" or any("while waiting for bulk transfer 'layer' from rank 1" in o.error for o in alive)


def fails_by_itself(rank: int) -> None:
    """Let the gate of the transfers raise an IndexError on rank 1."""
    watch, parcels = office(rank, 2)
    try:
        if rank == 1:
            parcels.set_gate(lambda: bool([][0]))
        parcels.send(1 - rank, "a", torch.ones(3))
        parcels.receive(1 - rank, "a").wait()
        time.sleep(60)
    finally:
        parcels.close()
        watch.close()


def test_an_error_of_our_own_is_not_said_to_be_the_peers() -> None:
    """An error in the transfer threads of rank 1 is reported as a failure of rank 1, not of its peer."""
    ours, _ = watch_ranks(fails_by_itself, 2, timeout=30)
    assert "rank 1 failed in its bulk transfers from or to rank 0: IndexError" in ours.error


def fails(rank: int) -> None:
    """Let rank 1 fail in its own code while rank 0 waits for a transfer."""
    watch, parcels = office(rank, 2)
    try:
        parcels.send(1 - rank, "a", torch.ones(3))
        parcels.receive(1 - rank, "a").wait()
        if rank == 1:
            try:
                raise ValueError("no such layer")
            except ValueError as error:
                watch.report_failure(error)
                raise
        handle = parcels.receive(1, "never sent")
        while not handle.is_done():
            time.sleep(0.01)
    finally:
        parcels.close()
        watch.close()


def test_a_failure_elsewhere_ends_waiting() -> None:
    """A rank that waits for a transfer ends with the error of the other rank."""
    ours, theirs = watch_ranks(fails, 2, timeout=30)
    assert "PeerFailure: rank 1 failed: ValueError: no such layer" in ours.error
    assert "ValueError: no such layer" in theirs.error


def gated(rank: int) -> list[bool]:
    """Check that chunks are held back while the gate is closed, and are sent after `GATE_SECONDS` at the latest."""
    watch, parcels = office(rank, 2)
    found = []
    if rank == 0:
        busy = [True]
        parcels.set_gate(lambda: busy[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_pipes.engine.messages.bulk_transfer.GATE_SECONDS", 1000.0)
            handle = parcels.send(1, "patient", torch.ones(3))
            time.sleep(0.5)
            found.append(handle.is_done() or parcels.traffic.sent > 0)
            busy[0] = False
            handle.wait()
            found.append(parcels.traffic.held_back > 0)
        busy[0] = True
        before = parcels.traffic.held_back
        parcels.send(1, "impatient", torch.ones(3)).wait()
        found.append(parcels.traffic.held_back - before >= GATE_SECONDS)
    else:
        assert parcels.receive(0, "patient").content.sum() == 3
        assert parcels.receive(0, "impatient").content.sum() == 3
    parcels.close()
    watch.close()
    return found


def test_chunks_wait_while_training_is_busy_and_not_for_ever() -> None:
    assert run_ranks(gated, 2)[0] == [False, True, True]


def many_in_flight(rank: int) -> tuple[int, int]:
    """Send a large tensor over an idle link, and return the largest and the final number of chunks in flight."""
    watch, parcels = office(rank, 2)
    large = torch.arange(40_000_000)
    if rank == 0:
        parcels.send(1, "large", large).wait()
    else:
        assert torch.equal(parcels.receive(0, "large").content, large)
    parcels.close()
    watch.close()
    return parcels.traffic.most_in_flight, parcels._outstanding


def test_several_chunks_are_in_flight_where_training_leaves_the_link() -> None:
    """On an idle link, several chunks are in flight at once, and none remains at the end."""
    (most, left), _ = run_ranks(many_in_flight, 2)
    assert 1 < most <= MAX_IN_FLIGHT
    assert left == 0


def never_expected(rank: int) -> str:
    """Send a transfer that the other rank never receives, and return the error of `close`."""
    watch, parcels = office(rank, 2)
    found = ""
    if rank == 0:
        parcels.send(1, "lonely", torch.ones(3))
        try:
            parcels.close()
        except PipelineError as error:
            found = str(error)
    else:
        parcels.close()
    watch.close()
    return found


def test_unexpected_parcel() -> None:
    """Closing while a transfer has no receiver raises an error that names the transfer."""
    found, _ = run_ranks(never_expected, 2)
    assert "still waits for bulk transfer 'lonely' to rank 1 to arrive; every transfer has to be received" in found


def trains(rank: int, steps: int, beside: bool) -> tuple[dict[str, torch.Tensor], float, int]:
    """Train two stages over gloo, with bulk transfers in both directions if `beside` is True.

    Returns:
        The weights of this rank, the seconds of training, and the bytes received in bulk transfers.
    """
    plan = Plan.even(2, 4, ROWS)
    watch, transport = connect(rank, plan, "gloo")
    parcels = BulkTransfer(rank, range(2), watch)
    schedule = make_schedule("1f1b")
    assert isinstance(schedule, Schedule)
    model = layers()
    stages = make_stages(plan, rank, model, sgd_step())
    engine = Engine(plan, schedule.program(plan), stages, transport, rank=rank, watch=watch)
    handles: list[TransferHandle] = []
    sent: list[TransferHandle] = []
    begun = time.monotonic()
    for number in range(steps):
        if beside:
            sent.append(parcels.send(1 - rank, number, torch.full((300_000,), float(number))))
            handles.append(parcels.receive(1 - rank, number))
        engine.inject(Item(number, ROWS, batch(number)))
        engine.drain()
    seconds = time.monotonic() - begun
    for number, handle in enumerate(handles):
        assert bool((handle.content == number).all())
    for handle in sent:
        handle.wait()
    engine.close()
    parcels.close()
    watch.close()
    mine = {id(p) for s in stages for layer in s.layers.values() for p in layer.parameters()}
    kept = [n for n, p in torch.nn.ModuleList(model).named_parameters() if id(p) in mine]
    return {n: w for n, w in weights(model).items() if n in kept}, seconds, parcels.traffic.received


def test_training_with_parcels_is_the_same() -> None:
    """Training with concurrent bulk transfers gives the same weights bit by bit as without them."""
    steps = 20
    (alone, _, none), *_ = run_ranks(trains, 2, steps, False)
    (beside, seconds, some), *_ = run_ranks(trains, 2, steps, True)
    assert none == 0
    assert some > steps * 1_200_000
    assert all(torch.equal(beside[name], weight) for name, weight in alone.items())
    assert seconds < scale_timeout(30), "chunks wait for training, not training for chunks"


def test_ranks_and_keys_that_do_not_exist() -> None:
    parcels = BulkTransfer.__new__(BulkTransfer)
    parcels._ranks = frozenset((0, 1))
    with pytest.raises(PlanError, match=r"there is no rank 5 .* \[0, 1\]"):
        parcels.receive(5, "a")
    with pytest.raises(PlanError, match="a text, a number or a tuple"):
        parcels._check_key(1.5)  # type: ignore[arg-type]
