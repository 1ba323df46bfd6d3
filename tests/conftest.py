"""Configuration of the whole test suite.

Several pytest-xdist workers share the tests file by file because the tests of one file share what they have set up. A
test marked `alone` has the machine to itself while it runs.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import cases

QUEUE_LOCK = Path(__file__)
MACHINE_LOCK = QUEUE_LOCK.with_name("__init__.py")
"""Files that the workers lock in turn.

Before each test, a worker acquires the queue lock, then the machine lock, and releases the queue lock. It holds the
machine lock while it runs the test: exclusively for a test marked `alone`, and shared with other workers for all other
tests. Workers that arrive later wait behind a worker that needs the machine alone. Without the queue, the shared lock
would never become free.
"""

STARTUP = QUEUE_LOCK.parent / "startup"
"""A folder whose `sitecustomize.py` makes interpreters start faster. The demo and users run without it."""
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background commands without Ctrl-C

os.environ["LIGHTNING_PIPES_PROFILES"] = ""
"""Tests must not reuse profiles that earlier tests measured, so the profile cache is turned off."""

LATE = ("torch.profiler", "torch.distributed.fsdp", "torch.distributed.tensor", "hydra", "optuna", "tests.compat.rows")
"""Modules that each rank would otherwise import when it needs them, which takes up to half a second."""

MODELS = "transformers.models.llama.modeling_llama"
"""The module that all models of transformers import, which takes each rank a second and a half."""

LONG = ("trainer", "tune")
"""Folders whose test files take longest and therefore run first."""

QUICK = ("ir", "cost", "sim")
"""Folders whose many short tests run late, so that all workers finish at about the same time."""

LONG_TAIL = MACHINE_LOCK.with_name("long_tail.txt")
"""A list of tests that only `make test-full` runs because faster tests detect the same mistakes.

Each line is the identifier of a test in pytest, or the identifier without the brackets to select all cases of a test.
"""


@contextmanager
def locked(path: Path, shared: bool = False) -> Iterator[None]:
    """Hold a lock on a file while the context is open; the operating system also releases it when the process ends."""
    from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock

    descriptor = os.open(path, os.O_RDONLY)
    try:
        flock(descriptor, LOCK_SH if shared else LOCK_EX)
        yield
    finally:
        flock(descriptor, LOCK_UN)  # closing is not enough if a process forked in the meantime still has the file open
        os.close(descriptor)


@contextmanager
def compiling(path: Path) -> Iterator[None]:
    """Hold a lock on a file: exclusively in the first process, and shared in the processes that had to wait for it."""
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock

    with open(path) as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            flock(file, LOCK_SH)
        yield


@pytest.fixture(autouse=True, scope="module")
def elsewhere() -> Iterator[None]:
    """Remove the rendezvous address and the seed from the environment after each test file.

    A training in this process leaves the address and port of its ranks in the environment, and another program may use
    the port by the time the next test runs. With the seed of `seed_everything`, samplers of later tests would shuffle
    in another order.
    """
    yield
    for name in ("MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def reproducible() -> None:
    """Seed all random numbers before each test, and limit torch to one thread as on the ranks.

    torch draws another seed in each process, so a test without a seed would rarely fail. Sums on two threads differ in
    their last bit, and threads that wait for each other on cores that several workers share take fifty times as long.
    """
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test while this worker holds the machine lock."""
    with ExitStack() as room:
        if "PYTEST_XDIST_WORKER" in os.environ:
            with locked(QUEUE_LOCK):
                room.enter_context(locked(MACHINE_LOCK, shared=item.get_closest_marker("alone") is None))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Let one worker compile a test file while the others wait and then load the compiled file.

    Compiling takes longer than the rest of the collection.
    """
    with ExitStack() as room:
        if "PYTEST_XDIST_WORKER" in os.environ and isinstance(collector, pytest.Module):
            room.enter_context(compiling(collector.path))
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze collected objects for the garbage collector, and list modules to import before ranks are forked."""
    cases.SELECTED[:] = session.items
    gc.collect()
    gc.freeze()
    if (ranks := sys.modules.get("lightning_pipes.testing.ranks")) is not None:
        models = [MODELS] if "transformers" in sys.modules else []
        ranks.PRELOADED_MODULES += [*(name for name in LATE if name in sys.modules), *models, "tests.warm"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the long tail as slow, and sort the test files by their duration.

    Files with tests that run alone come last because the other workers then have no tests left to finish first, and
    start no new ones.
    """
    tail = {*LONG_TAIL.read_text().splitlines()}
    for item in items:
        if item.nodeid in tail or item.nodeid.partition("[")[0] in tail:
            item.add_marker(pytest.mark.slow)
    alone = {item.path for item in items if item.get_closest_marker("alone") is not None}

    def turn(item: pytest.Item) -> int:
        room = item.path.relative_to(MACHINE_LOCK.parent).parts[0]
        return 3 if item.path in alone else 0 if room in LONG else 2 if room in QUICK else 1

    items.sort(key=turn)
