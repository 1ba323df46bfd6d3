"""What the network still has to send."""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress

import pytest

from lightning_pipes.engine.messages.socket_queues import SocketQueues, _connections, _waiting


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is seen elsewhere")
def test_bytes_that_wait_for_the_network_are_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as source:
        target, _ = server.accept()
        with target:
            source.setblocking(False)
            sent, descriptor = 0, source.fileno()
            with suppress(BlockingIOError):
                while True:
                    sent += source.send(bytes(2**16))
            assert descriptor in _connections().values()
            assert _waiting(descriptor)
            queues = SocketQueues()
            assert queues.unsent_bytes() >= _waiting(descriptor)
            before, whole = queues.acknowledged_bytes(), sent
            while sent:
                sent -= len(target.recv(2**20))
            until = time.monotonic() + 20
            while _waiting(descriptor) and time.monotonic() < until:
                time.sleep(0.01)
            assert not _waiting(descriptor)
            assert queues.acknowledged_bytes() - before == pytest.approx(whole, abs=whole - before)
    assert descriptor not in _connections().values()
    assert not _waiting(descriptor)  # closed
