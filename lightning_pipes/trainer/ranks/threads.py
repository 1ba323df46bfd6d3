"""The number of threads of a rank, which is its share of the cores of its host."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_pipes.engine.watch.identity import read_boot_id
from lightning_pipes.trainer.ranks.control import Control

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""The environment variable with which users set the number of threads of every process."""
_CGROUP_PATH = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cores:
    """The cores that one process may use.

    Attributes:
        host: the host of the cores.
        cores: the numbers of the cores.
        group: the group of processes that share a CPU limit, such as a container.
        allowed: the CPU limit of this group, in cores; None without a limit.
    """

    host: str
    cores: frozenset[int]
    group: str = ""
    allowed: float | None = None

    @classmethod
    def here(cls) -> Cores:
        """Return the cores of this process."""
        if hasattr(os, "sched_getaffinity"):
            cores = frozenset(os.sched_getaffinity(0))
        else:
            cores = frozenset(range(os.cpu_count() or 1))
        return cls(_host(), cores, *_limit())


def threads_of_process(mine: Cores, everybody: Sequence[Cores]) -> int:
    """Return the number of threads of the process that has the cores `mine`, which is at least one.

    Each core is divided evenly among the processes of `everybody` that may use it. The sum of the shares of this
    process is its number of threads, unless its part of the CPU limit is lower.
    """
    same_host = [each for each in everybody if each.host == mine.host]
    users = Counter(core for each in same_host for core in each.cores)
    threads = sum(1 / users[core] for core in mine.cores)
    if mine.allowed is not None:
        threads = min(threads, mine.allowed / sum(each.group == mine.group for each in same_host))
    return max(1, int(threads + 1e-6))


class Threads:
    """Sets the number of threads of this process.

    It must be created before the Trainer launches processes, because the launcher sets OMP_NUM_THREADS in the launching
    process. After that, the variable would look as if the user had set it.
    """

    def __init__(self) -> None:
        self._given = THREADS_VARIABLE in os.environ

    def share_cores(self, control: Control) -> None:
        """Set the number of threads of this process to its share, unless the user has set this number. Collective."""
        mine = Cores.here()
        of_ranks = control.all_gather((mine.host, sorted(mine.cores), mine.group, mine.allowed))
        if not self._given:
            os.environ.pop(THREADS_VARIABLE, None)
            torch.set_num_threads(
                threads_of_process(mine, [Cores(host, frozenset(cores), *rest) for host, cores, *rest in of_ranks])
            )


def _host() -> str:
    """Return an ID of this machine.

    Containers on one machine share its cores, although they have different host names.
    """
    return read_boot_id() or platform.node()


def _limit() -> tuple[str, float | None]:
    """Return the control group with the lowest CPU limit of this process, and this limit in cores."""
    found: list[tuple[float, str]] = []
    for folder in _folders():
        allowed = _allowed(folder)
        if allowed is not None:
            place = folder.stat()
            found.append((allowed, f"{place.st_dev}:{place.st_ino}"))
    return (min(found)[1], min(found)[0]) if found else ("", None)


def _folders() -> list[Path]:
    """Return the control groups that may limit the CPU time of this process, of cgroup versions 1 and 2, with their
    parents."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        root = _CGROUP_PATH
        if controllers:
            if "cpu" not in controllers.split(","):
                continue
            root = next((r for r in (_CGROUP_PATH / controllers, _CGROUP_PATH / "cpu") if r.is_dir()), _CGROUP_PATH)
        inside = root / name.lstrip("/")
        found += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(root)]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def _allowed(folder: Path) -> float | None:
    """Return the CPU limit of the processes of a control group, in cores; None without a limit."""
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
