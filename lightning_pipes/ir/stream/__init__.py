"""Endless streams of batches that use different layers."""

from lightning_pipes.ir.stream.ledger import LayerVersion, Ledger, Transfer, Waits, unroll_stream
from lightning_pipes.ir.stream.use import Delayed, LayerUse

__all__ = ["Delayed", "Ledger", "LayerVersion", "Transfer", "LayerUse", "Waits", "unroll_stream"]
