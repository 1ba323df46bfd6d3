"""What measures, predicts or is limited by time reads the clock of the package, which tests replace."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.packaging.test_layers import LAYERS, ROOT, files

READS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
WAITS = {
    "trainer/fork_launcher.py",
    "arrays/array.py",  # for news of other ranks
    "arrays/siblings/sibling.py",
    "engine/messages/bulk_transfer.py",  # for chunks, and for ends that close
    "engine/messages/links.py",  # between two scans for connections
    "engine/messages/local.py",
    "engine/watch",
    "ir/clock.py",
    "trainer/checkpoint/sharded.py",
    "trainer/private_lightning.py",  # compares with times that Lightning has read
    "trainer/ranks/control.py",
    "tune/studies/leader_store.py",
    "tune/studies/study.py",  # for the reason of a leader that has ended
}
"""Files and rooms that wait for another process, a connection or a thread: in real time."""


def reads_time(path: Path) -> bool:
    """Return whether a file reads the module `time`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module="time"):
                return True
            case ast.Attribute(value=ast.Name(id="time"), attr=attribute) if attribute in READS:
                return True
    return False


def test_the_clock_is_read_in_one_place() -> None:
    found = set()
    for part in (*LAYERS, "strategies", "hydra_plugins"):
        root = ROOT / "lightning_pipes" if part in LAYERS else ROOT
        found |= {path.relative_to(root).as_posix() for path in files(part) if reads_time(path)}
    rooms = {path if path in WAITS else path.rpartition("/")[0] for path in found}
    assert rooms == WAITS, "use lightning_pipes.ir.clock; or list what waits for another process"
