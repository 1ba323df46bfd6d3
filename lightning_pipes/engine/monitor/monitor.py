"""A thread that samples a rank's device and machine during training, and keeps the samples.

DynPipe's engine records latencies, use of units and free memory every few hundred milliseconds (S III). Times of stages
come from the run's own timeline, not from here.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch

from lightning_pipes.engine.monitor.nvidia import CudaSource, GpmSource, NvmlSource, uuid_of
from lightning_pipes.engine.monitor.source import Row, Source, SourceError, host_sources
from lightning_pipes.ir import check_number
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.sim.shown.training_record import Curves

OVERHEAD = 0.005
"""The share of a core that sampling may take: where samples cost more, there are fewer."""
MAX_HERTZ = 10.0
"""GPUs update their numbers every 100 ms at most."""
MIN_SECONDS = 1e-9
"""The shortest time that a sample stands for, because two readings of a clock may be equal."""
_SETTLING = 0.9
_STOP_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Monitor:
    """Samples sources from `start` to `stop`. An unavailable source, or one that fails later, is missing; that is
    logged once and has no other effect.

    Args:
        sources: those that could be had, the best first.
        hertz: samples in a second, or fewer where they would take more than 0.5 % of a core.
        window: seconds that features summarise: two steps of the training at least, because samples of shorter windows
        depend on their position in a step.
        label: the owner of the device, for messages.
        extra: names of values from `record_values`, kept beside the samples.
        memory: metrics of free bytes of the device, the best first, as `free_metrics` has them.

    Raises:
        InputError: hertz or window make no sense.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        hertz: float = 4.0,
        window: float = 5.0,
        label: str = "this rank",
        extra: Sequence[str] = (),
        memory: Sequence[str] = (),
    ) -> None:
        check_number("hertz", hertz, f"above 0 and at most {MAX_HERTZ:g}", lambda x: 0 < x <= MAX_HERTZ)
        check_number("window", window, "seconds, at least two samples long", lambda x: 2 / hertz <= x < math.inf)
        self._wanted = tuple(sources)
        self._period = 1 / hertz
        self._label = label
        self._sources: list[Source] = []
        self._metrics: tuple[str, ...] = ()
        self._extra = dict.fromkeys(extra, math.nan)
        self._memory = tuple(memory)
        self._window = SampleWindow(max(2, round(window * hertz)), window)
        self._history = SampleHistory()
        self._read_at: dict[Source, float] = {}  # when a source last answered
        self._ticked = 0.0
        self._unasked = 0  # samples since the last call of `since_last`
        self._failed: set[str] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self.cost = 0.0
        """Seconds of a core that a sample takes, on average over the last ones."""

    def start(self) -> None:
        """Start sampling in a thread of its own."""
        self._thread = threading.Thread(target=self._work, name="monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling; the samples remain available."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)  # a driver that hangs is not waited for
            self._thread = None

    def features(self) -> Mapping[str, float]:
        """Return the mean of each metric over the last window by name, and its 95th percentile with `_p95` behind the
        name; NaN where it is missing. Empty before the first sample."""
        with self._lock:
            return self._window.features(self._metrics)

    def since_last(self) -> tuple[Mapping[str, float], int | None]:
        """Return the mean of each metric since the last call, over the last window at most and the last sample at
        least; and the result of `free_bytes`."""
        with self._lock:
            samples = [*self._window.samples][-max(1, self._unasked) :]
            self._unasked = 0
            means = dict(zip(self._metrics, map(float, mean_of(samples).values), strict=True)) if samples else {}
        return means, self.free_bytes()

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device at the last sample; None where no source reports them."""
        with self._lock:
            last = self._window.samples[-1] if self._window.samples else None
            now = {} if last is None else dict(zip(self._metrics, last.values, strict=True))
        return next((int(now[name]) for name in self._memory if name in now and not math.isnan(now[name])), None)

    def record_values(self, numbers: Mapping[str, float]) -> None:
        """Keep these values in the curves from now on. Unknown names are left out."""
        with self._lock:
            self._extra.update((name, value) for name, value in numbers.items() if name in self._extra)

    def to_curves(self) -> Curves:
        """Return all samples over time."""
        with self._lock:
            points = [point.tolist() for point in self._history.points]
        columns = [*zip(*points, strict=True)] or [()] * (1 + len(self._metrics) + len(self._extra))
        names = (*self._metrics, *self._extra)
        values = {
            name: tuple(None if math.isnan(value) else value for value in column)
            for name, column in zip(names, columns[1:], strict=True)
        }
        return Curves(tuple(columns[0]), values)

    # ---- in the thread

    def open(self) -> None:
        """Open all available sources, and log them. For sampling without the thread, with `take_sample` and `close`."""
        without = []
        for source in self._wanted:
            try:
                source.open()
            except SourceError as error:
                without.append(f"{source.name} ({error})")
            except Exception as error:  # training goes on without it, whatever is wrong with it
                without.append(f"{source.name} ({type(error).__name__}: {error})")
            else:
                self._sources.append(source)
        self._metrics = tuple(name for source in self._sources for name in source.metrics)
        self._began = self._ticked = read_seconds()
        used = ", ".join(source.name for source in self._sources) or "nothing"
        _log.info("%s is monitored by %s%s", self._label, used, f"; not by {', '.join(without)}" if without else "")

    def take_sample(self) -> None:
        """Take one sample."""
        sample = _joined([self._read(source) for source in self._sources])
        now = read_seconds()
        covers, self._ticked = max(MIN_SECONDS, now - self._ticked), now
        with self._lock:
            self._window.add(sample, covers)
            self._unasked += 1
            when, extra = _sample([now - self._began], covers), _sample([*self._extra.values()], covers)
            self._history.add(_joined([when, sample, extra]))

    def close(self) -> None:
        """Close all open sources."""
        for source in self._sources:
            with suppress(Exception):  # of a driver that is gone, say; nothing is read any more
                source.close()

    def _work(self) -> None:
        self.open()
        due = read_seconds()
        while not self._stopped.wait(max(0.0, due - read_seconds())):
            before = time.thread_time()
            self.take_sample()
            took = time.thread_time() - before
            self.cost = _SETTLING * self.cost + (1 - _SETTLING) * took if self.cost else took
            due = read_seconds() + max(self._period - took, self.cost / OVERHEAD)
        self.close()

    def _read(self, source: Source) -> Sample:
        """Return the current values of a source; its rates cover the time since its last answer."""
        missing = np.full(len(source.metrics), math.nan)
        try:
            found = np.asarray(source.read(), float)
        except Exception as error:  # of any kind: training does not end by it
            if source.name not in self._failed:
                self._failed.add(source.name)
                _log.warning(
                    "%s: %s can't be read (%s: %s); its metrics are missing until it can. Training goes on",
                    self._label,
                    source.name,
                    type(error).__name__,
                    error,
                )
            return Sample(missing, missing)
        last, self._read_at[source] = self._read_at.get(source, self._began), read_seconds()
        while source.lost:
            _log.info("%s: %s has no %s", self._label, source.name, source.lost.pop())
        values = found if found.shape == missing.shape else missing
        return _sample(values, max(MIN_SECONDS, self._read_at[source] - last))


def _sample(values: Sequence[float] | Row, seconds: float) -> Sample:
    """Return values that stand for the same seconds."""
    return Sample(np.array(values, float), np.full(len(values), seconds))


def _joined(samples: Sequence[Sample]) -> Sample:
    """Return the columns of all samples, one after another."""
    empty = Sample(np.empty(0), np.empty(0))
    return Sample(*(np.concatenate(each) for each in zip(empty, *samples, strict=True)))


_P95 = 0.95
_ROUNDING = 1e-9


class Sample(NamedTuple):
    """A row of metrics.

    Attributes:
        values: NaN for what is missing.
        seconds: that each value stands for.
    """

    values: Row
    seconds: Row


def mean_of(samples: Iterable[Sample]) -> Sample:
    """Return the mean of each column over time, and the seconds of it; NaN for a column without values."""
    values, seconds = _tables(samples)
    total = seconds.sum(axis=0)
    weighted = (np.where(seconds > 0, values, 0.0) * seconds).sum(axis=0)
    return Sample(np.where(total > 0, weighted / np.where(total > 0, total, 1.0), math.nan), total)


def p95_of(samples: Iterable[Sample]) -> Row:
    """Return the value that each column does not exceed for 95 % of the time; NaN for a column without values."""
    values, seconds = _tables(samples)
    order = np.argsort(values, axis=0)  # what is missing is last
    until = np.cumsum(np.take_along_axis(seconds, order, axis=0), axis=0)
    place = (until < (_P95 - _ROUNDING) * until[-1]).sum(axis=0)
    found: Row = np.take_along_axis(values, np.take_along_axis(order, place[None], axis=0), axis=0)[0]
    return found


def _tables(samples: Iterable[Sample]) -> tuple[Row, Row]:
    values, seconds = (np.stack(each) for each in zip(*samples, strict=True))
    return values, np.where(np.isnan(values), 0.0, seconds)


class SampleWindow:
    """The last samples.

    Args:
        most: samples.
        seconds: of the past that they cover; older ones are dropped.
    """

    def __init__(self, most: int, seconds: float = math.inf) -> None:
        self._seconds = seconds
        self._covered: deque[float] = deque(maxlen=most)
        self.samples: deque[Sample] = deque(maxlen=most)

    def add(self, sample: Sample, covers: float) -> None:
        """Add a sample.

        Args:
            covers: seconds since the last one.
        """
        self.samples.append(sample)
        self._covered.append(covers)
        while sum(self._covered) - self._covered[0] >= self._seconds:
            self.samples.popleft()
            self._covered.popleft()

    def features(self, names: Iterable[str]) -> dict[str, float]:
        """Return the mean of each column by its name, and the 95th percentile with `_p95` behind it."""
        if not self.samples:
            return {}
        means, highs = mean_of(self.samples).values, p95_of(self.samples)
        found = dict(zip(names, map(float, means), strict=True))
        return found | {f"{name}_p95": float(high) for name, high in zip(found, highs, strict=True)}


class SampleHistory:
    """All samples with their times, in bounded memory: beyond `most` points, each becomes the mean of two
    neighbours."""

    def __init__(self, most: int = 400) -> None:
        self._most = most
        self._each = 1  # samples in a point
        self._waiting: list[Sample] = []
        self._points: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Add a sample; its first column is the time."""
        self._waiting.append(sample)
        if len(self._waiting) < self._each:
            return
        self._points.append(mean_of(self._waiting))
        self._waiting = []
        if len(self._points) >= self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [mean_of(pair) for pair in pairs]
            self._each *= 2

    @property
    def points(self) -> Sequence[Row]:
        """Rows, the oldest first."""
        return [point.values for point in self._points]


def sources_for(device: torch.device) -> Sequence[Source]:
    """Return sources about `device` and the machine, for the calling thread: hardware counters, the driver's numbers,
    torch's, and Linux's. An unavailable source raises when it is opened."""
    uuid = uuid_of(device.index or 0) if device.type == "cuda" else None
    return [GpmSource(uuid), NvmlSource(uuid), CudaSource(device), *host_sources(threading.get_native_id())]


def free_metrics(device: torch.device) -> Sequence[str]:
    """Return the metrics of free bytes on `device`, the best first; the machine's only for a CPU."""
    return ("host.available_bytes",) if device.type == "cpu" else ("gpu.free_bytes", "gpu.torch_free_bytes")
