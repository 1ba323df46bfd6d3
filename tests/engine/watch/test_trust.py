"""A store in which only values that ranks of the run have written are valid."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from lightning_pipes.engine.watch import trust
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.shared_store import run_store, store_on_loopback
from lightning_pipes.engine.watch.trust import (
    SECRET_VARIABLE,
    ForgedError,
    Seal,
    SignedStore,
    seal_of,
    seal_store,
    sub_store_of,
)
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks, scale_timeout

SOON = timedelta(seconds=60)


@pytest.fixture
def raw() -> TCPStore:
    """A store without signatures, which any process can write to."""
    return store_on_loopback(0, SOON)


@pytest.fixture
def signed(raw: TCPStore) -> SignedStore:
    return SignedStore(raw, Seal(b"a secret"))


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    monkeypatch.setattr(trust, "_own_secret", "")


def test_ranks_read_their_own_data(raw: TCPStore, signed: SignedStore) -> None:
    """Values are read as they were written, also through sub-stores that different classes create."""
    signed.set("a", "1")
    signed.sub_store("x").set("b", b"2")
    assert PrefixStore("x", signed).get("b") == b"2"
    PrefixStore("x", signed).clone().set("c", "3")
    assert sub_store_of(signed, "x").multi_get(["b", "c"]) == [b"2", b"3"]
    assert raw.get("a") != b"1"
    assert signed.compare_set("d", "", "first") == b"first"
    assert signed.compare_set("d", "", "second") == b"first"
    assert signed.compare_set("d", "first", "second") == b"second"
    assert signed.check(["a", "d", "x/b"])
    assert not signed.check(["a", "missing"])
    signed.wait(["a"], timedelta(seconds=1))
    assert signed.delete_key("a")
    assert not signed.check(["a"])
    assert [signed.add("n", 2), signed.add("n", 0)] == [2, 2]
    assert seal_of(signed) is signed.seal
    assert seal_of(raw) is None


def test_data_of_strangers_is_ignored(raw: TCPStore, signed: SignedStore, caplog: pytest.LogCaptureFixture) -> None:
    """Values without a valid signature for their key are treated as missing, and logged once."""
    for value in ("", "text", "x" * 100, SignedStore(raw, Seal(b"another"))._signed("a", "text")):
        raw.set("a", value)
        assert not signed.check(["a"])
    assert [r.getMessage() for r in caplog.records] == [
        "a process outside this run wrote 'a' into its store; the value is ignored"
    ]
    for number in range(2 * trust.MAX_LOGGED_KEYS):
        raw.set(f"planted {number}", "text")
        assert not signed.check([f"planted {number}"])
    assert len(caplog.records) == trust.MAX_LOGGED_KEYS
    assert signed.compare_set("a", "", "ours") == b"ours"
    raw.set("b", raw.get("a"))  # a value that is valid for one key is not valid for another
    assert not signed.check(["b"])
    waiting = threading.Timer(0.2, lambda: SignedStore(raw.clone(), signed.seal).set("b", "late"))
    waiting.start()
    assert signed.get("b") == b"late"
    raw.set("c", "text")
    signed.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(ForgedError, match="c in the store of this run was not written by one of its ranks"):
        signed.get("c")


@pytest.fixture
def watches(signed: SignedStore, own_heartbeats: None) -> Iterator[list[FailureWatch]]:
    made = [FailureWatch(SignedStore(signed._store.clone(), signed.seal), rank, 2, enforce=False) for rank in (0, 1)]
    yield made
    for watch in made:
        watch.close()


def test_a_failure_that_a_stranger_tells(
    raw: TCPStore, watches: list[FailureWatch], caplog: pytest.LogCaptureFixture
) -> None:
    """A forged failure is ignored and does not hide a real failure, whose control characters are replaced."""
    raw.set("lightning_pipes/1/failure", "\x1b[2Jplanted")
    time.sleep(0.6)
    watches[0].check()
    watches[1].report_failure(ValueError("\x1b[31mred\x1b[0m"))
    until = time.monotonic() + scale_timeout(20)
    while watches[0].error is None and time.monotonic() < until:
        time.sleep(0.02)
    assert str(watches[0].error).startswith("rank 1 failed: ValueError: \ufffd[31mred\ufffd[0m")
    assert "\x1b" not in caplog.text


def listens(rank: int) -> tuple[list[Any], str, str]:
    """Return the results of collectives over groups that use the store, its class, and the network interface."""
    logging.getLogger("lightning_pipes").setLevel(logging.ERROR)
    os.environ.pop("LIGHTNING_PIPES_SECRET", None)
    store = run_store(rank, 2, 2, SOON, lambda: None)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, rank)
    group = dist.new_group([0, 1], backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert run_store(rank, 2, 2, SOON, lambda: None) is store
    return [*found, float(total)], type(store).__name__, os.environ["GLOO_SOCKET_IFNAME"]


def test_process_groups_over_it() -> None:
    for found, kind, device in run_ranks(listens, 2, timeout=60):
        assert found == [0, 1, 2.0]
        assert kind == "SignedStore"
        assert device == "lo"


def test_ranks_of_a_host_get_a_secret(raw: TCPStore) -> None:
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(seal_store(raw.clone(), 1, True, 2)))
    other.start()
    first = seal_store(raw, 0, True, 2)
    other.join()
    first.set("a", "1")
    assert found[0].get("a") == b"1"


@contextmanager
def nobody(act: Callable[[], bytes]) -> Iterator[Callable[[], bytes]]:
    """Run `act` in a process of another user, and yield a function that waits for its result."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setuid(65534)
            os.write(writer, act())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb", 0) as pipe:
        yield lambda: pipe.read(100)
    os.waitpid(pid, 0)


@pytest.mark.root
def test_no_other_user_gets_it(raw: TCPStore) -> None:
    """The secret is not sent to a process of another user, and ranks still receive it afterwards."""
    first = seal_store(raw, 0, True, 2)
    name = raw.get("lightning_pipes/door").decode()

    def ask() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(20)
            connection.connect(name)
            with suppress(OSError):
                return b"got %d" % len(connection.recv(32))
        return b"got 0"

    with nobody(ask) as said:
        assert said() == b"got 0"
    first.set("a", "1")
    assert seal_store(raw.clone(), 1, True, 2).get("a") == b"1"  # the secret is still available to this user


@pytest.mark.root
def test_a_door_of_another_user(raw: TCPStore) -> None:
    """A socket of another user is refused, although that user has written its name into the store."""
    name = f"\0lightning_pipes-test-{os.getpid()}"

    def answer() -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(name)
            door.listen(1)
            raw.set("lightning_pipes/door", name)
            connection, _ = door.accept()
            with connection, suppress(OSError):
                connection.sendall(b"x" * 32)
        return b"asked"

    cant = r"rank 0 does not answer with the secret of this run \(another user answers"
    with nobody(answer) as said:
        with pytest.raises(PipelineError, match=cant):
            seal_store(raw.clone(), 1, True, 2)
        assert said() == b"asked"
    raw.set("lightning_pipes/door", "/var/run/docker.sock")
    with pytest.raises(PipelineError, match=cant):
        seal_store(raw, 1, True, 2)


def test_secrets_of_several_hosts(
    raw: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On several hosts, ranks need the same secret from the environment; without one, a warning is logged once."""
    assert seal_store(raw, 0, False, 2) is raw
    assert "Any process that reaches their ports can send them data" in caplog.text
    assert seal_store(raw, 1, False, 2) is raw
    assert len(caplog.records) == 1
    monkeypatch.setenv(SECRET_VARIABLE, "one")
    with pytest.raises(PipelineError, match="rank 1 and rank 0 have different secrets: set LIGHTNING_PIPES_SECRET"):
        seal_store(raw, 1, False, 2)
    first = seal_store(raw, 0, False, 2)
    first.set("a", "1")
    assert seal_store(raw, 1, False, 2).get("a") == b"1"
    monkeypatch.setenv(SECRET_VARIABLE, "two")
    with pytest.raises(PipelineError, match="different secrets"):
        seal_store(raw, 1, False, 2)
