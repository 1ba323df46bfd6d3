"""The port of the store through which ranks connect."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from lightning_pipes.engine.watch.shared_store import LOOPBACK, hold_port, store_on_loopback
from lightning_pipes.ir import PipelineError

SOON = timedelta(seconds=60)


def test_only_the_holder_of_a_port_hosts_a_store_there() -> None:
    """A held port cannot be bound by other sockets, and the store of this process uses it."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    hold_port(port)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, port))
    assert store_on_loopback(port, SOON).port == port


def test_port_in_use_is_named() -> None:
    """If another socket listens at the port, the error contains the address of the port."""
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        hold_port(port)  # this fails without an error
        with pytest.raises(PipelineError, match=f"can't host the store of this run at {LOOPBACK}:{port}"):
            store_on_loopback(port, SOON)
