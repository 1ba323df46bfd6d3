"""The monitor, mostly with sources whose values a test supplies."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch

from lightning_pipes.engine.monitor.monitor import (
    MAX_SAMPLING_SHARE,
    Monitor,
    Sample,
    SampleHistory,
    SampleWindow,
    free_metrics,
    sources_for,
)
from lightning_pipes.engine.monitor.source import Rates, Source, SourceError
from lightning_pipes.ir import InputError
from lightning_pipes.testing.ranks import scale_timeout
from tests.virtual_clock import VirtualClock

NAN = math.nan


class Fake(Source):
    """A source that returns the given rows in turn. A row that is an exception is raised instead."""

    name: ClassVar[str] = "fake"

    def __init__(self, rows: Sequence[Sequence[float] | Exception], names: Sequence[str] = ("gpu.busy_share",)) -> None:
        super().__init__()
        self.metrics = tuple(names)
        self._rows: Iterator[Sequence[float] | Exception] = iter(rows)
        self.closed = False

    def open(self) -> None:
        pass

    def read(self) -> Sequence[float]:
        row = next(self._rows)
        if isinstance(row, Exception):
            raise row
        return row

    def close(self) -> None:
        self.closed = True


class Absent(Fake):
    """A source that does not exist on this machine."""

    name: ClassVar[str] = "absent"

    def open(self) -> None:
        raise SourceError("there is none")


class Broken(Fake):
    """A source that fails with an unexpected error when it is opened."""

    name: ClassVar[str] = "broken"

    def open(self) -> None:
        raise RuntimeError("it can't even say why")


@pytest.fixture
def clock(monkeypatch):
    clock = VirtualClock()
    clock.patch(monkeypatch)
    return clock


def ticked(*sources: Source, ticks: int, clock: VirtualClock | None = None, apart: float = 0.25, **settings) -> Monitor:
    """Return a monitor that has taken `ticks` samples, `apart` virtual seconds apart."""
    monitor = Monitor(sources, memory=free_metrics(torch.device("cpu")), **settings)
    monitor.open()
    for _ in range(ticks):
        if clock is not None:
            clock.sleep(apart)
        monitor.take_sample()
    monitor.close()
    return monitor


class Counter(Fake):
    """A source that returns the increase of a counter per second at each read, as the sources of Linux do."""

    def __init__(self, totals: Sequence[float]) -> None:
        super().__init__([], ["host.compute_wait_share"])
        self._totals, self._rates = iter(totals), Rates()

    def read(self) -> Sequence[float]:
        return self._rates.per_second([next(self._totals)])


def test_means_are_those_of_time_however_far_apart_samples_are(clock):
    """Means are weighted by time, also if the intervals between samples differ."""
    monitor = Monitor([Counter([0.0, 0.5, 0.9, 0.9])], window=20)
    monitor.open()
    for pause in (0.25, 10.0, 0.5, 0.25):  # the wait is 0.5 s of 10 s, 0.4 s of 0.5 s, and 0 s of 0.25 s
        clock.sleep(pause)
        monitor.take_sample()
    assert monitor.features()["host.compute_wait_share"] == pytest.approx(0.9 / 10.75)
    assert monitor.features()["host.compute_wait_share_p95"] == 0.05
    assert monitor.since_last()[0]["host.compute_wait_share"] == pytest.approx(0.9 / 10.75)


def test_a_rate_after_failed_samples_counts_for_all_its_time(clock):
    """After failed reads, the next rate is weighted with the whole time since the last successful read."""

    class Failing(Counter):
        def read(self) -> Sequence[float]:
            if 1 < clock.read_seconds() < 9:
                raise OSError("not now")
            return super().read()

    monitor = Monitor([Failing([0.0, 0.5, 8.0])], window=20)
    monitor.open()
    for pause in (0.5, 0.5, 4.0, 5.0):
        clock.sleep(pause)
        monitor.take_sample()
    assert monitor.features()["host.compute_wait_share"] == pytest.approx(8.0 / 9.5)


def test_a_window_is_of_seconds_where_samples_are_rare(clock):
    """If samples are rare, the window still has its length in seconds and contains fewer samples."""
    found = ticked(Fake([[float(n)] for n in range(20)]), ticks=20, clock=clock, apart=2.0, hertz=4, window=5)
    assert found.features()["gpu.busy_share"] == 18.0  # the mean of three samples, which cover six seconds


def test_means_and_percentiles_of_the_last_window(clock):
    rows = [[float(n)] for n in range(100)]
    found = ticked(Fake(rows), ticks=100, clock=clock, hertz=4, window=10).features()
    assert found == {"gpu.busy_share": np.mean(range(60, 100)), "gpu.busy_share_p95": 97.0}


def test_what_is_missing_is_no_number_and_counts_for_nothing(clock):
    """Missing values are left out of means and percentiles, which are NaN if all values are missing."""
    fake = Fake([[NAN, NAN], [1.0, NAN], [3.0, NAN]], ["gpu.busy_share", "gpu.power_watts"])
    found = ticked(fake, ticks=3, clock=clock).features()
    assert (found["gpu.busy_share"], found["gpu.busy_share_p95"]) == (2.0, 3.0)
    assert math.isnan(found["gpu.power_watts"])
    assert math.isnan(found["gpu.power_watts_p95"])


def test_the_log_says_once_by_what(caplog):
    """The log names the sources once, with the reason for each source that cannot be opened."""
    caplog.set_level(logging.INFO)
    monitor = ticked(Absent([]), Broken([]), Fake([[0.5]] * 3), ticks=3, label="rank 7")
    assert [r.message for r in caplog.records] == [
        "rank 7 is monitored by fake; not by absent (there is none), broken (RuntimeError: it can't even say why)"
    ]
    assert monitor.features()["gpu.busy_share"] == 0.5


def test_a_source_that_disappears_and_comes_back(caplog, clock):
    """Values are missing while a source fails, and the failure is logged once."""
    gone = OSError("gone")
    other = Fake([[float(n)] for n in range(5)], ["host.runnable_count"])
    fake = Fake([[1.0], gone, gone, [2.0], [2.0, 2.0]])
    monitor = ticked(fake, other, ticks=5, clock=clock)
    curves = monitor.to_curves()
    assert curves.values["gpu.busy_share"] == (1.0, None, None, 2.0, None)  # the last row had another shape
    assert curves.values["host.runnable_count"] == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert monitor.features()["gpu.busy_share"] == 1.75  # the first value counts for 0.25 s, the second for 0.75 s
    assert [r.message for r in caplog.records] == [
        "this rank: fake can't be read (OSError: gone). Training continues, and its metrics are missing until it can "
        "be read again"
    ]


def test_a_metric_that_is_lost_is_said_once(caplog):
    caplog.set_level(logging.INFO)
    fake = Fake([[NAN]] * 3)
    fake.lost = ["power: not supported"]
    ticked(fake, ticks=3)
    assert sum("fake has no power: not supported" in r.message for r in caplog.records) == 1


def test_free_bytes_of_the_best_source():
    host = ["host.available_bytes"]
    both = Fake([[7.0, 5.0], [NAN, 6.0]], ["gpu.free_bytes", *host])
    monitor = Monitor([both], memory=("gpu.free_bytes", "host.available_bytes"))
    assert monitor.free_bytes() is None
    monitor.open()
    monitor.take_sample()
    assert monitor.free_bytes() == 7
    monitor.take_sample()
    assert monitor.free_bytes() == 6
    assert ticked(Fake([[1.0]]), ticks=1).free_bytes() is None


def test_a_gpu_without_numbers_of_its_memory_does_not_have_that_of_the_machine():
    fake = Fake([[7.0]], ["host.available_bytes"])
    monitor = Monitor([fake], memory=free_metrics(torch.device("cuda", 0)))
    monitor.open()
    monitor.take_sample()
    assert monitor.free_bytes() is None
    assert ticked(Fake([[7.0]], ["host.available_bytes"]), ticks=1).free_bytes() == 7


def test_numbers_that_it_is_told():
    """Values recorded by the caller appear in the curves under known names, but not in the features."""
    monitor = Monitor([Fake([[0.0]] * 3)], extra=["pipeline.forward_seconds"])
    monitor.open()
    monitor.take_sample()
    monitor.record_values({"pipeline.forward_seconds": 0.25, "unknown": 1.0})
    monitor.take_sample()
    assert monitor.to_curves().values["pipeline.forward_seconds"] == (None, 0.25)
    assert "pipeline.forward_seconds" not in monitor.features()


def test_nothing_to_read_is_not_an_error():
    monitor = ticked(Absent([]), ticks=2)
    assert (monitor.features(), monitor.free_bytes()) == ({}, None)
    assert len(monitor.to_curves().times) == 2


def test_before_anything_was_seen():
    """A monitor without samples has no features, free bytes or curves."""
    monitor = Monitor([Fake([])])
    assert (monitor.features(), monitor.free_bytes(), monitor.to_curves().times) == ({}, None, ())
    monitor.stop()  # never started


@pytest.mark.parametrize("settings", [{"hertz": 0}, {"hertz": 11}, {"hertz": NAN}, {"window": 0.4}, {"hertz": "4"}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(InputError):
        Monitor([], **settings)


class Costly(Fake):
    """A source whose read takes 0.05 s of CPU time."""

    def __init__(self) -> None:
        super().__init__([])
        self.reads: list[float] = []
        self.read_once = threading.Event()

    def read(self) -> Sequence[float]:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        self.reads.append(time.monotonic())
        self.read_once.set()
        return [1.0]


def test_the_thread_takes_no_more_than_its_share():
    """The sampling thread waits longer than its interval if reading would exceed its share of CPU time."""
    costly = Costly()
    monitor = Monitor([costly], hertz=10)
    monitor.start()
    assert costly.read_once.wait(scale_timeout(10))
    time.sleep(0.5)  # five more samples would be due at 10 Hz
    monitor.stop()
    assert len(costly.reads) == 1, f"the next is due after {0.05 / MAX_SAMPLING_SHARE:.0f} s"
    assert costly.closed
    assert monitor.features() == {"gpu.busy_share": 1.0, "gpu.busy_share_p95": 1.0}


def test_this_machine_has_something_to_say():
    """The sources of this machine report CPU time and free memory."""
    cpu = torch.device("cpu")
    monitor = Monitor(sources_for(cpu), hertz=10, window=1, memory=free_metrics(cpu))
    monitor.start()
    deadline = time.monotonic() + scale_timeout(20)
    while time.monotonic() < deadline and not monitor.features().get("host.compute_run_share", 0) > 0:
        sum(range(100_000))
    monitor.stop()
    assert monitor.features()["host.compute_run_share"] > 0
    assert (monitor.free_bytes() or 0) > 0
    assert "gpu.sm_active_share" not in monitor.features()


def test_features_do_not_hold_up_sampling_for_long():
    """The history of 2400 samples is reduced to 200 to 400 points, which are means of consecutive samples."""
    history, window = SampleHistory(), SampleWindow(40)
    for n in range(2400):
        sample = Sample(np.array([float(n), 2.0 * n]), np.ones(2))
        history.add(sample)
        window.add(sample, 1.0)
    assert 200 <= len(history.points) <= 400
    assert history.points[0].tolist() == [3.5, 7.0]  # the mean of eight samples
    assert all(a[0] < b[0] for a, b in zip(history.points, history.points[1:], strict=False))


def test_rates():
    rates = Rates()
    assert np.isnan(rates.per_second([1.0, 10.0], now=5.0)).all()
    assert rates.per_second([2.0, 30.0], now=7.0).tolist() == [0.5, 10.0]
    wrapped = rates.per_second([3.0, 0.0], now=8.0)
    assert (wrapped[0], math.isnan(wrapped[1])) == (1.0, True)
    assert np.isnan(rates.per_second([3.0, 0.0], now=8.0)).all()  # no time has passed
