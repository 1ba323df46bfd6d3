"""Runs programs on torch: stages, transports, executors, and one interface for all schedules."""

from lightning_pipes.engine.compute.rng import AFTER_LAYERS, BEFORE_LAYERS
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage, layers_only
from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.messages.mailbox import Mailbox, Transport
from lightning_pipes.engine.messages.transport import GlooTransport, LoopbackTransport, make_transport
from lightning_pipes.engine.watch.failure import FailureWatch, PeerFailure

__all__ = [
    "AFTER_LAYERS",
    "BEFORE_LAYERS",
    "Engine",
    "FailureWatch",
    "GlooTransport",
    "Item",
    "LoopbackTransport",
    "Mailbox",
    "PeerFailure",
    "Stage",
    "Transport",
    "layers_only",
    "make_transport",
]
