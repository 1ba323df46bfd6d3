"""Faults at named places in interpreters of their own: all end, say who it was, leave nothing, and go on as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults as benchmark

SOON = 60.0
"""Seconds: ten would do on a machine that is not busy; nobody who hangs comes back in sixty."""
CASES = {
    "while connections are made": {"kind": "fit", "form": "full", "phase": "connecting", "point": "new_group"},
    "when a sibling hands over": {"kind": "array", "form": "sharded", "phase": "hand-over", "point": "sibling.pause"},
}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(benchmark, "SHM", tmp_path)  # others of this machine are at work in /dev/shm
    return benchmark


@pytest.mark.slow  # test_connecting.py and test_kills.py have the like on ranks
@pytest.mark.parametrize("name", CASES)
def test_all_end_and_go_on(name, faults):
    case = faults.Case(number=0, launcher="lightning", ranks=2, victim=1, act="kill", nth=2, **CASES[name])
    result = faults.try_one(case, SOON, faults.undisturbed(case.kind, 2))
    assert result.happened
    assert not result.wrong, result.log
    assert result.bit_equal, result.log
