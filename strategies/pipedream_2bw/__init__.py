"""PipeDream-2BW: 1F1B across batches with two versions of the weights."""

from lightning_pipes.strategies.pipedream_2bw.schedule import PipeDream2BW

__all__ = ["PipeDream2BW"]
