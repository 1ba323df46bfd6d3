"""A stream of subnets, with one subnet per batch.

It works in a plain loop and with a Trainer:

    for (x, y), subnet in zip(loader, stream): ...  # a plain loop
    trainer.fit(module, stream.pair_with(loader))  # batches are [[x, y], subnet]
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader

from lightning_pipes.ir import InputError, PipelineError, check_number, check_type
from lightning_pipes.supernets.explorers import Explorer
from lightning_pipes.supernets.subnet import Subnet
from lightning_pipes.trainer.loop.host import PipelineHost
from lightning_pipes.trainer.loop.run import PipelineRun, StageListener


class SubnetStream(Iterable[Subnet]):
    """Yield the subnets of an explorer. It is an endless loader with a state, and numbers subnets across epochs.

    An explorer that learns from results receives them through `report_loss`. With a Trainer, the callback
    `ExplorerFeedback` calls this method. If the next subnet depends on batches in flight, the callback also waits for
    these batches to finish.

    Args:
        explorer: chooses the subnets.
        timeout: the largest number of seconds that the explorer may take to choose a subnet.

    Attributes:
        next: the number of the next subnet.
        n_reported: the number of reported losses.
    """

    def __init__(self, explorer: Explorer, timeout: float = 300.0) -> None:
        self.explorer: Explorer = check_type("explorer", explorer, Explorer)
        self.timeout = check_number("timeout", timeout, "a positive number of seconds", lambda s: 0 < s < 1e9)
        self.next = 0
        self.n_reported = 0

    def __iter__(self) -> Iterator[Subnet]:
        return self

    def __next__(self) -> Subnet:
        number, needed = self.next, self.explorer.results_needed(self.next)
        if self.n_reported < needed:
            raise InputError(
                f"subnet {number} depends on the results of the {needed} before, and {self.n_reported} were reported. "
                "In a Trainer give it the callback ExplorerFeedback(stream), and loaders that know their length; in a "
                "loop of your own call stream.report_loss(subnet, loss)"
            )
        found = self.explorer.choose_subnet(number) if self.explorer.instant else self._choose_with_timeout(number)
        choices = self.explorer.space.check(found)
        self.next += 1
        return Subnet(choices, number, self.explorer.space_index(number))

    def __len__(self) -> int:
        """Return the largest possible length, so that the paired loader determines the length of an epoch."""
        return sys.maxsize

    def report_loss(self, subnet: Subnet, loss: float) -> None:
        """Report the loss of a subnet. Losses must be reported in the order of the subnets.

        Raises:
            InputError: the loss of another subnet has to be reported next.
        """
        if subnet.id != self.n_reported:
            raise InputError(f"the loss of subnet {subnet.id} was reported; the next one is subnet {self.n_reported}")
        self.explorer.report_loss(subnet.id, float(loss))
        self.n_reported += 1

    def must_wait_after(self, number: int) -> bool:
        """Return whether the subnet after `number` depends on the result of `number`."""
        return self.explorer.results_needed(number + 1) > number

    def pair_with(self, loader: Iterable[Any]) -> CombinedLoader:
        """Return a loader that adds a subnet to each batch, as [batch, subnet], for a Trainer.

        Its length is the length of `loader`.
        """
        return CombinedLoader([loader, self], "min_size")

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream and the state of the explorer, for a checkpoint.

        A Trainer calls this automatically.
        """
        return {"next": self.next, "told": self.n_reported, "explorer": self.explorer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position that `state` contains."""
        self.next, self.n_reported = state["next"], state["told"]
        self.explorer.load_state_dict(state["explorer"])

    def _choose_with_timeout(self, number: int) -> tuple[int, ...]:
        """Return the explorer's choice from a separate thread.

        The explorer may be another program, or may be reached through a network.
        """
        answers: queue.Queue[tuple[int, ...] | BaseException] = queue.Queue()

        def ask_explorer() -> None:
            try:
                answers.put(self.explorer.choose_subnet(number))
            except BaseException as error:
                answers.put(error)

        threading.Thread(target=ask_explorer, daemon=True, name=f"subnet {number}").start()
        try:
            found = answers.get(timeout=self.timeout)
        except queue.Empty:
            raise InputError(
                f"{type(self.explorer).__name__} has not chosen subnet {number} within {self.timeout:g} s, and all "
                "ranks wait for it. Find out why it is slow, or raise timeout"
            ) from None
        if isinstance(found, BaseException):
            raise found
        return found


class ExplorerFeedback(pl.Callback):
    """Report the training loss of each subnet to the stream, in order, with any strategy.

    If batches overlap, losses arrive late. When the next subnet depends on them, as between two generations of an
    evolution, all batches in flight are finished first. This happens at the same subnet on any number of stages.

    Args:
        stream: the stream whose subnets are the last elements of the batches, as with `stream.pair_with`.

    Raises:
        InputError: `stream` is not a SubnetStream.
        PipelineError: a batch does not end with a subnet, or there are several replicas, of which each would learn from
            its own losses.
    """

    def __init__(self, stream: SubnetStream) -> None:
        self.stream: SubnetStream = check_type("stream", stream, SubnetStream)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        if replicas > 1 and self.stream.explorer.learns:
            raise PipelineError(
                f"{type(self.stream.explorer).__name__} learns from losses, but each of {replicas} replicas has only "
                "the losses of its own batches. The replicas would choose different subnets, and average the gradients "
                "of different layers. Use data_parallel=1 and more stages, or an explorer that does not learn, such as "
                "Uniform"
            )
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
        PipelineError: the batch does not end with a subnet.
    """
    last = batch[-1] if isinstance(batch, (list, tuple)) and batch else None
    if not isinstance(last, Subnet):
        raise PipelineError(
            f"a batch ends with a {type(last).__name__}, not a Subnet: train on stream.pair_with(loader)"
        )
    return last


def loss_of_output(out: Any) -> float:
    """Return the loss that the output of a training step contains."""
    return float(out["loss"] if isinstance(out, dict) else out)


def _overlapping_run(trainer: pl.Trainer) -> PipelineRun | None:
    """Return the run of an asynchronous pipeline, or None for any other training."""
    run = trainer.strategy.current_run if isinstance(trainer.strategy, PipelineHost) else None
    return run if run is not None and run.is_asynchronous else None
