"""Faults in interpreters of their own, which end as a user's do: what they have open, and what waits, counts there."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

SOON = 60.0
"""Seconds: ten would do on a machine that is not busy; nobody who hangs comes back in sixty."""
CASES = {
    "a rank is stopped: who survives raises, and ends": {"victim": 1, "act": "stop", "phase": "training", "point": "F"},
    "who has started the others is killed": {"victim": 0, "act": "kill", "phase": "connecting", "point": "new_group"},
    "nobody waits for who never comes": {"victim": 1, "act": "kill", "phase": "launch", "point": "process_group"},
}


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    found = importlib.import_module("faults")
    monkeypatch.setattr(found, "SHM", tmp_path)  # others of this machine are at work in /dev/shm
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_end_and_go_on(name, faults):
    case = faults.Case(number=0, kind="fit", form="full", launcher="lightning", ranks=2, **CASES[name])
    result = faults.try_one(case, SOON, faults.undisturbed("fit", 2))
    assert result.happened
    assert not result.wrong, result.log
    assert result.bit_equal, result.log
