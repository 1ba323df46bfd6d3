"""Sources of metrics about a device or a machine.

The metrics of the machine, its cores and its memory, are read from Linux.
"""

from __future__ import annotations

import math
import os
import resource
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir.clock import read_seconds

Row = npt.NDArray[np.float64]


class SourceError(Exception):
    """Raised if a source is not available. The message contains the reason."""


class Source(ABC):
    """Base class for metrics from one source. A single thread opens, reads and closes a source.

    Attributes:
        name: the name of the source.
        metrics: the names of the metrics that `read` returns, in order. A name begins with the device and ends with the
            unit. The unit `share` is a number from 0 to 1, and `cores` is seconds of computation per second.
        lost: metrics of an open source that turned out to be unavailable, with their reasons. The monitor logs each of
            them once.
    """

    name: ClassVar[str]
    metrics: tuple[str, ...]

    def __init__(self) -> None:
        self.lost: list[str] = []

    @abstractmethod
    def open(self) -> None:
        """Prepare the source for reading.

        Raises:
            SourceError: the source is not available. The message contains the reason.
        """

    @abstractmethod
    def read(self) -> Sequence[float] | Row:
        """Return the metrics at this moment or, for rates, since the last call.

        Missing metrics must be NaN. They must not be 0, because 0 would be a measured value.

        Raises:
            Exception: any exception means that the source can't be read, now or at all.
        """

    def close(self) -> None:  # noqa: B027  # most sources do not hold resources
        """Release the resources of the source."""


class Rates:
    """Converts counters that only increase to rates since the last call."""

    def __init__(self) -> None:
        self._at = math.nan
        self._last: Row | None = None

    def per_second(self, counters: Sequence[float] | Row, now: float | None = None) -> Row:
        """Return the increase of each counter per second since the last call.

        The result is NaN at the first call, and for counters that have decreased, for example because of an overflow.

        Args:
            counters: the current values of the counters.
            now: the current time on a monotonic clock, in seconds. By default, the clock is read.
        """
        now = read_seconds() if now is None else now
        found = np.asarray(counters, float)
        last, seconds = self._last, now - self._at
        self._last, self._at = found, now
        if last is None or len(last) != len(found) or seconds <= 0:
            return np.full(len(found), math.nan)
        grown: Row = found - last
        return np.where(grown < 0, math.nan, grown / seconds)


_TASKS_PATH = "/proc/self/task"
_NANO = 1e-9
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
_CGROUP_PATH = Path("/sys/fs/cgroup")


class SchedulerSource(Source):
    """Measures how long the threads of this process ran, and how long they waited for a core while they were runnable.

    The waiting time shows the cost of other processes on the same cores. Waiting for messages counts neither as running
    nor as waiting.

    Args:
        thread: the native ID of the computing thread.
    """

    name: ClassVar[str] = "schedstat"
    metrics = (
        "host.compute_run_share",
        "host.compute_wait_share",
        "host.compute_slices_per_s",
        "host.threads_run_cores",
        "host.threads_wait_cores",
        "host.forced_switches_per_s",
        "host.minor_faults_per_s",
        "host.major_faults_per_s",
    )

    def __init__(self, thread: int) -> None:
        super().__init__()
        self._compute = str(thread)
        self._tasks = Rates()
        self._shared = Rates()
        self._threads: dict[str, tuple[float, float]] = {}
        self._of_threads = np.zeros(2)  # cumulative, including threads that have ended

    def open(self) -> None:
        _readable(f"{_TASKS_PATH}/{self._compute}/schedstat")

    def read(self) -> Row:
        own = str(threading.get_native_id())
        compute, read_at = [math.nan] * 3, read_seconds()
        for name in os.listdir(_TASKS_PATH):
            if name == own:
                continue  # the cost of sampling is not part of the training
            try:
                run, wait, slices = map(int, _text(f"{_TASKS_PATH}/{name}/schedstat").split())
            except (OSError, ValueError):
                continue  # the thread has ended
            if name == self._compute:
                compute, read_at = [run * _NANO, wait * _NANO, float(slices)], read_seconds()
            before = self._threads.get(name, (0, 0))
            self._threads[name] = (run, wait)
            self._of_threads += [max(0, run - before[0]) * _NANO, max(0, wait - before[1]) * _NANO]
        used = resource.getrusage(resource.RUSAGE_SELF)
        shared = [*self._of_threads, used.ru_nivcsw, used.ru_minflt, used.ru_majflt]
        return np.concatenate([self._tasks.per_second(compute, read_at), self._shared.per_second(shared)])


class MachineSource(Source):
    """Measures the load of all processes on the cores on which a thread may run, and on all cores of the machine.

    Args:
        thread: the native ID of the computing thread.
    """

    name: ClassVar[str] = "/proc/stat"
    metrics = (
        "host.cores_busy_share",
        "host.cores_system_share",
        "host.cores_interrupt_share",
        "host.cores_stolen_share",
        "host.machine_busy_share",
        "host.runnable_count",
    )

    def __init__(self, thread: int) -> None:
        super().__init__()
        self._compute = thread
        self._rates = Rates()

    def open(self) -> None:
        _readable("/proc/stat")

    def read(self) -> Row:
        mine = os.sched_getaffinity(self._compute)
        cores: dict[int, list[float]] = {}
        runnable = math.nan
        for line in _text("/proc/stat").splitlines():
            if line.startswith("cpu") and line[3] != " ":
                name, *ticks = line.split()
                cores[int(name[3:])] = [float(t) * _TICK_SECONDS for t in ticks[:8]]
            elif line.startswith("procs_running"):
                runnable = float(line.split()[1])
        table = np.array([cores[core] for core in sorted(cores)])
        places = [place for place, core in enumerate(sorted(cores)) if core in mine]
        user, nice, system, _, _, interrupts, soft, stolen = table[places].mean(axis=0)
        busy = user + nice + system + interrupts + soft + stolen
        all_cores = table.mean(axis=0)
        all_busy = all_cores.sum() - all_cores[3] - all_cores[4]  # without idle and iowait
        rates = self._rates.per_second([busy, system, interrupts + soft, stolen, all_busy])
        return np.append(rates, runnable)


class PressureSource(Source):
    """Measures the share of time in which processes waited for a core, for memory, or for a disk (PSI).

    A period counts if at least one process of the machine waited.
    """

    name: ClassVar[str] = "/proc/pressure"
    metrics = ("host.cpu_pressure_share", "host.memory_pressure_share", "host.io_pressure_share")

    def __init__(self) -> None:
        super().__init__()
        self._rates = Rates()

    def open(self) -> None:
        _readable("/proc/pressure/cpu")

    def read(self) -> Row:
        return self._rates.per_second([self._total(what) for what in ("cpu", "memory", "io")])

    @staticmethod
    def _total(what: str) -> float:
        """Parse the seconds since boot from a line "some avg10=... avg60=... avg300=... total=MICROSECONDS"."""
        some = _text(f"/proc/pressure/{what}").splitlines()[0]
        return int(some.rpartition("total=")[2]) / 1e6


class ThrottleSource(Source):
    """Measures how long the control group of this process was throttled because its CPU quota was exhausted."""

    name: ClassVar[str] = "cgroup"
    metrics = ("host.throttled_cores",)

    def __init__(self) -> None:
        super().__init__()
        self._rates = Rates()

    def open(self) -> None:
        if self._seconds() is None:
            raise SourceError("no control group limits the cores of this process")

    def read(self) -> Row:
        found = self._seconds()
        return self._rates.per_second([math.nan if found is None else found])

    @staticmethod
    def _seconds() -> float | None:
        """Return the throttled seconds since the group was created, or None if they are not counted.

        The group is looked up at each call, because a process may be moved to another group.
        """
        for file in _statistics():
            try:
                found = dict(line.split() for line in _text(file).splitlines())
            except (OSError, ValueError):
                continue
            if "throttled_usec" in found:
                return int(found["throttled_usec"]) / 1e6
            if "throttled_time" in found:
                return int(found["throttled_time"]) * _NANO
        return None


class MemorySource(Source):
    """Measures the memory of the machine that is available without swapping, and the memory of this process."""

    name: ClassVar[str] = "psutil"
    metrics = ("host.available_bytes", "host.resident_bytes")

    def open(self) -> None:
        try:
            import psutil
        except ImportError as error:
            raise SourceError(f"{error}; install psutil") from error
        self._process = psutil.Process()
        self._available: Callable[[], float] = lambda: float(psutil.virtual_memory().available)

    def read(self) -> list[float]:
        return [self._available(), float(self._process.memory_info().rss)]


def host_sources(thread: int) -> Sequence[Source]:
    """Return all sources about the machine.

    Args:
        thread: the native ID of the computing thread.
    """
    return [SchedulerSource(thread), MachineSource(thread), PressureSource(), ThrottleSource(), MemorySource()]


def _text(path: str | Path) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _readable(path: str) -> None:
    try:
        _text(path)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error


def _statistics() -> Iterable[Path]:
    """Yield the possible paths of the CPU statistics of this process's control group.

    The paths cover both versions of control groups.
    """
    try:
        lines = _text("/proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        inside = path.lstrip("/")
        if number == "0" and not controllers:
            yield _CGROUP_PATH / inside / "cpu.stat"
        elif "cpu" in controllers.split(","):
            yield _CGROUP_PATH / controllers / inside / "cpu.stat"
            yield _CGROUP_PATH / "cpu" / inside / "cpu.stat"
