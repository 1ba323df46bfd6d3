"""Processes that compete with a training run for a core, and quotas for processes. Linux only.

    with Neighbor("spin", core=1):              # one process on this core: work there takes about twice as long
    with Neighbor("memory", 0.5, processes=2):  # two processes on any core, each working for half of the time
    with Quota(0.5):                             # this process gets half of a core (root)

The processes end with the context. They also end if the process that opened the context ends for any reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Self

from lightning_pipes.ir import InputError, check_count, check_number, check_type

PERIOD_SECONDS, LONG_PERIOD_SECONDS = 0.02, 2.0
"""The seconds of one period of work and rest, and the seconds of a period of `bursts`."""
_CGROUP_PATH = Path("/sys/fs/cgroup")
_QUOTA_PERIOD_MICROSECONDS = 10_000
"""The period of quotas in microseconds. It is as short as a step, so that all steps are throttled equally."""
_numbers = count()


def _spin() -> Callable[[], object]:
    return lambda: sum(range(2000))


def _matmul() -> Callable[[], object]:
    import numpy as np

    a = np.ones((160, 160), np.float32)
    out = np.empty_like(a)
    return lambda: np.matmul(a, a, out=out)


def _memory() -> Callable[[], object]:
    """Copy more memory than any cache holds."""
    import numpy as np

    source, target = np.ones(2**24, np.float32), np.empty(2**24, np.float32)
    piece = 2**18
    places = (n * piece % len(source) for n in count())

    def copy_piece() -> None:
        at = next(places)
        target[at : at + piece] = source[at : at + piece]

    return copy_piece


def _cache() -> Callable[[], object]:
    """Read random elements of a table that fits into a cache."""
    import numpy as np

    random = np.random.default_rng(0)
    table, places = np.ones(2**20), random.integers(0, 2**20, 2**13)
    return lambda: table[places].sum()


def _calls() -> Callable[[], object]:
    """Make system calls, like a process that launches many small kernels."""
    nowhere = os.open(os.devnull, os.O_WRONLY)

    def write_bytes() -> None:
        for _ in range(50):
            os.write(nowhere, b"x")

    return write_bytes


NEIGHBOR_KINDS: dict[str, Callable[[], Callable[[], object]]] = {
    "spin": _spin,
    "matmul": _matmul,
    "memory": _memory,
    "cache": _cache,
    "calls": _calls,
    "bursts": _spin,
}
"""The kinds of work by name. Each function returns another function, which does work for less than a millisecond.

`bursts` works for seconds and then rests for seconds.
"""


class Neighbor:
    """Processes that compete for a core, its caches or the memory while the context is open.

    Entering the context waits until all processes are working.

    Args:
        kind: the kind of work, a key of `NEIGHBOR_KINDS`.
        intensity: the share of the time in which each process works, above 0 and at most 1.
        core: the core to which the processes are pinned. By default, the system chooses cores.
        processes: the number of processes.
        nice: the increment of the niceness of each process, from 0 to 19.

    Raises:
        InputError: if an argument is invalid on this machine.
    """

    def __init__(
        self, kind: str, intensity: float = 1.0, core: int | None = None, processes: int = 1, nice: int = 0
    ) -> None:
        if kind not in NEIGHBOR_KINDS:
            raise InputError(f"there is no neighbor {kind!r}; there is {', '.join(NEIGHBOR_KINDS)}")
        check_number("intensity", intensity, "above 0 and at most 1", lambda x: 0 < x <= 1)
        check_count("processes", processes)
        check_type("nice", nice, int)
        if core is not None and core not in os.sched_getaffinity(0):
            raise InputError(f"core must be one of {sorted(os.sched_getaffinity(0))}, got {core}")
        self._arguments = [kind, str(intensity), str(-1 if core is None else core), str(nice), str(os.getpid())]
        self._count = processes
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """The process ids. The list is empty while the context is not open."""
        return [process.pid for process in self._processes]

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", __name__, *self._arguments]
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            for _ in range(self._count):
                self._processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=alone))
            for process in self._processes:
                assert process.stdout is not None
                if not process.stdout.read(1):
                    raise InputError(f"a neighbor ended before it was at work, with status {process.wait()}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *args: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._processes = []


class Quota:
    """A limit on the cores of a process, its threads and its children, or a weight relative to other processes.

    The quota is in effect while the context is open. It needs root.

    Args:
        cores: the seconds of computing per second, above 0. None means that there is no limit.
        process: the process id. The default is the calling process.
        weight: the weight of the process if other processes compete for the same core, from 1 to 10000. The usual
            weight is 100.

    Raises:
        InputError: if `cores` or `weight` is out of range, or if quotas can't be set on this machine.
    """

    def __init__(self, cores: float | None, process: int | None = None, weight: int = 100) -> None:
        if cores is not None:
            check_number("cores", cores, "above 0 and finite", lambda x: 0 < x < float("inf"))
        check_number("weight", weight, "1 to 10000", lambda x: 1 <= x <= 10000)
        why = why_no_quota()
        if why is not None:
            raise InputError(f"quotas can't be set here: {why}")
        self._cores, self._weight = cores, weight
        self._process = os.getpid() if process is None else process
        self._group = _home() / f"lightning_pipes-{os.getpid()}-{next(_numbers)}"

    def __enter__(self) -> Self:
        self._before = _group_of(self._process)
        self._group.mkdir()
        quota = None if self._cores is None else max(1000, round(self._cores * _QUOTA_PERIOD_MICROSECONDS))
        if (self._group / "cpu.max").exists():
            (self._group / "cpu.weight").write_text(str(self._weight))
            (self._group / "cpu.max").write_text(f"{quota or 'max'} {_QUOTA_PERIOD_MICROSECONDS}")
        else:
            (self._group / "cpu.shares").write_text(str(round(self._weight * 10.24)))
            (self._group / "cpu.cfs_period_us").write_text(str(_QUOTA_PERIOD_MICROSECONDS))
            (self._group / "cpu.cfs_quota_us").write_text(str(quota or -1))
        (self._group / "cgroup.procs").write_text(str(self._process))
        return self

    def __exit__(self, *args: object) -> None:
        with suppress(ProcessLookupError):  # the process has ended
            (self._before / "cgroup.procs").write_text(str(self._process))
        while True:
            try:
                self._group.rmdir()
                return
            except OSError:  # a process in the group has not ended yet
                time.sleep(PERIOD_SECONDS)


def why_no_quota() -> str | None:
    """Return the reason why quotas can't be set on this machine, or None if they can be set."""
    home = _home()
    if not (home / "cgroup.procs").exists():
        return f"there are no control groups in {home}"
    probe = home / f"lightning_pipes-{os.getpid()}-{next(_numbers)}"
    try:
        probe.mkdir()
    except OSError as error:
        return str(error)
    try:
        if not any((probe / name).exists() for name in ("cpu.max", "cpu.cfs_quota_us")):
            return f"{home} does not share cores out among its groups"
        return None
    finally:
        probe.rmdir()


def _home() -> Path:
    """Return the control group that contains all other groups."""
    return _CGROUP_PATH / "cpu" if (_CGROUP_PATH / "cpu" / "cgroup.procs").exists() else _CGROUP_PATH


def _group_of(process: int) -> Path:
    """Return the current control group of a process."""
    for line in Path(f"/proc/{process}/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        found = _home() / path.lstrip("/")
        if ("cpu" in controllers.split(",") or (number == "0" and _home() == _CGROUP_PATH)) and found.exists():
            return found
    return _home()


def main(arguments: Sequence[str]) -> None:
    """Work and rest until the parent process has ended."""
    kind, intensity, core, nice, parent = arguments
    if int(core) >= 0:
        os.sched_setaffinity(0, {int(core)})
    os.nice(int(nice))
    work, period = NEIGHBOR_KINDS[kind](), LONG_PERIOD_SECONDS if kind == "bursts" else PERIOD_SECONDS
    work()
    os.write(1, b"!")
    began, busy = time.monotonic(), float(intensity) * period
    while os.getppid() == int(parent):
        while time.monotonic() - began < busy:
            work()
        rest = period - (time.monotonic() - began)
        if rest > 0:
            time.sleep(rest)
        began = max(began + period, time.monotonic() - period)


if __name__ == "__main__":
    main(sys.argv[1:])
