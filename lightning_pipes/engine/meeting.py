"""The store in which the ranks of a run find each other, and keep to themselves.

On one host nothing listens that another host reaches; what another user of this host can reach is signed.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import psutil
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_pipes.engine.rendezvous import own_store
from lightning_pipes.engine.trust import sealed

LOOPBACK = "127.0.0.1"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_kept: list[Any] = []
_run_store: tuple[Any, Any] = None, None


def meet(rank: int, size: int, local: int, address: str, port: int, timeout: timedelta) -> Any:
    """The store in which this attempt's `size` processes, so many of them on this host, meet; only what they write
    counts there. Nobody on another host reaches it, nor connections made later, where all are on this one.

    Args:
        address: of rank 0, where no launcher hosts a store.
        port: its.

    Raises:
        TimeoutError: not all ranks came.
        PipelineError: they do not believe each other.
    """
    if size == 1:
        return HashStore()
    one_host = _on_one_host(size, local)
    if one_host:
        _stay_on_host()
    store = own_store(rank, size, timeout)
    if store is None:
        store = _store_of(rank, LOOPBACK if one_host else address, port, timeout)
    met = sealed(store, rank, one_host, size)
    _kept.append(met)  # torch, which has it from now on, keeps only its own half of it
    return met


def run_store(default: Any, rank: int, size: int, local: int) -> Any:
    """The store for what ranks write, given that of their process group: the one where they met, or, where others have
    made the group, this one, in which only what they write counts from now on. Collective.

    Raises:
        PipelineError: they do not believe each other.
    """
    global _run_store
    if _run_store[0] is not default:
        _run_store = default, _met(default) or sealed(default, rank, _on_one_host(size, local), size)
    return _run_store[1]


def store_on_loopback(port: int, timeout: timedelta) -> TCPStore:
    """A store that this process hosts, which no other host reaches.

    Args:
        port: 0 for any that is free.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((LOOPBACK, port))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _stay_on_host() -> None:
    """Has gloo listen where no other host reaches it, unless the environment names another interface."""
    if _GLOO_INTERFACE not in os.environ:
        found = (n for n, all_of in psutil.net_if_addrs().items() if any(a.address == LOOPBACK for a in all_of))
        name = next(found, None)
        if name is not None:
            os.environ[_GLOO_INTERFACE] = name


def _met(store: Any) -> Any:
    """That of ours of which a store is a part, if any."""
    while not any(store is ours for ours in _kept):
        if not isinstance(store, PrefixStore):
            return None
        store = store.underlying_store
    return store


def _on_one_host(size: int, local: int) -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", local)) == size


def _store_of(rank: int, address: str, port: int, timeout: timedelta) -> TCPStore:
    if rank == 0 and address == LOOPBACK:
        return store_on_loopback(port, timeout)
    return TCPStore(address, port, is_master=rank == 0, wait_for_workers=False, timeout=timeout, multi_tenant=True)
