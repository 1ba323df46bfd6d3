"""What rank 0 says is heard, and who is stopped says nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipes.engine.watch.asking import Asking
from lightning_pipes.engine.watch.launcher import RankStoppedError
from lightning_pipes.tune.studies.announcements import Announcements


def test_who_hears_nothing_of_a_stopped_rank_0_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's store client waits for an answer of a stopped process without end."""
    answer = threading.Event()

    def check(keys: list[str]) -> bool:
        answer.wait()
        return True

    def look() -> Any:
        raise RankStoppedError("local rank 0 has been stopped")

    board = Announcements()
    line = SimpleNamespace(hosted=False, asking=Asking(), company=SimpleNamespace(check=look), seal=None)
    monkeypatch.setattr(board, "_line", line)
    monkeypatch.setattr(board, "_store", SimpleNamespace(check=check))
    with pytest.raises(RankStoppedError):
        board.hear("end")
    answer.set()
