"""Who waits for a message can be woken by something else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from lightning_pipes.engine.messages.local import LocalMailbox
from lightning_pipes.engine.messages.mailbox import Mailbox


@pytest.mark.parametrize("make", [Mailbox, LocalMailbox])
def test_ringing_wakes_once(make: Callable[[], Mailbox]) -> None:
    mailbox = make()
    for _ in range(2):
        mailbox.ring()  # before anybody waits
        assert mailbox.wait() == []
        later = threading.Timer(0.1, mailbox.ring)
        begun = time.monotonic()
        later.start()
        assert mailbox.wait() == []
        assert time.monotonic() - begun > 0.05
        later.join()
    if isinstance(mailbox, LocalMailbox):
        mailbox.close()
