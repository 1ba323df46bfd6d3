"""Several workers share the tests, file by file, as tests of one file share what they have set up; one that is marked
`alone` has the machine to itself meanwhile."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import cases

QUEUE_LOCK = Path(__file__)
MACHINE_LOCK = QUEUE_LOCK.with_name("__init__.py")
"""Files whose locks the workers share. Who wants the room for itself waits in the gate until it is empty, and those who
come later wait behind it: otherwise there would always be somebody in it."""

STARTUP = QUEUE_LOCK.parent / "startup"
"""What makes interpreters start sooner; see its sitecustomize.py. The demo does without, and so do users."""
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background commands without Ctrl-C

os.environ["LIGHTNING_PIPES_PROFILES"] = ""
"""Each test measures anew: no profiles of earlier ones are kept."""

LATE = ("torch.profiler", "torch.distributed.fsdp", "torch.distributed.tensor", "hydra", "optuna", "tests.compat.rows")
"""Modules that ranks would import by themselves, in up to half a second."""

MODELS = "transformers.models.llama.modeling_llama"
"""What all models of transformers need, a second and a half of each rank."""

LONG = ("trainer", "tune")
"""Rooms whose files take longest, so they come first."""

QUICK = ("ir", "cost", "sim")
"""Rooms whose tests come late: they are many and short, so all workers end at the same time."""

LONG_TAIL = MACHINE_LOCK.with_name("long_tail.txt")
"""Lists tests that are left to `make test-full`, as quicker ones look for the same mistakes: as pytest names them, or
without the brackets if all cases are."""


@contextmanager
def locked(path: Path, shared: bool = False) -> Iterator[None]:
    """A lock on a file while the context is open; it ends with its process, too."""
    from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock

    descriptor = os.open(path, os.O_RDONLY)
    try:
        flock(descriptor, LOCK_SH if shared else LOCK_EX)
        yield
    finally:
        flock(descriptor, LOCK_UN)  # also where a process that was forked meanwhile has it open
        os.close(descriptor)


@contextmanager
def compiling(path: Path) -> Iterator[None]:
    """A lock on a file: alone for the first process that asks, shared by those who wait for it."""
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock

    with open(path) as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            flock(file, LOCK_SH)
        yield


@pytest.fixture(autouse=True, scope="module")
def elsewhere() -> Iterator[None]:
    """A training in this process says in the environment where its ranks meet, which is nobody else's: the port may be
    another program's by then."""
    yield
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Let torch compute on one thread in each test, as the ranks do.

    Sums on two threads differ in their last bit, and threads that wait for each other on cores that several workers
    share take fifty times as long.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with ExitStack() as room:
        if "PYTEST_XDIST_WORKER" in os.environ:
            with locked(QUEUE_LOCK):
                room.enter_context(locked(MACHINE_LOCK, shared=item.get_closest_marker("alone") is None))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """One worker compiles a file of tests, which takes longer than all else that is collected; the others wait for it
    and load the result."""
    with ExitStack() as room:
        if "PYTEST_XDIST_WORKER" in os.environ and isinstance(collector, pytest.Module):
            room.enter_context(compiling(collector.path))
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is collected is no garbage: neither this process nor its forks look at it again. Ranks find loaded what the
    tests need."""
    cases.SELECTED[:] = session.items
    gc.collect()
    gc.freeze()
    if (ranks := sys.modules.get("lightning_pipes.testing.ranks")) is not None:
        models = [MODELS] if "transformers" in sys.modules else []
        ranks.PRELOAD += [*(name for name in LATE if name in sys.modules), *models, "tests.warm"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the long tail are slow. Files with tests that run alone come last: the other workers have nothing to
    finish before, and do not start."""
    tail = {*LONG_TAIL.read_text().splitlines()}
    for item in items:
        if item.nodeid in tail or item.nodeid.partition("[")[0] in tail:
            item.add_marker(pytest.mark.slow)
    alone = {item.path for item in items if item.get_closest_marker("alone") is not None}

    def turn(item: pytest.Item) -> int:
        room = item.path.relative_to(MACHINE_LOCK.parent).parts[0]
        return 3 if item.path in alone else 0 if room in LONG else 2 if room in QUICK else 1

    items.sort(key=turn)
