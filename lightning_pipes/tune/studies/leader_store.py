"""Messages about trials from rank 0 to the other ranks, before and after the ranks are connected.

The messages are kept in a key-value store instead of being broadcast. Lightning starts the other processes in the
middle of the first trial. These processes run the script from its beginning and can still read the messages that were
sent before they started.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from optuna import distributions
from optuna.trial import FrozenTrial
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_pipes.arrays.siblings.sibling import current_sibling
from lightning_pipes.engine.watch import plain
from lightning_pipes.engine.watch.launcher import StartupWatch, environment_for_children
from lightning_pipes.engine.watch.process_exit import SerialCaller
from lightning_pipes.engine.watch.rendezvous import launcher_hosts_store, wait_for_host
from lightning_pipes.engine.watch.shared_store import LOOPBACK, adopt_store, current_store, run_store, store_on_loopback
from lightning_pipes.engine.watch.slurm import count_slurm_tasks
from lightning_pipes.engine.watch.trust import (
    TRUSTED_SEAL,
    dumps,
    loads,
    seal_of,
    seal_store,
    secret_for_children,
    sub_store_of,
)
from lightning_pipes.ir import InputError, PipelineError
from lightning_pipes.trainer.ranks.processes import all_processes, process_rank, whole_group

PORT_VARIABLE = "LIGHTNING_PIPES_BOARD"
"""The environment variable with the port on which rank 0 listens. Processes that Lightning starts inherit it."""
_STORE_TIMEOUT = timedelta(minutes=30)
_STORE_POLL_SECONDS = 0.005
_STORE_CLOSE_SECONDS = 30.0
plain.allow_classes(FrozenTrial, *(kind for kind in vars(distributions).values() if isinstance(kind, type)))


class RankZeroEndedError(PipelineError):
    """Rank 0, which chooses the next trial, has ended or cannot be reached."""


class LeaderStore:
    """A store for messages of rank 0 for one purpose. All ranks must create their stores in the same order.

    Attributes:
        is_leader: whether this is rank 0, which publishes values. The other ranks read them.
        rank: the rank of this process, or its local rank if Lightning started it.
        is_signed: whether values are signed, so that only ranks of this run can have written them.

    Raises:
        InputError: this process has no way to find rank 0.
    """

    def __init__(self) -> None:
        self._connection = _store_connection()
        self.rank = self._connection.rank
        self.is_leader = self.rank == 0
        self.is_signed = self._connection.seal is not None
        self._connection.n_stores += 1
        self._connection.open()
        self._store = sub_store_of(self._connection.store, f"lightning_pipes/boards/{self._connection.n_stores}")

    def put(self, key: str, value: object) -> None:
        """Publish a value to the other ranks under `key`."""
        self._store.set(key, dumps(value, self._connection.seal))

    def get(self, key: str, until: Callable[[], bool] = lambda: False) -> Any:
        """Return the value that rank 0 publishes under `key`, or None if `until()` becomes true before.

        If a sibling waits here, other siblings compute in the meantime.

        Raises:
            RankZeroEndedError: rank 0 has ended.
            RankStoppedError: the process of rank 0 is stopped.
        """

        def is_ready() -> bool:
            return self.has_key(key) or until()

        sibling = current_sibling()
        if sibling is not None:
            sibling.wait_until(is_ready)
        while not is_ready():
            time.sleep(_STORE_POLL_SECONDS)
        return (
            loads(self._call_store(partial(self._store.get, key)), self._connection.seal) if self.has_key(key) else None
        )

    def has_key(self, key: str) -> bool:
        """Return whether rank 0 has published a value under `key`.

        Raises:
            RankZeroEndedError: rank 0 has ended.
            RankStoppedError: the process of rank 0 is stopped.
        """
        try:
            return bool(self._call_store(partial(self._store.check, [key])))
        except PipelineError:
            raise
        except RuntimeError as error:
            raise RankZeroEndedError(f"rank 0, which holds the study or sweep, has ended ({error})") from error

    def close(self) -> None:
        """Close the store. Every rank calls this after its last `get`.

        If rank 0 hosts the store, it waits for the other ranks.
        """
        if not self.is_leader:
            self._call_store(partial(self._store.set, f"left/{self.rank}", ""))
        elif self._connection.hosted:
            others = range(1, whole_group().size() if dist.is_initialized() else self._connection.size)
            until = time.monotonic() + _STORE_CLOSE_SECONDS
            while not all(self.has_key(f"left/{rank}") for rank in others) and time.monotonic() < until:
                time.sleep(_STORE_POLL_SECONDS)
        self._connection.close()

    def _call_store(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call of the store, but do not hang if rank 0 is stopped, as a direct call would."""
        return (
            call() if self._connection.hosted else self._connection.caller(call, self._connection.startup_watch.check)
        )


class _StoreConnection:
    """The connection of this process to the store that contains all leader stores of the run."""

    def __init__(self) -> None:
        self.n_stores = 0
        self.hosted, self.size = False, 1
        self._open = 0
        self._variables: dict[str, str] = {}
        self._environment = ExitStack()
        self.caller = SerialCaller()
        self.startup_watch = watch = StartupWatch()
        if dist.is_initialized() and whole_group().size() > 1:
            self.rank, size = process_rank(), whole_group().size()
            with all_processes():
                self.store = current_store() or adopt_store(whole_group().get_group_store(), self.rank, size, 1)
        elif launcher_hosts_store():
            self.rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            self.store = run_store(self.rank, size, size, _STORE_TIMEOUT, watch.check)
        elif PORT_VARIABLE in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
            self.rank = int(os.environ["LOCAL_RANK"])
            port = int(os.environ[PORT_VARIABLE])
            wait_for_host(LOOPBACK, port, _STORE_TIMEOUT, watch.check)  # rank 0 may have ended by now
            store = TCPStore(LOOPBACK, port, is_master=False, timeout=_STORE_TIMEOUT)
            self.store = seal_store(store, self.rank, one_host=True)
        elif count_slurm_tasks() > 1 and "SLURM_STEP_ID" in os.environ:  # srun
            slurm = SLURMEnvironment()
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = slurm.main_address, str(slurm.main_port)
            self.rank, size = slurm.global_rank(), slurm.world_size()
            self.hosted, self.size = self.rank == 0, size
            local = size if os.environ.get("SLURM_NNODES", "1") == "1" else 1
            self.store = run_store(self.rank, size, local, _STORE_TIMEOUT, watch.check)
        else:
            if _has_other_launcher():
                raise InputError(
                    "the processes were started by a launcher other than Lightning, torchrun or srun, and can't find "
                    "rank 0 before they train; start the script with torchrun, or with srun on SLURM"
                )
            self.rank, self.hosted = 0, True
            secret = secret_for_children()
            store = store_on_loopback(0, _STORE_TIMEOUT)
            self.store = seal_store(store, self.rank, one_host=True)
            self._variables = {**secret, PORT_VARIABLE: str(store.port)}
        self.seal = TRUSTED_SEAL if seal_of(self.store) else None
        """The seal of signed values, or None if the store does not sign its values."""

    def open(self) -> None:
        """Publish the address of this store in the environment, for processes that start later."""
        if not self._open and self._variables:
            self._environment = ExitStack()
            self._environment.enter_context(environment_for_children(self._variables))
        self._open += 1

    def close(self) -> None:
        """Undo one call of `open`. The last call removes the address from the environment."""
        self._open -= 1
        if not self._open:
            self._environment.close()


def _has_other_launcher() -> bool:
    """Return whether a launcher other than Lightning started this process together with others."""
    return (
        count_slurm_tasks() > 1
        or int(os.environ.get("WORLD_SIZE", "1")) > 1
        or int(os.environ.get("NODE_RANK", "0")) > 0
    )


@cache
def _store_connection() -> _StoreConnection:
    return _StoreConnection()
