"""A part of the launcher's store that no earlier attempt has written to.

torchrun's store outlives the processes that it starts. After a restart it still says where the dead ones listened, and
gloo would connect there. The count of restarts can't be the name of a fresh part: each node counts its own.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_pipes.engine.points import point

_ASK_SECONDS = 0.02


def launcher_hosts_store() -> bool:
    """Whether the processes meet in a store of torchrun's, and not in one that rank 0 makes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def store_host() -> str:
    """Who hosts the store, as messages call it."""
    return "the launcher" if launcher_hosts_store() else "rank 0"


def launcher_store(timeout: timedelta) -> TCPStore:
    """A connection to the launcher's store."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=False, timeout=timeout)


def own_store(rank: int, size: int, timeout: timedelta) -> PrefixStore | None:
    """The part of the launcher's store that belongs to this attempt's `size` processes; None without such a store.

    Raises:
        TimeoutError: not all ranks came.
    """
    if not launcher_hosts_store():
        return None
    store = launcher_store(timeout)
    return PrefixStore(f"lightning_pipes/attempts/{agreed_name(store, rank, size, timeout)}", store)


def agreed_name(store: TCPStore, rank: int, size: int, timeout: timedelta) -> str:
    """A name that rank 0 has just made up, the same on all ranks.

    Each other rank leaves a number that nobody has used before. Rank 0 answers every such number that it finds, those
    of the dead too, until each rank has confirmed to have this name.
    """
    own = secrets.token_hex(8)
    point("rendezvous")
    if rank != 0:
        store.set(f"lightning_pipes/asks/{rank}", own)
        point("rendezvous.asked")
        name: str = store.get(f"lightning_pipes/answers/{own}").decode()
        store.set(f"lightning_pipes/confirms/{name}/{own}", "")
        return name
    answered: dict[int, str] = {}
    missing, deadline = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if not store.check([f"lightning_pipes/asks/{other}"]):
                continue
            number = store.get(f"lightning_pipes/asks/{other}").decode()
            before = answered.get(other)  # looked for first: who has confirmed may have asked for the next name since
            if before is not None and store.check([f"lightning_pipes/confirms/{own}/{before}"]):
                missing.remove(other)
            elif number != before:
                store.set(f"lightning_pipes/answers/{number}", own)
                answered[other] = number
                point("rendezvous.answered")
        if time.monotonic() > deadline:
            ranks = ", ".join(map(str, sorted(missing)))
            raise TimeoutError(f"rank {ranks} did not come within {timeout.total_seconds():.0f} s")
        time.sleep(_ASK_SECONDS)
    return own
