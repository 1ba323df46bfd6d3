"""The store for the rendezvous of the ranks of a run, which is protected from other users and hosts.

If all ranks run on one host, no socket listens on an address that other hosts can reach. Values that other users of
this host could write are signed.
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
from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]

from lightning_pipes.engine.watch.process_exit import SerialCaller, give_up
from lightning_pipes.engine.watch.rendezvous import attempt_store, store_host, wait_for_host
from lightning_pipes.engine.watch.trust import seal_store
from lightning_pipes.ir import PipelineError

LOOPBACK = "127.0.0.1"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_store: Any = None
_kept: list[Any] = []
_adopted: tuple[Any, Any] = None, None
_held: socket.socket | None = None


def run_store(rank: int, size: int, local: int, timeout: timedelta, check: Callable[[], None]) -> Any:
    """Return the store of the processes of this job. All runs of a job use the same store.

    Only values that were written by these processes are accepted. If all of them run on one host, other hosts can reach
    neither the store nor the connections that are made later.

    Args:
        rank: the global rank of this process.
        size: the number of processes of the job.
        local: the number of processes on this host, unless the environment variable LOCAL_WORLD_SIZE is set.
        timeout: how long to wait for other ranks and for each answer of the store.
        check: called repeatedly while other ranks are missing. It may raise an exception.

    Raises:
        TimeoutError: ranks are missing, or the host of the store does not answer.
        ConnectionError: the launcher or the rank that hosted the store has ended.
        PipelineError: the ranks have different secrets.
    """
    global _store
    if _store is None:
        one_host = _on_one_host(size, local)
        if one_host:
            _stay_on_host()
        try:
            _store = _call_while_answering(partial(_open_store, rank, size, one_host, timeout), timeout, check)
        except BaseException:
            give_up()  # processes that this one has started may be waiting for the store
            raise
    return _store


def _open_store(rank: int, size: int, one_host: bool, timeout: timedelta, check: Callable[[], None]) -> Any:
    store = attempt_store(rank, size, timeout, check) or _connect_store(rank, one_host, timeout, check)
    return seal_store(store, rank, one_host, size, timeout, check)


def _call_while_answering(
    opened: Callable[[Callable[[], None]], Any], timeout: timedelta, check: Callable[[], None]
) -> Any:
    """Return the result of `opened`, which calls its argument each time the store has answered.

    If the store does not answer within `timeout`, for example because its host is stopped, TimeoutError is raised. Most
    calls of a store do not have a timeout of their own.
    """
    answered, left = time.monotonic(), False

    def mark_answer() -> None:
        nonlocal answered
        answered = time.monotonic()
        if left:
            raise TimeoutError("this call was abandoned")

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
    except DistNetworkError as error:
        raise ConnectionResetError(f"{store_host()}, which hosts the store of this run, has ended") from error
    finally:
        left = True


def current_store() -> Any:
    """Return the store of `run_store`, or None if the processes used a different rendezvous."""
    return _store


def keep_store(store: Any) -> Any:
    """Keep a store alive for as long as a process group may use it, and return it.

    A process group keeps only the C++ part of a store that is implemented in Python.
    """
    _kept.append(store)
    return store


def adopt_store(default: Any, rank: int, size: int, local: int) -> Any:
    """Return a signed store on top of the store of a process group that was created by other code.

    Only values that were written by ranks are accepted from then on. This is a collective call.

    Args:
        default: the store of the process group.
        rank: the global rank of this process.
        size: the number of ranks.
        local: the number of ranks on this host, unless the environment variable LOCAL_WORLD_SIZE is set.

    Raises:
        PipelineError: the ranks have different secrets, or could not exchange one.
    """
    global _adopted
    if _adopted[0] is not default:
        _adopted = default, seal_store(default, rank, _on_one_host(size, local), size)
    return _adopted[1]


def store_on_loopback(port: int, timeout: timedelta) -> TCPStore:
    """Create a store that this process hosts, and that other hosts can't reach.

    Args:
        port: the port of the store, or 0 for any free port.
        timeout: the timeout of the store.

    Raises:
        PipelineError: the port is in use.
    """
    listener = _take_held_port(port) or _bind_port(port)
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def hold_port(port: int) -> None:
    """Reserve a free port until this process hosts its store there.

    This is necessary because starting the other processes may take half a minute.

    Args:
        port: the port to reserve. If it is in use, the call has no effect.
    """
    global _held
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((LOOPBACK, port))  # without SO_REUSEADDR, with which another process could bind it as well
    except OSError:  # the port may still belong to the last run; hosting the store reports the error
        listener.close()
    else:
        _held = listener


def _take_held_port(port: int) -> socket.socket | None:
    """Return the socket that reserves the port at the first call, and None afterwards."""
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
            "free, or end the process that uses this one"
        ) from error
    return listener


def _stay_on_host() -> None:
    """Make gloo listen on the loopback interface, unless the environment specifies another interface."""
    if _GLOO_INTERFACE not in os.environ:
        found = (n for n, all_of in psutil.net_if_addrs().items() if any(a.address == LOOPBACK for a in all_of))
        name = next(found, None)
        if name is not None:
            os.environ[_GLOO_INTERFACE] = name


def _on_one_host(size: int, local: int) -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", local)) == size


def _connect_store(rank: int, one_host: bool, timeout: timedelta, check: Callable[[], None]) -> TCPStore:
    """Return the store that rank 0 hosts."""
    address, port = LOOPBACK if one_host else os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        wait_for_host(address, port, timeout, check)
    elif one_host:
        return store_on_loopback(port, timeout)
    return TCPStore(address, port, is_master=rank == 0, wait_for_workers=False, timeout=timeout)
