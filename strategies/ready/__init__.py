"""Ready first: whatever can run, under a limit of samples held."""

from lightning_pipes.strategies.ready.schedule import Ready, check_limits, largest_rows, limits_for

__all__ = ["Ready", "check_limits", "largest_rows", "limits_for"]
