"""Samples the device and the machine of a rank in a thread during training, and keeps the samples.

The engine of DynPipe records latencies, the utilization of units, and free memory every few hundred milliseconds
(section III). The times of stages are not measured here, because they are taken from the timeline of the run.
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
from lightning_pipes.sim.records.training_record import Curves

MAX_SAMPLING_SHARE = 0.005
"""The share of a core that sampling may take. If a sample costs more, samples are taken less often."""
MAX_HERTZ = 10.0
"""Maximum sampling rate. GPUs do not update their values more often than every 100 ms."""
MIN_SAMPLE_SECONDS = 1e-9
"""Shortest time that a sample stands for, in seconds. It is necessary because two readings of the clock may be
equal."""
_SMOOTHING_FACTOR = 0.9
_STOP_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Monitor:
    """Samples sources of metrics between `start` and `stop`.

    The metrics of a source are missing if the source is not available, or if it fails later. This is logged once and
    has no other effect.

    Args:
        sources: the sources to sample. Sources that are not available are skipped.
        hertz: samples per second. The rate is lower if sampling would take more than 0.5 % of a core.
        window: the time that features summarize, in seconds. It should cover at least two training steps, because the
            features of shorter windows depend on their position in a step.
        label: the owner of the device, for messages.
        extra: names of values from `record_values`, which are kept together with the samples.
        memory: names of metrics with the free bytes of the device, in order of preference, as `free_metrics` returns
            them.

    Raises:
        InputError: `hertz` or `window` is out of range.
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
        self._read_at: dict[Source, float] = {}  # time of the last successful read of each source
        self._ticked = 0.0
        self._unasked = 0  # number of samples since the last call of `since_last`
        self._failed: set[str] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._began = 0.0
        self.cost = 0.0
        """CPU seconds that a sample takes, as a moving average."""

    def start(self) -> None:
        """Start sampling in a separate thread."""
        self._thread = threading.Thread(target=self._work, name="monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop sampling. The samples remain available."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)  # the timeout prevents waiting for a driver that hangs
            self._thread = None

    def features(self) -> Mapping[str, float]:
        """Return features of the last window by name.

        The features are the mean of each metric, under its name, and its 95th percentile, under its name followed by
        `_p95`. Missing values are NaN. The result is empty before the first sample.
        """
        with self._lock:
            return self._window.features(self._metrics)

    def since_last(self) -> tuple[Mapping[str, float], int | None]:
        """Return values since the last call of this method.

        Returns:
            The mean of each metric over the samples since the last call, limited to the last window and including at
            least the last sample, and the result of `free_bytes`.
        """
        with self._lock:
            samples = [*self._window.samples][-max(1, self._unasked) :]
            self._unasked = 0
            means = dict(zip(self._metrics, map(float, mean_of(samples).values), strict=True)) if samples else {}
        return means, self.free_bytes()

    def free_bytes(self) -> int | None:
        """Return the number of free bytes of the device at the last sample, or None if no source reports it."""
        with self._lock:
            last = self._window.samples[-1] if self._window.samples else None
            now = {} if last is None else dict(zip(self._metrics, last.values, strict=True))
        return next((int(now[name]) for name in self._memory if name in now and not math.isnan(now[name])), None)

    def record_values(self, numbers: Mapping[str, float]) -> None:
        """Set the values of extra columns, which are kept with each following sample.

        Args:
            numbers: values by name. Names that were not passed as `extra` are ignored.
        """
        with self._lock:
            self._extra.update((name, value) for name, value in numbers.items() if name in self._extra)

    def to_curves(self) -> Curves:
        """Return all samples as curves over time."""
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
        """Open all available sources, and log which sources are used.

        Together with `take_sample` and `close`, this method allows sampling without the thread.
        """
        without = []
        for source in self._wanted:
            try:
                source.open()
            except SourceError as error:
                without.append(f"{source.name} ({error})")
            except Exception as error:  # training continues without the source, whatever the error is
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
        covers, self._ticked = max(MIN_SAMPLE_SECONDS, now - self._ticked), now
        with self._lock:
            self._window.add(sample, covers)
            self._unasked += 1
            when, extra = _sample([now - self._began], covers), _sample([*self._extra.values()], covers)
            self._history.add(_joined([when, sample, extra]))

    def close(self) -> None:
        """Close all open sources."""
        for source in self._sources:
            with suppress(Exception):  # the driver may be gone, but nothing is read any longer
                source.close()

    def _work(self) -> None:
        self.open()
        due = read_seconds()
        while not self._stopped.wait(max(0.0, due - read_seconds())):
            before = time.thread_time()
            self.take_sample()
            took = time.thread_time() - before
            self.cost = _SMOOTHING_FACTOR * self.cost + (1 - _SMOOTHING_FACTOR) * took if self.cost else took
            due = read_seconds() + max(self._period - took, self.cost / MAX_SAMPLING_SHARE)
        self.close()

    def _read(self, source: Source) -> Sample:
        """Read a source. Its rates cover the time since its last successful read."""
        missing = np.full(len(source.metrics), math.nan)
        try:
            found = np.asarray(source.read(), float)
        except Exception as error:  # no error of a source may end the training
            if source.name not in self._failed:
                self._failed.add(source.name)
                _log.warning(
                    "%s: %s can't be read (%s: %s). Training continues, and its metrics are missing until it can be "
                    "read again",
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
        return _sample(values, max(MIN_SAMPLE_SECONDS, self._read_at[source] - last))


def _sample(values: Sequence[float] | Row, seconds: float) -> Sample:
    """Return a sample of values that all stand for the same time."""
    return Sample(np.array(values, float), np.full(len(values), seconds))


def _joined(samples: Sequence[Sample]) -> Sample:
    """Concatenate the columns of samples."""
    empty = Sample(np.empty(0), np.empty(0))
    return Sample(*(np.concatenate(each) for each in zip(empty, *samples, strict=True)))


_P95 = 0.95
_ROUNDING = 1e-9


class Sample(NamedTuple):
    """A row of metrics.

    Attributes:
        values: the values of the metrics, with NaN for missing values.
        seconds: the time that each value stands for, in seconds.
    """

    values: Row
    seconds: Row


def mean_of(samples: Iterable[Sample]) -> Sample:
    """Return the time-weighted mean of each column, and the time that it covers.

    The mean is NaN for columns without values.
    """
    values, seconds = _tables(samples)
    total = seconds.sum(axis=0)
    weighted = (np.where(seconds > 0, values, 0.0) * seconds).sum(axis=0)
    return Sample(np.where(total > 0, weighted / np.where(total > 0, total, 1.0), math.nan), total)


def p95_of(samples: Iterable[Sample]) -> Row:
    """Return the value that each column does not exceed for 95 % of the time.

    The result is NaN for columns without values.
    """
    values, seconds = _tables(samples)
    order = np.argsort(values, axis=0)  # NaN is sorted last
    until = np.cumsum(np.take_along_axis(seconds, order, axis=0), axis=0)
    place = (until < (_P95 - _ROUNDING) * until[-1]).sum(axis=0)
    found: Row = np.take_along_axis(values, np.take_along_axis(order, place[None], axis=0), axis=0)[0]
    return found


def _tables(samples: Iterable[Sample]) -> tuple[Row, Row]:
    values, seconds = (np.stack(each) for each in zip(*samples, strict=True))
    return values, np.where(np.isnan(values), 0.0, seconds)


class SampleWindow:
    """The most recent samples.

    Args:
        most: the maximum number of samples.
        seconds: the length of the window in seconds. Older samples are dropped.
    """

    def __init__(self, most: int, seconds: float = math.inf) -> None:
        self._seconds = seconds
        self._covered: deque[float] = deque(maxlen=most)
        self.samples: deque[Sample] = deque(maxlen=most)

    def add(self, sample: Sample, covers: float) -> None:
        """Add a sample.

        Args:
            sample: the sample.
            covers: seconds since the previous sample.
        """
        self.samples.append(sample)
        self._covered.append(covers)
        while sum(self._covered) - self._covered[0] >= self._seconds:
            self.samples.popleft()
            self._covered.popleft()

    def features(self, names: Iterable[str]) -> dict[str, float]:
        """Return the mean of each column under its name, and its 95th percentile under its name followed by `_p95`.

        Args:
            names: the names of the columns.
        """
        if not self.samples:
            return {}
        means, highs = mean_of(self.samples).values, p95_of(self.samples)
        found = dict(zip(names, map(float, means), strict=True))
        return found | {f"{name}_p95": float(high) for name, high in zip(found, highs, strict=True)}


class SampleHistory:
    """All samples with their times, in bounded memory.

    Whenever the number of points reaches `most`, adjacent points are replaced by their means.
    """

    def __init__(self, most: int = 400) -> None:
        self._most = most
        self._each = 1  # number of samples that are averaged in each point
        self._waiting: list[Sample] = []
        self._points: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Add a sample. The first column of a sample is its time."""
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
        """The points from oldest to newest."""
        return [point.values for point in self._points]


def sources_for(device: torch.device) -> Sequence[Source]:
    """Return all sources for `device` and the machine.

    These are the hardware counters of the GPU, and the values of its driver, of torch, and of Linux. A source that is
    not available raises an error when it is opened. The calling thread is assumed to be the computing thread.
    """
    uuid = uuid_of(device.index or 0) if device.type == "cuda" else None
    return [GpmSource(uuid), NvmlSource(uuid), CudaSource(device), *host_sources(threading.get_native_id())]


def free_metrics(device: torch.device) -> Sequence[str]:
    """Return the names of metrics with the free bytes of `device`, in order of preference.

    The memory of the machine is used only for a CPU.
    """
    return ("host.available_bytes",) if device.type == "cpu" else ("gpu.free_bytes", "gpu.torch_free_bytes")
