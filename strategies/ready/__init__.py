"""Ready first: whatever can run, under a limit of samples held."""

from lightning_pipes.strategies.ready.limits import check_limits, largest_rows, limits_for
from lightning_pipes.strategies.ready.schedule import Ready

__all__ = ["Ready", "check_limits", "largest_rows", "limits_for"]
