"""A bar for those who wait at a terminal, and nothing for anybody else."""

from __future__ import annotations

import io
import sys
import time

import pytest

from lightning_pipes.planning.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_after_a_second(stream, shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream())
    with progress_bar("plan") as told:
        told("gpipe", 0.1)
        before = sys.stderr.getvalue()
        time.sleep(1.05)
        told("kfkb", 0.6)
        told("kfkb", 0.5)  # never back
        after = sys.stderr.getvalue()
    assert before == ""
    assert ("plan: kfkb  60%" in after) is shown
