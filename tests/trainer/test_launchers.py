"""Tests of the port of a run that Lightning launches."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_pipes.engine.watch.shared_store import LOOPBACK
from lightning_pipes.trainer import launchers


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_port_is_held_where_nobody_else_is_to_reach_it(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher holds its port open for a run on one node, and leaves it free for a run on several nodes."""
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", launchers.LAUNCHER_VARIABLE):
        monkeypatch.setenv(name, "")  # makes monkeypatch restore the variable at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr("lightning_pipes.engine.watch.shared_store._held", None)
    monkeypatch.setattr(launchers.private, "call_children_scripts", lambda *_: None)
    monkeypatch.setattr(launchers.private, "set_num_threads_if_needed", lambda num_processes: None)
    monkeypatch.setattr(launchers, "watch_launched", lambda first, processes: None)
    environment = LightningEnvironment()

    def taken() -> bool:
        with socket.socket() as other:
            try:
                other.bind((LOOPBACK, environment.main_port))
            except OSError:
                return True
            return False

    launcher = launchers.Launcher(environment, 2, nodes)
    launcher.procs = SimpleNamespace()
    assert launcher.launch(taken) == (nodes == 1)
