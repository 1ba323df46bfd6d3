"""Tests of `Mesh`, which connects each pair of ranks on one host by a socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from lightning_pipes.engine import FailureWatch
from lightning_pipes.engine.messages import local
from lightning_pipes.engine.messages.local import PeerListener
from lightning_pipes.engine.watch.trust import ForgedError
from lightning_pipes.testing.ranks import scale_timeout
from lightning_pipes.trainer.ranks.mesh import Mesh, MessageId

RANKS = (3, 5, 8)


def connected() -> dict[int, Mesh]:
    """Return the ends of all connections, in this process."""
    listeners = {rank: PeerListener() for rank in RANKS}
    names = {rank: listener.name for rank, listener in listeners.items()}
    found: dict[int, Mesh] = {}

    def connect(rank: int) -> None:
        found[rank] = Mesh(rank, names, listeners[rank], FailureWatch(None, rank))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in RANKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scale_timeout(30))
    for listener in listeners.values():
        listener.close()
    return found


@pytest.fixture
def meshes() -> Iterator[dict[int, Mesh]]:
    made = connected()
    yield made
    for mesh in made.values():
        mesh.close()


def until(mesh: Mesh, done: Callable[[], bool]) -> bool:
    """Exchange messages until a condition holds, and return whether it does."""
    end = time.monotonic() + scale_timeout(10)
    while not mesh.exchange_until(done, 0.01) and time.monotonic() < end:
        pass
    return mesh.exchange_until(done)


def test_each_message_has_its_name(meshes: dict[int, Mesh]) -> None:
    first, second, other = MessageId(0, 1), MessageId(0, 2), MessageId(1, 1)
    for rank, mesh in meshes.items():
        for letter in (first, other, second):
            mesh.send(letter, f"{rank} {letter.kind} {letter.number}".encode())
    for rank, mesh in meshes.items():
        for source in RANKS:
            for letter in (second, first, other) if source != rank else ():
                assert until(mesh, partial(mesh.has_messages, [source], letter))
                assert mesh.pop(source, letter) == f"{source} {letter.kind} {letter.number}".encode()
                assert not mesh.has_messages([source], letter)


def test_rank_that_does_not_read_delays_no_other_rank(meshes: dict[int, Mesh]) -> None:
    """Check that a message that cannot be sent immediately is sent later, complete and in order."""
    sender, reader, idle = (meshes[rank] for rank in RANKS)
    bodies = [bytes([number]) * 16_000 for number in range(100)]
    for number, body in enumerate(bodies):
        sender.send(MessageId(0, number), body)
    assert not sender.is_sent
    for mesh in (reader, idle):
        for number, body in enumerate(bodies):
            while not mesh.has_messages([RANKS[0]], MessageId(0, number)):
                sender.exchange_until(lambda: False)
                mesh.exchange_until(lambda: False, 0.01)
            assert mesh.pop(RANKS[0], MessageId(0, number)) == body
    assert sender.is_sent


def test_messages_from_before_the_end_still_arrive(meshes: dict[int, Mesh]) -> None:
    gone, reader, _ = (meshes[rank] for rank in RANKS)
    reader.send(MessageId(0, 7), b"unread")
    gone.send(MessageId(0, 1), b"the last word")
    gone.close()
    reader.send(MessageId(0, 8), b"to nobody")
    assert until(reader, lambda: reader.has_messages([RANKS[0]], MessageId(0, 1)))
    assert reader.pop(RANKS[0], MessageId(0, 1)) == b"the last word"
    assert until(reader, lambda: reader.has_messages([RANKS[0]], MessageId(0, 2)))
    with pytest.raises(ConnectionError, match="closed by rank 3"):
        reader.pop(RANKS[0], MessageId(0, 2))
    reader.send(MessageId(0, 3), b"x" * 1_000_000)  # it is sent to the others only
    third = meshes[RANKS[2]]
    assert not reader.is_sent
    assert until(third, lambda: third.has_messages([RANKS[1]], MessageId(0, 3)) or reader.exchange_until(lambda: False))
    assert reader.is_sent


def test_a_stranger_gets_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = PeerListener()
    monkeypatch.setattr(local, "same_user", lambda made: False)
    with pytest.raises(ForgedError, match="is not a socket of this run's user"):
        Mesh(1, {0: listener.name, 1: ""}, listener, FailureWatch(None, 1))
    listener.close()
