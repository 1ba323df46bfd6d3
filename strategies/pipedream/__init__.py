"""PipeDream: 1F1B across batches, each differentiated with the weights that it read."""

from lightning_pipes.strategies.pipedream.schedule import PipeDream, endless_1f1b

__all__ = ["PipeDream", "endless_1f1b"]
