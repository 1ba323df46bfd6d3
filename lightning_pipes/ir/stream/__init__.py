"""Batches without end that use different layers."""

from lightning_pipes.ir.stream.copies import Transfer
from lightning_pipes.ir.stream.ledger import Ledger, Stepped, Waits, unrolled
from lightning_pipes.ir.stream.use import Delayed, Use

__all__ = ["Delayed", "Ledger", "Stepped", "Transfer", "Use", "Waits", "unrolled"]
