"""A callback that reports losses to a stream of subnets."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_pipes.ir import PipelineError, check_type
from lightning_pipes.supernets.stream import SubnetStream
from lightning_pipes.supernets.subnet import Subnet
from lightning_pipes.trainer.loop.host import PipelineHost
from lightning_pipes.trainer.loop.run import PipelineRun, StageListener


class ExplorerFeedback(pl.Callback):
    """Reports the training loss of each subnet to the stream, in order, with any strategy.

    Where batches overlap, losses arrive late. When the next subnet depends on them, as it does between two generations
    of an evolution, the batches under way are ended first: at the same subnet on any number of stages.

    Args:
        stream: the stream whose subnets end the batches, as `stream.pair_with` makes them.

    Raises:
        InputError: it is no stream of subnets.
        PipelineError: a batch has no subnet at its end.
    """

    def __init__(self, stream: SubnetStream) -> None:
        self.stream: SubnetStream = check_type("stream", stream, SubnetStream)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        run = _overlapping_run(trainer)
        if run is not None:
            run.listeners.append(_LossListener(self.stream))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        subnet = subnet_of_batch(batch)
        run = _overlapping_run(trainer)
        if run is None:
            self.stream.report_loss(subnet, loss_of_output(outputs))
        elif self.stream.must_wait_after(subnet.id):
            run.drain()


class _LossListener(StageListener):
    def __init__(self, stream: SubnetStream) -> None:
        self._stream = stream

    def after_result(self, number: int, batch: Any, out: Any) -> None:
        self._stream.report_loss(subnet_of_batch(batch), loss_of_output(out))


def subnet_of_batch(batch: Any) -> Subnet:
    """Return the subnet at the end of a batch.

    Raises:
        PipelineError: there is none.
    """
    last = batch[-1] if isinstance(batch, (list, tuple)) and batch else None
    if not isinstance(last, Subnet):
        raise PipelineError(
            f"a batch ends with a {type(last).__name__}, not a Subnet: train on stream.pair_with(loader)"
        )
    return last


def loss_of_output(out: Any) -> float:
    """Return the loss in the output of a training step."""
    return float(out["loss"] if isinstance(out, dict) else out)


def _overlapping_run(trainer: pl.Trainer) -> PipelineRun | None:
    """Return the run of a pipeline whose batches overlap; None for any other training."""
    run = trainer.strategy.running if isinstance(trainer.strategy, PipelineHost) else None
    return run if run is not None and run.is_asynchronous else None
