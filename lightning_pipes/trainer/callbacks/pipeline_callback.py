"""The base of callbacks that need PipelineStrategy."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.loop.host import PipelineHost


class PipelineCallback(pl.Callback):
    """A callback that works with PipelineStrategy only."""

    def pipeline(self, trainer: pl.Trainer) -> PipelineHost:
        """Return the trainer's strategy.

        Raises:
            PipelineError: it is no PipelineStrategy.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, PipelineHost):
            raise PipelineError(
                f"{type(self).__name__} needs PipelineStrategy; this trainer has {type(strategy).__name__}. Set "
                "strategy=PipelineStrategy(...), or leave the callback out"
            )
        return strategy
