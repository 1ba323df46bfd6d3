"""Calls that may never return are given up when whoever waits for them says so."""

from __future__ import annotations

import threading

import pytest

from lightning_pipes.engine.watch.serial_caller import SerialCaller


def test_it_is_as_if_the_call_was_made_here():
    asking = SerialCaller()
    assert [asking(lambda n=n: n * n, lambda: None) for n in range(4)] == [0, 1, 4, 9]
    with pytest.raises(TimeoutError, match="own"):
        asking(lambda: (_ for _ in ()).throw(TimeoutError("own")), lambda: None)
    assert asking(lambda: 5, lambda: None) == 5


def test_who_waits_can_leave():
    asking, never, looked = SerialCaller(), threading.Event(), []

    def meanwhile() -> None:
        looked.append(1)
        if len(looked) == 3:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        asking(never.wait, meanwhile)
    assert len(looked) == 3
    never.set()
