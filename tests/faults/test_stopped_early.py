"""Processes in separate interpreters that are stopped before the ranks have connected. No rank waits without end."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from benchmarks import faults

SOON = 60.0
"""The limit in seconds on a busy machine. In these runs, `heartbeat_timeout` is 5 s and `timeout` is 180 s."""
CASES = {
    "a rank of torchrun's": {"launcher": "torchrun", "victim": 1, "point": "rendezvous"},
    "rank 0 of torchrun's": {"launcher": "torchrun", "victim": 0, "point": "rendezvous"},
    "who has launched the other": {"launcher": "lightning", "victim": 0, "point": "process_group"},
    "a rank of a study": {"launcher": "lightning", "victim": 1, "point": "process_group", "kind": "study"},
    "rank 0 of a study": {"launcher": "lightning", "victim": 0, "point": "process_group", "kind": "study"},
}
QUICK = "rank 0 of torchrun's"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in CASES]
)
def test_rank_that_is_stopped_before_ranks_are_connected(name: str, tmp_path: Path) -> None:
    """The run ends in less than half of `timeout`, with an error that names the stopped rank and its process.

    A rank that is stopped in `process_group` is named by its heartbeat instead, if the other rank has also arrived
    there.
    """
    usual = {"number": 0, "kind": "fit", "form": "full", "ranks": 2, "act": "stop", "phase": "launch"}
    case = faults.Case(**{**usual, **CASES[name]})
    run = faults.Run(case, tmp_path, SOON)
    with run.started():
        at = run.strike()
        assert at is not None, run.log()
        wrong, _ = run.watch(at)
        took = time.monotonic() - at
        assert not wrong, run.log()
        assert not run.check(), run.log()
        assert not faults.find_processes(run.token)
    assert took < run.timeout / 2, "not by heartbeat_timeout"
    errors = [f"rank {case.victim}, process \\d+, has been stopped for \\d+ s"]
    if case.point == "process_group":
        errors += [f"rank {case.victim}.* has not answered rank", f"rank {case.victim} was declared dead by rank"]
    assert re.search("|".join(errors), run.log())
