"""The store in which the ranks of a run find each other, and keep to themselves.

On one host nothing listens that another host reaches; what another user of this host can reach is signed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import psutil
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from lightning_pipes.engine.watch.process_exit import give_up
from lightning_pipes.engine.watch.rendezvous import attempt_store, store_host, wait_for_host
from lightning_pipes.engine.watch.serial_caller import SerialCaller
from lightning_pipes.engine.watch.trust import seal_store
from lightning_pipes.ir import PipelineError

LOOPBACK = "127.0.0.1"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_store: Any = None
_kept: list[Any] = []
_adopted: tuple[Any, Any] = None, None
_held: socket.socket | None = None


def run_store(rank: int, size: int, local: int, timeout: timedelta, check: Callable[[], None]) -> Any:
    """The store in which this job's `size` processes meet, so many of them on this host, the same in all of its runs;
    only what they write counts there. Nobody on another host reaches it, nor connections made later, where all are on
    this one.

    Args:
        check: called while others have not come; may raise.

    Raises:
        TimeoutError: not all that are needed came, or who hosts the store answers no more.
        ConnectionRefusedError: the launcher hosted the store, and is gone.
        PipelineError: the ranks do not believe each other.
    """
    global _store
    if _store is None:
        one_host = _on_one_host(size, local)
        if one_host:
            _stay_on_host()
        try:
            _store = _call_while_answering(partial(_open_store, rank, size, one_host, timeout), timeout, check)
        except BaseException:
            give_up()  # those that this process has started may wait for it
            raise
    return _store


def _open_store(rank: int, size: int, one_host: bool, timeout: timedelta, check: Callable[[], None]) -> Any:
    store = attempt_store(rank, size, timeout, check) or _connect_store(rank, one_host, timeout, check)
    return seal_store(store, rank, one_host, size, timeout, check)


def _call_while_answering(
    opened: Callable[[Callable[[], None]], Any], timeout: timedelta, check: Callable[[], None]
) -> Any:
    """The result of `opened`, which calls what it is given whenever the store has answered; where that was not so for
    long, as of a host that is stopped, TimeoutError is raised: most calls of a store know no limit."""
    answered, left = time.monotonic(), False

    def mark_answer() -> None:
        nonlocal answered
        answered = time.monotonic()
        if left:
            raise TimeoutError("nobody waits for this any more")

    def check_answer() -> None:
        check()
        seconds = timeout.total_seconds()
        if time.monotonic() > answered + seconds:
            raise TimeoutError(
                f"{store_host()} has not answered within {seconds:.0f} s: it hosts the store of this run"
            )

    try:
        with SerialCaller() as asking:
            return asking(partial(opened, mark_answer), check_answer)
    finally:
        left = True


def current_store() -> Any:
    """The store that `run_store` has returned; None where processes found each other in another way."""
    return _store


def single_process_store() -> HashStore:
    """A store for one process, which needs no port."""
    return HashStore()


def keep_store(store: Any) -> Any:
    """The store, kept for as long as a process group may use it: torch keeps only its own half of ours."""
    _kept.append(store)
    return store


def adopt_store(default: Any, rank: int, size: int, local: int) -> Any:
    """The store of a process group that others have made, in which only what ranks write counts from now on.
    Collective.

    Raises:
        PipelineError: the ranks do not believe each other.
    """
    global _adopted
    if _adopted[0] is not default:
        _adopted = default, seal_store(default, rank, _on_one_host(size, local), size)
    return _adopted[1]


def store_on_loopback(port: int, timeout: timedelta) -> TCPStore:
    """A store that this process hosts, which no other host reaches.

    Args:
        port: 0 for any that is free.

    Raises:
        PipelineError: somebody has the port.
    """
    listener = _take_held_port(port) or _bind_port(port)
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def hold_port(port: int) -> None:
    """Nobody takes the port, where it is free, before this process hosts its store there: who starts other processes
    first may need half a minute until then."""
    global _held
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK, port))  # not SO_REUSEADDR, with which another could bind it, too
    except OSError:  # perhaps the last run's; who needs it says so
        listener.close()
    else:
        _held = listener


def _take_held_port(port: int) -> socket.socket | None:
    """The socket that holds the port, for who asks first."""
    global _held
    if _held is None or _held.getsockname()[1] != port:
        return None
    held, _held = _held, None
    return held


def _bind_port(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except OSError as error:
        listener.close()
        raise PipelineError(
            f"rank 0 can't host the store of this run at {LOOPBACK}:{port}: {error}. Set MASTER_PORT to a port that is "
            "free, or end who has this one"
        ) from error
    return listener


def _stay_on_host() -> None:
    """Has gloo listen where no other host reaches it, unless the environment names another interface."""
    if _GLOO_INTERFACE not in os.environ:
        found = (n for n, all_of in psutil.net_if_addrs().items() if any(a.address == LOOPBACK for a in all_of))
        name = next(found, None)
        if name is not None:
            os.environ[_GLOO_INTERFACE] = name


def _on_one_host(size: int, local: int) -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", local)) == size


def _connect_store(rank: int, one_host: bool, timeout: timedelta, check: Callable[[], None]) -> TCPStore:
    """The store that rank 0 hosts."""
    address, port = LOOPBACK if one_host else os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        wait_for_host(address, port, timeout, check)
    elif one_host:
        return store_on_loopback(port, timeout)
    return TCPStore(address, port, is_master=rank == 0, wait_for_workers=False, timeout=timeout)
