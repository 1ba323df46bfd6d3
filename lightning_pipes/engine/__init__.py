"""Runs programs on torch: stages, transport, executor, and the one interface that every schedule is driven by."""

from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.failure import FailureWatch, PeerFailure
from lightning_pipes.engine.item import Item
from lightning_pipes.engine.mailbox import Mailbox, Transport
from lightning_pipes.engine.rng import AFTER_LAYERS, BEFORE_LAYERS
from lightning_pipes.engine.stage import Stage, layers_only
from lightning_pipes.engine.transport import GlooTransport, LoopbackTransport, make_transport

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
