"""Waiting for messages in a mailbox, which other events can interrupt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from lightning_pipes.engine.messages.local import LocalMailbox
from lightning_pipes.engine.messages.mailbox import Mailbox
from lightning_pipes.engine.messages.message import Message
from lightning_pipes.ir import Instruction, Kind
from tests.engine.pipes import RECEIVE


@pytest.mark.parametrize("make", [Mailbox, LocalMailbox])
def test_ringing_wakes_once(make: Callable[[], Mailbox]) -> None:
    """A notification ends exactly one wait, whether it comes before or during the wait."""
    mailbox = make()
    for _ in range(2):
        mailbox.notify()  # before the wait begins
        assert mailbox.wait_new(1) == []
        later = threading.Timer(0.1, mailbox.notify)
        begun = time.monotonic()
        later.start()
        assert mailbox.wait_new(1) == []
        assert time.monotonic() - begun > 0.05
        later.join()
    if isinstance(mailbox, LocalMailbox):
        mailbox.close()


@pytest.mark.parametrize("make", [Mailbox, LocalMailbox])
def test_what_is_fresh_in_another_window_stays_for_who_asks_for_it(make: Callable[[], Mailbox]) -> None:
    """New messages of another window remain until they are requested for that window."""
    mailbox = make()
    first, second = Instruction(Kind.RF, 1), Instruction(Kind.RB, 0)
    for window, receive in ((1, first), (2, first), (2, second)):
        mailbox.put(Message((window, receive), None, ()))
    assert mailbox.take_new(1) == [first]
    assert mailbox.take_new(1) == []
    assert mailbox.take_message((2, first)) is not None
    assert mailbox.wait_new(2) == [second]
    assert mailbox.take_new(2) == []
    if isinstance(mailbox, LocalMailbox):
        mailbox.close()


def test_a_mailbox_whose_owner_never_waits_stays_small() -> None:
    """No notifications accumulate if messages are taken without waiting, and later waits still return."""
    box = Mailbox()
    for turn in range(1000):
        box.put(Message((turn, RECEIVE), None, ()))
        assert box.take_message((turn, RECEIVE)) is not None
    assert box._changes.qsize() == 0
    assert box.take_new(1) == []
    box.put(Message((1, RECEIVE), None, ()))
    box.put(Message((2, RECEIVE), None, ()))
    box.take_message((1, RECEIVE))
    assert box.wait_new(2) == [RECEIVE]  # the notification that `take_message` consumed is not needed
    assert box.has_message((2, RECEIVE))
