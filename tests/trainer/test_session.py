"""Tests of the port of a run that Lightning launches, and of the message about untested versions."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_pipes.engine.watch.shared_store import LOOPBACK
from lightning_pipes.ir import PlanError
from lightning_pipes.trainer import session
from lightning_pipes.trainer.session import NEWEST_TESTED_TORCH, Launcher, warn_if_untested

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_port_is_held_where_nobody_else_is_to_reach_it(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher holds its port open for a run on one node, and leaves it free for a run on several nodes."""
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", session.LAUNCHER_VARIABLE):
        monkeypatch.setenv(name, "")  # makes monkeypatch restore the variable at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr("lightning_pipes.engine.watch.shared_store._held", None)
    monkeypatch.setattr(session.private, "call_children_scripts", lambda *_: None)
    monkeypatch.setattr(session.private, "set_num_threads_if_needed", lambda num_processes: None)
    monkeypatch.setattr(session, "watch_launched", lambda first, processes: None)
    environment = LightningEnvironment()

    def taken() -> bool:
        with socket.socket() as other:
            try:
                other.bind((LOOPBACK, environment.main_port))
            except OSError:
                return True
            return False

    launcher = Launcher(environment, 2, nodes)
    launcher.procs = SimpleNamespace()
    assert launcher.launch(taken) == (nodes == 1)


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
