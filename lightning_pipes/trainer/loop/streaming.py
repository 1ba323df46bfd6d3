"""Batches that overlap: schedules that do not flush between them, inside Lightning's loop.

`train` returns as soon as there is nothing to do without another batch, while earlier ones are still on their way back.
So the ranks are at different batches, and nothing may make them wait for each other there: every stage steps its own
optimizers, results go through the store, stops are agreed on late. Before whatever needs all ranks at one place, and
weights that are up to date, the window is drained: validation, checkpoints, the end of an epoch, stops.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.optim import Optimizer

from lightning_pipes.engine.compute.item import Item
from lightning_pipes.engine.watch.trust import KNOWN, seal_of
from lightning_pipes.ir import PipelineError, Plan, Program
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.run import TRAINING, PipelineRun
from lightning_pipes.trainer.loop.stopping import LateAgreement, StopAgreement
from lightning_pipes.trainer.module.batches import rows_of
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.grid import Grid
from lightning_pipes.trainer.ranks.packing import Packed, unpacked
from lightning_pipes.trainer.reports.report import Window
from lightning_pipes.trainer.step.steps import TrainingBatch

Settings = list[dict[str, Any]]
"""Learning rate and all else that an optimizer's groups are told, by group."""

_POLL_SECONDS = 0.0005


@dataclass
class StreamedBatch(TrainingBatch):
    """A batch with the settings that the optimizers had when it came: schedulers go on meanwhile."""

    settings: list[Settings] = field(default_factory=list)
    stepped: bool = False


class StreamingRun(PipelineRun):
    """A `PipelineRun` for a schedule whose program is endless."""

    streams = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._results = Results(self._control, len(self.global_ranks))
        self._under_way: deque[StreamedBatch] = deque()
        self._in_window = 0
        self._programs: dict[tuple[Plan, int], Program] = {}
        self._ordering = self.plans
        self._optimizers: Sequence[Optimizer] = ()
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._latest: Any = torch.full((), torch.nan, device=self._device)

    def train(
        self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool = True
    ) -> Any:
        """Starts one batch and does what can be done; returns what the user's step gave for the latest batch known
        here, on the last stage this one. Until the first one is, a loss that is not a number."""
        rows = rows_of(batch)
        self._check(batch, arguments[0] if arguments else self._trainer.fit_loop.batch_idx, TRAINING)
        plans = self.plans.revised(rows, self._trainer.fit_loop.total_batch_idx)
        if self.engine.open and (rows > self.engine.plan.jobs[0].rows or plans is not self._ordering):
            self.drain()
        if not self.engine.open:
            self.plans = self._ordering = plans
            self._turn_to(*plans.for_rows(rows))
        if self._optimizers is not optimizers:
            self._optimizers = optimizers
            for optimizer in optimizers:
                private.expect_late_steps(optimizer)
        settings = [_settings(o) for o in optimizers]
        data = StreamedBatch(batch, rows, arguments, 1, samples=self.lists.of(batch, rows), settings=settings)
        self._begin_loss_check(data)
        self._under_way.append(data)
        self._in_window += 1
        with self._hidden.batch(training=True), self._own_gradients():
            self.engine.inject(Item(self._trainer.fit_loop.total_batch_idx, rows, data))
            self.engine.progress()
        self._tell()
        self._evaluated = 0
        if private.pauses_after_this_batch(self._trainer):
            self.drain()
        return self._latest

    def drain(self) -> None:
        """Finishes all batches; every rank calls it after the same one."""
        if not self.engine.open:
            return
        plan = self.engine.plan
        with private.as_in_training_step(self._trainer), torch.enable_grad():
            with self._own_gradients():
                self.engine.drain()
            self._tell()
        key = plan, self._in_window
        if key not in self._programs:
            order = self._ordering.for_rows(plan.jobs[0].rows)[1]
            assert isinstance(order, Program)
            self._programs[key] = order.unroll(self._in_window)
        self.windows.append(Window(plan, self._programs[key], self.engine.events))
        self._in_window = 0

    def agreement(self, stops: StopAgreement) -> Callable[[], None]:
        late = LateAgreement(
            self._trainer, stops, self._control, len(self.global_ranks), lambda: not self.engine.open, self.drain
        )
        return late.agree

    def _batch_complete(self, item: Item) -> None:
        """Steps this stage's optimizers, as they were told when the batch came."""
        data = item.data
        self._check_loss(item)
        for optimizer, settings in zip(self._optimizers, data.settings, strict=True):
            now = _settings(optimizer)
            _apply(optimizer, settings)
            private.before_step(self._trainer.precision_plugin, self._module, optimizer)
            optimizer.step()
            _apply(optimizer, now)
            optimizer.zero_grad()
        data.stepped = True

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Outside of the block gradients are kept where Lightning does not clear them after every batch."""
        for p, gradient in self._kept:
            p.grad = gradient
        yield
        parameters = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
        self._kept = [(p, p.grad) for p in parameters if p.grad is not None]
        for p, _ in self._kept:
            p.grad = None

    def _tell(self) -> None:
        """Logs the batches whose results are known by now; the last stage tells the others."""
        while self._under_way and (self._all_losses(self._under_way[0]) if self.last else self._under_way[0].stepped):
            data = self._under_way.popleft()
            message = None
            if self.last:
                out, logged = data.result()
                message = (out, self.replay.pack(logged))
            out, logged = self._results.exchange(message)
            with self._trainer.precision_plugin.train_step_context():
                self.replay.replay(logged)
            self._latest = move_data_to_device(out, self._device)

    @staticmethod
    def _all_losses(data: StreamedBatch) -> bool:
        return sum(span.rows for span in data.outcomes) == data.rows


class Results:
    """The results of each batch, told by the last stage: it goes on at once, and the others ask when they are that far.

    Collective: all ranks make one together. By the time a rank has stepped for a batch its result is there.

    Args:
        apart: batches that ranks may be apart.
    """

    def __init__(self, control: Control, apart: int) -> None:
        self._watch = control.watch
        self._store = control.watch.store() if control.size > 1 else None
        self._seal = KNOWN if seal_of(self._store) else None  # the store vouches for what is in it
        self._apart = apart
        self._batch = 0

    def exchange(self, message: Any) -> Any:
        """The `message` of the last stage for the next batch; the others give None.

        Raises:
            PeerFailure: another rank failed.
        """
        key, old = str(self._batch), str(self._batch - self._apart - 1)
        self._batch += 1
        if self._store is None:
            return message
        if message is not None:
            packed = Packed(message, self._seal)
            data = torch.empty(packed.size, dtype=torch.uint8)
            packed.write(data)
            self._store.set(key, data.numpy().tobytes())
            if not old.startswith("-"):
                self._store.delete_key(old)  # all have read it: what they sent since needed its gradient
            return message
        while not self._store.check([key]):
            self._watch.check()
            time.sleep(_POLL_SECONDS)
        return unpacked(torch.frombuffer(bytearray(self._store.get(key)), dtype=torch.uint8), self._seal)


def check_streaming(trainer: pl.Trainer, name: str, grid: Grid, shared: Sequence[str]) -> None:
    """Refuses what needs all stages at one batch, for the schedule `name`, which never has them there.

    Args:
        shared: names of the parameters that several ranks train.

    Raises:
        PipelineError: names the setting, and a way out.
    """
    flush = "or a schedule that flushes between batches, such as '1f1b'"
    by_norm = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"
    refused = {
        "data_parallel": (grid.replicas > 1, f"use one pipeline, {flush}"),
        "accumulate_grad_batches": (trainer.accumulate_grad_batches > 1, f"use a larger batch_size, {flush}"),
        "gradient_clip_val": (by_norm, f"the norm is that of all stages; clip by 'value', {flush}"),
        "precision='16-mixed'": (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"its scaler looks at the gradients of all stages; use 'bf16-mixed', {flush}",
        ),
    }
    for what, (given, way_out) in refused.items():
        if given:
            raise PipelineError(
                f"{what} can't be used with schedule {name!r}, whose stages step at other times: {way_out}"
            )
    if shared:
        raise PipelineError(
            f"{', '.join(shared[:5])}: several ranks train these parameters, because they are outside of the pipelined "
            f"module or tied. With schedule {name!r} stages step at other times, and copies would become different; "
            f"put them into a layer of the nn.Sequential, {flush}"
        )


def _settings(optimizer: Optimizer) -> Settings:
    return [
        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _apply(optimizer: Optimizer, settings: Settings) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
