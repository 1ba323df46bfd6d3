"""Batches that use different layers of a supernet, overlapping, with the weights of one after another."""

from lightning_pipes.strategies.csp.schedule import CSP

__all__ = ["CSP"]
