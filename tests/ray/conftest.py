"""A local Ray cluster, which the tests of this folder share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lightning_pipes.testing.ranks import wait_until

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "PYTHONPATH": str(ROOT),  # the processes of Ray import the package and the functions of the tests
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # other tests may fill the memory of the machine
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """Start a cluster with four CPUs on this machine. Stop it after the tests, and check that no process is left.

    Yields:
        A folder for results, which is removed afterwards.
    """
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install lightning-pipes[ray]")
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short, because Ray puts sockets into it
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    try:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            _temp_dir=str(folder / "ray"),
            log_to_driver=False,
        )
        started = psutil.Process().children(recursive=True)
        yield folder
        started += psutil.Process().children(recursive=True)
        ray.shutdown()
        wait_until(lambda: not any(process.is_running() and not is_zombie(process) for process in started), 60)
    finally:
        ray.shutdown()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
