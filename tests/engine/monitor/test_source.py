"""Metrics that Linux reports about the machine, read from files that a test supplies and from the real machine."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lightning_pipes.engine.monitor import source as host
from lightning_pipes.engine.monitor.source import Rates, SourceError


class Files:
    """Emulated files of the system and a clock, which a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: dict[str, str] = {}
        self.now = 0.0
        monkeypatch.setattr(host, "_text", self.read)
        monkeypatch.setattr(os, "listdir", lambda path: ["7", "8", str(threading.get_native_id())])
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {{7: 1}[thread]})
        real = Rates.per_second
        monkeypatch.setattr(Rates, "per_second", lambda self_, counters, now=None: real(self_, counters, self.now))

    def read(self, path: str | Path) -> str:
        if str(path) not in self.texts:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return self.texts[str(path)]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    return Files(monkeypatch)


def named(source: host.Source) -> dict[str, float]:
    """Read a source and return its values by name."""
    return dict(zip(source.metrics, map(float, source.read()), strict=True))


def test_who_waits_for_cores(files):
    """Running and waiting shares of threads are computed from `schedstat`, without the sampling thread itself."""
    task = "/proc/self/task/{}/schedstat".format
    files.texts = {
        task(7): "1000000000 0 5",
        task(8): "0 0 1",
        task(threading.get_native_id()): "5000000000 0 9",  # the sampling thread is not part of the training load
    }
    source = host.SchedulerSource(7)
    source.open()
    assert math.isnan(named(source)["host.compute_run_share"])
    files.now = 2.0
    files.texts |= {task(7): "1500000000 1000000000 45", task(8): "200000000 400000000 3"}
    files.texts[task(threading.get_native_id())] = "6900000000 800000000 99"
    found = named(source)
    assert (found["host.compute_run_share"], found["host.compute_wait_share"]) == (0.25, 0.5)
    assert found["host.compute_slices_per_s"] == 20
    assert found["host.threads_run_cores"] == pytest.approx(0.35)
    assert found["host.threads_wait_cores"] == pytest.approx(0.7)
    files.now = 3.0
    del files.texts[task(7)]
    found = named(source)
    assert math.isnan(found["host.compute_run_share"])
    assert found["host.threads_run_cores"] == 0


def test_how_busy_the_cores_are_that_we_may_use(files):
    """Shares of the cores that this process may use are computed from `/proc/stat`."""
    files.texts["/proc/stat"] = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\nintr 5\n"
    source = host.MachineSource(7)
    source.open()
    source.read()
    files.now = 1.0
    ticks = int(1 / host._TICK_SECONDS)
    ours = " ".join(str(share * ticks) for share in (0.2, 0.1, 0.3, 0.1, 0, 0.05, 0.15, 0.1))
    files.texts["/proc/stat"] = (
        f"cpu  1 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 {ticks} 0 0 0 0 0 0\ncpu1 {ours} 0 0\nprocs_running 4\n"
    )
    found = named(source)
    assert found["host.cores_busy_share"] == pytest.approx(0.9)
    assert found["host.cores_system_share"] == pytest.approx(0.3)
    assert found["host.cores_interrupt_share"] == pytest.approx(0.2)
    assert found["host.cores_stolen_share"] == pytest.approx(0.1)
    assert found["host.machine_busy_share"] == pytest.approx(0.45)
    assert found["host.runnable_count"] == 4


def test_pressure(files):
    """Pressure shares are computed from the totals of the files."""
    for what, total in (("cpu", 0), ("memory", 0), ("io", 0)):
        files.texts[f"/proc/pressure/{what}"] = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={total}\nfull total=9\n"
    source = host.PressureSource()
    source.open()
    source.read()
    files.now = 2.0
    files.texts["/proc/pressure/cpu"] = "some avg10=0.00 avg60=0.00 avg300=0.00 total=500000\nfull total=9\n"
    assert list(source.read()) == [0.25, 0, 0]


@pytest.mark.parametrize(
    ("groups", "file", "texts"),
    [
        ("0::/pod/x\n", "/sys/fs/cgroup/pod/x/cpu.stat", ["usage_usec 5\nthrottled_usec {}"]),
        ("3:cpu,cpuacct:/x\n", "/sys/fs/cgroup/cpu,cpuacct/x/cpu.stat", ["nr_throttled 1\nthrottled_time {}000"]),
        ("1:cpu:/\n0::/\n", "/sys/fs/cgroup/cpu/cpu.stat", ["throttled_time {}000"]),
    ],
)
def test_a_group_that_is_held_back(files, groups, file, texts):
    """The throttled share of a control group is read for versions 1 and 2, and is NaN if the file disappears."""
    files.texts |= {"/proc/self/cgroup": groups, file: texts[0].format(0)}
    source = host.ThrottleSource()
    source.open()
    source.read()
    files.now = 2.0
    files.texts[file] = texts[0].format(500_000)
    assert list(source.read()) == [0.25]
    del files.texts[file]
    files.now = 3.0
    assert math.isnan(next(iter(source.read())))


def test_files_that_are_not_there(files):
    for source in (host.SchedulerSource(7), host.MachineSource(7), host.PressureSource(), host.ThrottleSource()):
        with pytest.raises(SourceError, match=r"No such file|no control group"):
            source.open()


def test_running_is_what_the_thread_itself_counts():
    """On the real machine, the running share agrees with the CPU time that the thread measures itself."""
    source = host.SchedulerSource(threading.get_native_id())
    try:
        source.open()
    except SourceError as error:
        pytest.skip(f"this system does not count it: {error}")
    # the source is always read from another thread
    readings: list[float] = []

    def read() -> None:
        readings[:] = map(float, source.read())

    def sample() -> None:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()

    def now() -> np.ndarray:
        return np.array([time.monotonic(), time.thread_time()])

    before = now()
    sample()
    began = now()
    while time.monotonic() < began[0] + 0.4:
        sum(range(10_000))
    time.sleep(0.2)
    ended = now()
    sample()
    found = dict(zip(source.metrics, readings, strict=True))
    (least, ran), (most, used) = ended - began, now() - before  # bounds of the time between the samples
    assert ran / most - 0.05 < found["host.compute_run_share"] < used / least + 0.05
    assert 0 <= found["host.compute_wait_share"] <= 1 - found["host.compute_run_share"] + 0.1
    assert found["host.threads_run_cores"] >= found["host.compute_run_share"] - 0.05
