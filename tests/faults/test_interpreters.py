"""Faults at named points in separate interpreters.

All processes end, name the victim and leave nothing behind, and the resumed run gives the same result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import faults as benchmark

SOON = 60.0
"""Seconds. Ten are enough on a machine that is not busy, and a process that hangs does not end within sixty."""
CASES = {
    "while connections are made": {"kind": "fit", "form": "full", "phase": "connecting", "point": "new_group"},
    "when a sibling hands over": {"kind": "array", "form": "sharded", "phase": "hand-over", "point": "sibling.pause"},
}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(benchmark, "SHM", tmp_path)  # other programs on this machine use /dev/shm
    return benchmark


@pytest.mark.slow  # test_connecting.py and test_kills.py have similar tests without separate interpreters
@pytest.mark.parametrize("name", CASES)
def test_all_end_and_continue(name, faults):
    case = faults.Case(number=0, launcher="lightning", ranks=2, victim=1, act="kill", nth=2, **CASES[name])
    result = faults.try_one(case, SOON, faults.undisturbed(case.kind, 2))
    assert result.happened
    assert not result.wrong, result.log
    assert result.bit_equal, result.log
