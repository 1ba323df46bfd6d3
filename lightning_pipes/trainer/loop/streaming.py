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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.optim import Optimizer

from lightning_pipes.engine.compute.item import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.residency.layer_memory import LayerMemory, States
from lightning_pipes.engine.watch.trust import KNOWN, seal_of
from lightning_pipes.ir import PipelineError, Policy, Use
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.mirroring import Mirroring
from lightning_pipes.trainer.loop.run import TRAINING, PipelineRun, Training
from lightning_pipes.trainer.loop.seen import seen_costs
from lightning_pipes.trainer.loop.stopping import LateAgreement, StopAgreement
from lightning_pipes.trainer.loop.stream_window import StreamWindow
from lightning_pipes.trainer.module.batches import rows_of
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.grid import Grid
from lightning_pipes.trainer.ranks.packing import Packed, unpacked
from lightning_pipes.trainer.step.cuts import Cuts
from lightning_pipes.trainer.step.own_steps import OwnSteps
from lightning_pipes.trainer.step.steps import TrainingBatch
from lightning_pipes.trainer.step.uses import Overlap, SaysLayers, check_layers, use_of

Settings = list[dict[str, Any]]
"""Learning rate and all else that an optimizer's groups are told, by group."""

_POLL_SECONDS = 0.0005


@dataclass
class StreamedBatch(TrainingBatch):
    """A batch with the settings that the optimizers had when it came: schedulers go on meanwhile.

    Attributes:
        number: counts batches since training began.
        message: on the last stage what it has told the others of the batch.
        stepped: how many stages of this rank have.
    """

    number: int = -1
    settings: list[Settings] = field(default_factory=list)
    message: Any = None
    stepped: int = 0


class Streaming(Training):
    """Of a schedule that does not flush."""

    streams = True

    def __init__(self, run: PipelineRun, memory: States | None = None) -> None:
        check_layers(run.cut.module, run.cut.full)
        self._run = run
        self._memory: LayerMemory | None = None
        if memory is not None:
            check_turns(run)
            self._memory = LayerMemory(memory, run.device, lambda: run.trainer.optimizers)
            run.engine.take_turns(self._memory)
        schedule = run.plans.schedule
        depth = schedule.depth if isinstance(schedule, Policy) else 0
        self._apart = max(len(run.global_ranks), depth)
        self._results = Results(run.control, self._apart)
        self._under_way: deque[StreamedBatch] = deque()
        self._unsaid: deque[StreamedBatch] = deque()  # those that the last stage has not told of
        self._window = StreamWindow()
        self._overlap = Overlap()
        several = len(run.global_ranks) > 1
        self._mirroring = Mirroring(run) if several and Cuts.wanted(run.cut.module, schedule) else None
        self._ordering = run.plans
        self._optimizers: Sequence[Optimizer] = ()
        self._steps: OwnSteps | None = None  # of this window: layers move between windows
        self._unstepped: dict[int, Item] = {}  # batches under way, which may have left gradients
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._latest: Any = torch.full((), torch.nan, device=run.device)

    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        """Starts one batch and does what can be done; returns what the user's step gave for the latest batch known
        here, on the last stage this one where it is through. Until the first one is, a loss that is not a number."""
        run, engine, fit_loop = self._run, self._run.engine, self._run.trainer.fit_loop
        rows = rows_of(batch)
        run.check(batch, arguments[0] if arguments else fit_loop.batch_idx, TRAINING)
        plans = run.plans.revised(rows, fit_loop.total_batch_idx, partial(seen_costs, run.windows, run.control))
        if engine.open and (rows > engine.plan.jobs[0].rows or plans is not self._ordering):
            self.drain()
        if not engine.open:
            run.plans = self._ordering = plans
            run.turn_to(*plans.for_rows(rows))
            self._steps = None
        if self._optimizers is not optimizers:
            self._optimizers, self._steps = optimizers, None
            if self._mirroring is not None:
                self._mirroring.trains_by(optimizers)
            for optimizer in optimizers:
                private.expect_late_steps(optimizer)
        settings = [_settings(o) for o in optimizers]
        number = fit_loop.total_batch_idx
        data = StreamedBatch(batch, rows, arguments, 1, {}, None, run.lists.of(batch, rows), number, settings)
        run.begin_loss_check(data)
        self._under_way.append(data)
        if run.last:
            self._unsaid.append(data)
        use = use_of(run.cut.module, run.cut.full, batch, engine.plan)
        self._overlap.look(use, engine.plan)
        if self._mirroring is not None and use is not None:
            use = self._mirroring.use(batch, use, engine.plan)
        item = self._unstepped[number] = Item(number, rows, data, use=use)
        with run.hidden.batch(training=True), self._own_gradients():
            engine.inject(item)
            self._window.add(use or Use.whole(engine.plan))
            engine.progress()
        self._tell()
        if private.pauses_after_this_batch(run.trainer):
            self.drain()
        return self._latest

    def drain(self) -> None:
        run, engine = self._run, self._run.engine
        if not engine.open:
            return
        with private.as_in_training_step(run.trainer), torch.enable_grad():
            with self._own_gradients():
                engine.drain()
            self._tell()
        if self._memory is not None:
            self._memory.flush()
        run.windows.append(self._window.ended(engine, self._ordering))

    def agreement(self, stops: StopAgreement) -> Callable[[], None]:
        run = self._run
        late = LateAgreement(run.trainer, stops, run.control, self._apart, lambda: not run.engine.open, self.drain)
        return late.agree

    def batch_complete(self, stage: Stage, item: Item) -> None:
        """Steps what the batch steps on this stage, as the optimizers were told when it came."""
        run, data = self._run, item.data
        run.check_loss(item)
        mine = stage.stepped(item)
        ids = {id(p) for p in mine}
        others = [(p, p.grad) for p in self._with_gradients() if id(p) not in ids]
        for p, _ in others:
            p.grad = None
        steps = self._steps = self._steps or OwnSteps(self._optimizers)
        for number, (optimizer, settings) in enumerate(zip(self._optimizers, data.settings, strict=True)):
            with steps.only(number, optimizer, mine), self._stepping(stage, item):
                now = _settings(optimizer)
                _apply(optimizer, settings)
                private.before_step(run.trainer.precision_plugin, run.cut.module, optimizer)
                optimizer.step()
                _apply(optimizer, now)
                optimizer.zero_grad()
        for p, gradient in others:
            p.grad = gradient
        data.stepped += 1
        if data.stepped == len(run.stages):
            del self._unstepped[item.number]
        for listener in run.listeners:
            listener.stepped(stage, item)
        self._say()

    def _stepping(self, stage: Stage, item: Item) -> AbstractContextManager[None]:
        if self._mirroring is None or item.use is None:
            return nullcontext()
        return self._mirroring.stepping(item.use.stepped(stage.number))

    def give_back_gradients(self) -> None:
        pass

    def use(self, batch: Any) -> Use | None:
        run = self._run
        return None if self._memory is None else use_of(run.cut.module, run.cut.full, batch, run.engine.plan)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        """Outside of the block gradients are kept where Lightning does not clear them after every batch."""
        for p, gradient in self._kept:
            p.grad = gradient
        yield
        self._kept = [(p, p.grad) for p in self._with_gradients() if p.grad is not None]
        for p, _ in self._kept:
            p.grad = None

    def _with_gradients(self) -> list[torch.Tensor]:
        """The parameters of this rank that have any, by batches under way."""
        stages, batches = self._run.stages.values(), self._unstepped.values()
        found = {id(p): p for item in batches for stage in stages for p in stage.stepped(item) if p.grad is not None}
        return list(found.values())

    def _say(self) -> None:
        """The last stage tells the others of the batches that it knows, as soon as it does: they wait for it where they
        have stepped, while it may wait for what they compute."""
        while self._unsaid and self._all_losses(self._unsaid[0]):
            data = self._unsaid.popleft()
            out, logged = data.result()
            data.message = (out, self._run.replay.pack(logged))
            self._results.tell(data.message)

    def _tell(self) -> None:
        """Logs the batches whose results are known by now."""
        run = self._run
        self._say()
        while self._under_way and self._is_known(self._under_way[0]):
            data = self._under_way.popleft()
            message = data.message
            out, logged = self._results.hear() if message is None else message
            with run.trainer.precision_plugin.train_step_context():
                run.replay.replay(logged)
            self._latest = move_data_to_device(out, run.device)
            for listener in run.listeners:
                listener.heard(data.number, data.batch, self._latest)

    def _is_known(self, data: StreamedBatch) -> bool:
        return data.message is not None if self._run.last else data.stepped == len(self._run.stages)

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
        self._told = self._heard = 0

    def tell(self, message: Any) -> None:
        """The last stage's `message` of the next batch."""
        key, old = str(self._told), self._told - self._apart - 1
        self._told += 1
        if self._store is None:
            return
        packed = Packed(message, self._seal)
        data = torch.empty(packed.size, dtype=torch.uint8)
        packed.write(data)
        self._store.set(key, data.numpy().tobytes())
        if old >= 0:
            self._store.delete_key(str(old))  # all have read it: what they sent since needed its gradient

    def hear(self) -> Any:
        """The message of the next batch, on other ranks than that of the last stage.

        Raises:
            PeerFailure: another rank failed.
        """
        key = str(self._heard)
        self._heard += 1
        assert self._store is not None, "all stages are on one rank, which has told itself"
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


def check_turns(run: PipelineRun) -> None:
    """Refuses runs in which layers can't take turns on the device.

    Raises:
        PipelineError: the module does not say which layers batches use, or forwards keep them.
    """
    module, plan = run.cut.module, run.engine.plan
    if not isinstance(module, SaysLayers):
        raise PipelineError(
            f"MemorySwap has the layers on the device that batches use, and {type(module).__name__} does not say which "
            "those are; give it layers_of_batch, as for a Supernet, or leave MemorySwap out"
        )
    if plan.n_stages > 1 and not (plan.recompute and all(plan.recompute[:-1])):
        raise PipelineError(
            "MemorySwap needs PipelineStrategy(recompute=True): a forward that waits for its backward keeps its layers "
            "on the device, and batches under way could keep each other out"
        )


def _settings(optimizer: Optimizer) -> Settings:
    return [
        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _apply(optimizer: Optimizer, settings: Settings) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
