"""Tests of the message about untested versions, and of the size of a process group."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_pipes.ir import PlanError
from lightning_pipes.trainer import session
from lightning_pipes.trainer.session import NEWEST_TESTED_TORCH, warn_if_untested

ROOT = Path(__file__).parents[2]


def test_pages_name_the_versions_that_tests_run_on():
    """The table of versions and the README list the pinned and the newest tested versions.

    `NEWEST_TESTED_TORCH` is the newest version of torch in the table.
    """
    pins = dict(re.findall(r"^([a-z-]+)==([0-9.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = re.findall(r"^\| (\S+) \| ([0-9.]+) \| ([0-9.]+) \|", (ROOT / "docs/versions.md").read_text(), re.MULTILINE)
    table = {name: (pinned, newest) for name, pinned, newest in rows}
    readme = (ROOT / "README.md").read_text()
    for name in ("torch", "lightning", "hydra-core", "optuna"):
        assert table[name][0] == pins[name]
        assert all(version in readme for version in table[name])
    assert tuple(map(int, table["torch"][1].split(".")[:2])) == NEWEST_TESTED_TORCH


def test_newer_ones_are_told_once(caplog):
    """Only versions newer than the tested ones cause a message, once per version."""
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        for version in ("2.14.0+cpu", "2.12.1", "2.15.0a0", "2.15.0a0", "3.0.0"):
            warn_if_untested(version)
    said = [r.getMessage() for r in caplog.records if "lightning_pipes" in r.getMessage()]
    assert [re.search(r"this is (\S+);", text)[1] for text in said] == ["2.15.0a0", "3.0.0"]


def test_a_process_group_that_is_larger_than_the_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the error for workers of Ray Train whose Trainer has the default number of processes."""
    monkeypatch.setattr(session.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(session, "process_rank", lambda: 1)
    monkeypatch.setattr(session, "whole_group", lambda: SimpleNamespace(size=lambda: 2))
    with pytest.raises(PlanError, match=r"rank 1 of a process group of 2, but the Trainer has only 1.*RayPipeline"):
        session.SessionStart(None, SimpleNamespace(rank=0, size=1), None, None, 1, None)
