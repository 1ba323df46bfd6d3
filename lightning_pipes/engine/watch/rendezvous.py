"""Selects a part of the launcher's store to which no earlier attempt has written.

The store of torchrun outlives the processes that torchrun starts. After a restart, it still contains the addresses of
processes that have ended, and gloo would connect to them. The restart count does not identify an attempt, because each
node counts its own restarts.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.identity import Process
from lightning_pipes.engine.watch.process_exit import SerialCaller

_ASK_SECONDS = 0.02
_RENDEZVOUS_POLL_SECONDS = 0.1


def launcher_hosts_store() -> bool:
    """Return whether torchrun hosts the store. Otherwise, rank 0 hosts it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def explain_missing_tasks() -> str:
    """Return an explanation for missing ranks in a SLURM job that was started without `srun`.

    Outside of such a job, the result is empty.
    """
    tasks = os.environ.get("SLURM_NTASKS", "1")
    # Each step that srun starts has an ID.
    if tasks == "1" or "SLURM_STEP_ID" in os.environ or launcher_hosts_store():
        return ""
    return (
        f". This process is in a SLURM job with {tasks} tasks, each of which is a rank, but it was not started by "
        "srun, so the other ranks do not exist. Start the script with `srun python ...`. If the script should start "
        "its ranks itself, set the name of the job to 'interactive'"
    )


def store_host() -> str:
    """Return the name of the host of the store, for messages."""
    return "the launcher" if launcher_hosts_store() else "rank 0"


def wait_for_host(address: str, port: int, timeout: timedelta, check: Callable[[], None]) -> None:
    """Wait until the store listens at an address. The client of the store would also wait, but without a message.

    Args:
        address: the host of the store.
        port: the port of the store.
        timeout: how long to wait.
        check: called repeatedly during the wait. It may raise an exception.

    Raises:
        ConnectionRefusedError: the launcher hosted the store, and has ended.
        TimeoutError: the store does not listen at this address in time.
    """
    until = time.monotonic() + timeout.total_seconds()
    while True:
        check()
        try:
            with socket.create_connection((address, port), timeout=1.0):
                return
        except OSError as error:
            if launcher_hosts_store() and isinstance(error, ConnectionRefusedError):
                raise ConnectionRefusedError(  # the launcher created the store before it started this process
                    f"the launcher has ended: it hosted the store of this run at {address}:{port}, where no "
                    f"process listens now ({error})"
                ) from error
            if time.monotonic() > until:
                seconds = timeout.total_seconds()
                raise TimeoutError(
                    f"rank 0 did not connect within {seconds:.0f} s: no process listens at {address}:{port} ({error})"
                ) from error
        time.sleep(_RENDEZVOUS_POLL_SECONDS)


def launcher_store(timeout: timedelta, check: Callable[[], None] = lambda: None) -> TCPStore:
    """Connect to the store of the launcher.

    Args:
        timeout: how long to wait for the launcher.
        check: called repeatedly during the wait. It may raise an exception.

    Raises:
        ConnectionRefusedError: the launcher has ended.
        TimeoutError: the launcher does not answer, for example because it is stopped.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + timeout.total_seconds()
    wait_for_host(address, port, timeout, check)

    def check_timeout() -> None:
        check()
        if time.monotonic() > until:
            seconds = timeout.total_seconds()
            raise TimeoutError(f"the launcher has not answered within {seconds:.0f} s: it hosts the store of this run")

    # The client of a store waits for its first answer indefinitely, regardless of its timeout.
    with SerialCaller() as asking:
        return asking(partial(TCPStore, address, port, is_master=False, timeout=timeout), check_timeout)


def attempt_store(
    rank: int, size: int, timeout: timedelta, check: Callable[[], None] = lambda: None
) -> PrefixStore | None:
    """Return the part of the launcher's store that belongs to the processes of this attempt.

    Args:
        rank: the global rank of this process.
        size: the number of ranks.
        timeout: how long to wait for the launcher and for the other ranks.
        check: called repeatedly during the wait. It may raise an exception.

    Returns:
        The part of the store, or None if the launcher does not host a store.

    Raises:
        ConnectionAbortedError: a rank has ended since this rank has seen it.
        ConnectionRefusedError: the launcher has ended.
        TimeoutError: the launcher does not answer, or ranks are missing.
    """
    if not launcher_hosts_store():
        return None
    store = launcher_store(timeout, check)
    return PrefixStore(f"lightning_pipes/attempts/{agree_on_name(store, rank, size, timeout, check)}", store)


def agree_on_name(
    store: TCPStore, rank: int, size: int, timeout: timedelta, check: Callable[[], None] = lambda: None
) -> str:
    """Return a name that rank 0 creates for this attempt, and that is equal on all ranks.

    Each other rank writes a random number to the store. Rank 0 answers each number that it finds, including the numbers
    of ranks that have ended, until every rank has confirmed that it received this name.

    Args:
        store: the store of the launcher.
        rank: the global rank of this process.
        size: the number of ranks.
        timeout: how long to wait for the other ranks.
        check: called repeatedly during the wait. It may raise an exception.

    Raises:
        ConnectionAbortedError: a rank has ended since this rank has seen it.
        TimeoutError: ranks are missing.
    """
    own = secrets.token_hex(8)
    fault_point("rendezvous")
    store.set(f"lightning_pipes/place/{own}", str(Process.current()))
    store.set(f"lightning_pipes/asks/{rank}", own)
    living = _LivenessCheck(store)
    deadline = time.monotonic() + timeout.total_seconds()

    def wait(missing: Iterable[int]) -> None:
        check()
        for other in missing:
            living.check_rank(other)
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)))
            raise TimeoutError(f"rank {ranks} did not connect within {timeout.total_seconds():.0f} s")
        time.sleep(_ASK_SECONDS)

    if rank != 0:
        fault_point("rendezvous.asked")
        while not store.check([f"lightning_pipes/answers/{own}"]):
            wait([0])
        name: str = store.get(f"lightning_pipes/answers/{own}").decode()
        store.set(f"lightning_pipes/confirms/{name}/{own}", "")
        return name
    answered: dict[int, str] = {}
    missing = set(range(1, size))
    while missing:
        for other in sorted(missing):
            if not store.check([f"lightning_pipes/asks/{other}"]):
                continue
            number = store.get(f"lightning_pipes/asks/{other}").decode()
            # Check the confirmation first, because a rank that has confirmed may already request the next name.
            before = answered.get(other)
            if before is not None and store.check([f"lightning_pipes/confirms/{own}/{before}"]):
                missing.remove(other)
            elif number != before:
                store.set(f"lightning_pipes/answers/{number}", own)
                answered[other] = number
                fault_point("rendezvous.answered")
        wait(missing)
    return own


class _LivenessCheck:
    """Remembers the processes of this attempt that were seen alive.

    The store also contains processes of earlier attempts, which have ended.
    """

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self._seen: set[str] = set()

    def check_rank(self, rank: int) -> None:
        """Raise ConnectionAbortedError if the process of the rank was alive in an earlier check and has ended since."""
        if not self._store.check([f"lightning_pipes/asks/{rank}"]):
            return
        number = self._store.get(f"lightning_pipes/asks/{rank}").decode()
        process = Process.parse(self._store.get(f"lightning_pipes/place/{number}").decode())
        if process is None or not process.has_ended():
            self._seen.add(number)
        elif number in self._seen:
            raise ConnectionAbortedError(f"rank {rank} has ended before all ranks had connected")
