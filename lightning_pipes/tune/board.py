"""What rank 0 says to the others about trials, before they exist and after.

It is a store of words by key, not a sequence of broadcasts: processes that Lightning starts in the middle of the first
trial run the script from its beginning, and find what was said before they were there.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_pipes.engine.rendezvous import launcher_hosts_store, own_store
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.trainer.private_lightning import default_store
from lightning_pipes.trainer.sibling import current_sibling

ADDRESS = "LIGHTNING_PIPES_BOARD"
"""Where rank 0 listens, for the processes that Lightning starts with a copy of its environment."""
_TIMEOUT = timedelta(minutes=30)
_LOOK_SECONDS = 0.005
_LEAVE_SECONDS = 30.0


class RankZeroEndedError(PipelineError):
    """Rank 0, which says what is tried next, has ended or can't be reached."""


class Board:
    """Words of rank 0 for one purpose. Ranks that make equally many have the same.

    Attributes:
        leads: whether this is rank 0, which says; the others hear.
        rank: of this process among all, or among those of its host where no launcher but Lightning has started it.

    Raises:
        PlanError: there is no way to rank 0.
    """

    def __init__(self) -> None:
        self._line = _line()
        self.rank = self._line.rank
        self.leads = self.rank == 0
        self._line.boards += 1
        self._store = PrefixStore(f"lightning_pipes/boards/{self._line.boards}", self._line.store)

    def say(self, key: str, value: object) -> None:
        """Lets the other ranks know."""
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]

    def hear(self, key: str, until: Callable[[], bool] = lambda: False) -> Any:
        """What rank 0 says under `key`, or None where `until()` comes first; a sibling lets others compute meanwhile.

        Raises:
            RankZeroEndedError: it will not say anything.
        """

        def ready() -> bool:
            return self.said(key) or until()

        sibling = current_sibling()
        if sibling is not None:
            sibling.wait_until(ready)
        while not ready():
            time.sleep(_LOOK_SECONDS)
        return pickle.loads(self._store.get(key)) if self.said(key) else None

    def said(self, key: str) -> bool:
        """Whether there is a word under `key`.

        Raises:
            RankZeroEndedError: nobody can tell.
        """
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise RankZeroEndedError(f"rank 0, which holds the study or sweep, has ended ({error})") from error

    def leave(self) -> None:
        """Called by all when they have heard all: rank 0 stays for them where it hosts the store."""
        if not self.leads:
            self._store.add("left", 1)
        elif self._line.hosted:
            others = dist.get_world_size() - 1 if dist.is_initialized() else 0
            until = time.monotonic() + _LEAVE_SECONDS
            while self._store.add("left", 0) < others and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)


class _Line:
    """This process's connection to the store in which the boards of its run are."""

    def __init__(self) -> None:
        self.boards = 0
        self.hosted = False
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.store = dist.get_rank(), default_store().clone()
        elif launcher_hosts_store():
            self.rank = int(os.environ["RANK"])
            self.store = own_store(self.rank, int(os.environ["WORLD_SIZE"]), _TIMEOUT)
        elif ADDRESS in os.environ and os.environ.get("LOCAL_RANK", "0") != "0":
            self.rank = int(os.environ["LOCAL_RANK"])
            host, _, port = os.environ[ADDRESS].rpartition(":")
            self.store = TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)
        else:
            if _started_by_others():
                raise PlanError(
                    "another launcher than Lightning or torchrun starts the processes, and they can't find rank 0 "
                    "before they train: start the script by torchrun, on SLURM by srun torchrun"
                )
            self.rank, self.hosted = 0, True
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
            os.environ[ADDRESS] = f"127.0.0.1:{self.store.port}"


def _started_by_others() -> bool:
    """Whether this process has brothers that Lightning has not started."""
    if "SLURM_PROCID" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or int(os.environ.get("NODE_RANK", "0")) > 0


@cache
def _line() -> _Line:
    return _Line()
