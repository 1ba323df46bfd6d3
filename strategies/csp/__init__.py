"""CSP: batches that use different layers of a supernet overlap, with the same weights as one batch after another."""

from lightning_pipes.strategies.csp.schedule import CSP

__all__ = ["CSP"]
