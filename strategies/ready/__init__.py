"""Ready: a rank runs any instruction that is ready, while its stages hold at most a limited number of samples."""

from lightning_pipes.strategies.ready.schedule import Ready, check_limits, largest_rows, limits_for

__all__ = ["Ready", "check_limits", "largest_rows", "limits_for"]
