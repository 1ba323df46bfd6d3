"""Heartbeats of ranks that share the process of a test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lightning_pipes.engine.watch import failure
from lightning_pipes.engine.watch.heartbeat import Heartbeat


@pytest.fixture
def own_heartbeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each failure watch of this process a heartbeat of its own, as in a process of its own.

    A process has one heartbeat. If several ranks shared it, the watch of a rank would stop the heartbeat of the rank
    before it, which a slow machine then reports as the exit of that rank.
    """
    hearts: list[Heartbeat] = []

    def start_heartbeat(store: Any, rank: int) -> Heartbeat:
        hearts.append(Heartbeat(store, rank))
        return hearts[-1]

    monkeypatch.setattr(failure, "get_heartbeat", start_heartbeat)
    yield
    for heart in hearts:
        heart.stop()
