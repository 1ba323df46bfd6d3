"""PipeDream: 1F1B across batches, where the backward of a batch uses the weights that its forward has read."""

from lightning_pipes.strategies.pipedream.schedule import PipeDream, endless_1f1b

__all__ = ["PipeDream", "endless_1f1b"]
