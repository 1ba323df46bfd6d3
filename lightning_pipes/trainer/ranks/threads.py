"""The number of threads of a rank: its share of the cores of its host."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_pipes.trainer.ranks.control import Control

VARIABLE = "OMP_NUM_THREADS"
"""The variable by which users set the threads of every process."""
_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cores:
    """The cores that one process may compute on.

    Attributes:
        host: of the cores.
        cores: their numbers.
        group: of processes that share what is allowed in all, such as a container.
        allowed: how many cores' worth of time that group gets; None where there is no limit.
    """

    host: str
    cores: frozenset[int]
    group: str = ""
    allowed: float | None = None

    @classmethod
    def here(cls) -> Cores:
        """Return the share of this process."""
        if hasattr(os, "sched_getaffinity"):
            cores = frozenset(os.sched_getaffinity(0))
        else:
            cores = frozenset(range(os.cpu_count() or 1))
        return cls(_host(), cores, *_limit())


def threads_of_process(mine: Cores, everybody: Sequence[Cores]) -> int:
    """Return how many threads the process of `mine` has: of each core that it may use, the part that is left to it by
    the others of `everybody` that may use it too; at least one."""
    same_host = [each for each in everybody if each.host == mine.host]
    users = Counter(core for each in same_host for core in each.cores)
    threads = sum(1 / users[core] for core in mine.cores)
    if mine.allowed is not None:
        threads = min(threads, mine.allowed / sum(each.group == mine.group for each in same_host))
    return max(1, int(threads + 1e-6))


class Threads:
    """Made before the Trainer launches anything: its launcher sets OMP_NUM_THREADS in the process that launches, where
    it would look as if the user had."""

    def __init__(self) -> None:
        self._given = VARIABLE in os.environ

    def share_cores(self, control: Control) -> None:
        """Let this process compute with its share of threads, unless the user has set their number. Collective."""
        mine = Cores.here()
        of_ranks = control.all_gather((mine.host, sorted(mine.cores), mine.group, mine.allowed))
        if not self._given:
            os.environ.pop(VARIABLE, None)
            torch.set_num_threads(
                threads_of_process(mine, [Cores(host, frozenset(cores), *rest) for host, cores, *rest in of_ranks])
            )


def _host() -> str:
    """Return which machine this is: containers on one have names of their own and share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _limit() -> tuple[str, float | None]:
    """Return the control group of this process that allows it least, and how many cores' worth of time that is."""
    found: list[tuple[float, str]] = []
    for folder in _folders():
        allowed = _allowed(folder)
        if allowed is not None:
            place = folder.stat()
            found.append((allowed, f"{place.st_dev}:{place.st_ino}"))
    return (min(found)[1], min(found)[0]) if found else ("", None)


def _folders() -> list[Path]:
    """Return the control groups of this process that may limit its time, of either version, and all around them."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        root = _GROUPS
        if controllers:
            if "cpu" not in controllers.split(","):
                continue
            root = next((r for r in (_GROUPS / controllers, _GROUPS / "cpu") if r.is_dir()), _GROUPS)
        inside = root / name.lstrip("/")
        found += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(root)]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def _allowed(folder: Path) -> float | None:
    """Return how many cores' worth of time the processes of a control group get."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        elif (folder / "cpu.cfs_quota_us").exists():
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        else:
            return None
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None
