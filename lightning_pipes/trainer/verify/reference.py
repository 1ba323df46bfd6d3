"""The reference, which is one plain process of Lightning that trains the same batches and sends its values to rank 0.

Rank 0 forks the process when a fit begins, before anything of the pipeline is set up. The process continues the user's
`fit` with Lightning's own strategy for one device. It shares only the seeds of random numbers with the pipeline.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import nn

from lightning_pipes.engine.compute.rng import AFTER_LAYERS, BEFORE_LAYERS, forked_rng
from lightning_pipes.ir import Span
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.cuts.units.whole_step import StreamUnits, WholeStep
from lightning_pipes.trainer.data.batches import checksum_batch
from lightning_pipes.trainer.loop.run import StageListener
from lightning_pipes.trainer.verify.comparison import Rounding
from lightning_pipes.trainer.verify.record import (
    OUTSIDE,
    LayerInputs,
    ModuleParts,
    Phase,
    Record,
    ValueKey,
    add_results,
    add_settings,
)
from lightning_pipes.trainer.verify.sample_draws import SampleDraws
from lightning_pipes.trainer.weights.deferred import has_meta

CPU = torch.device("cpu")
_REFERENCE_POLL_SECONDS = 0.2
_TENSORS_PER_WEIGHT = 6
"""Number of tensors of the size of a weight that the reference needs.

They are the weights, which are copied when they are stepped, their snapshot, the gradients, the optimizer states, and
the values that are sent.
"""
_PERTURBATION_ROUNDINGS = (2.0, 4.0, 8.0, 16.0)
"""The number of roundings by which weights are perturbed when a batch is repeated.

Repetitions use these numbers in turn.
"""


@dataclass(frozen=True)
class Order:
    """A request to train one batch.

    Attributes:
        number: the number of the batch since the beginning of training.
        rows: number of samples in the batch.
        path: the path of the container of the layers, or None if the module is cut by units.
        seed: the seed of the random streams.
        job: the job of the random streams.
        spans: the spans of the micro-batches, by layer, and for the code before and after the layers. If the module is
            cut by units, they are given by stage.
        units: the units of the step, or None if the module is cut between layers.
        adopts: whether the weights of the pipeline follow once the batch is equal. After the last batch to compare, the
            reference is ended instead.
    """

    number: int
    rows: int
    path: str | None
    seed: int
    job: int
    spans: Mapping[int, Sequence[Span]]
    units: StreamUnits | None = None
    adopts: bool = False


@dataclass(frozen=True)
class PipelineWeights:
    """Weights of the pipeline after a batch, with which the reference begins the next batch.

    Without them, rounding would grow from batch to batch, because optimizers such as Adam make large steps from small
    gradients.

    Attributes:
        weights: the weights of one layer, by name.
        last: whether no other layer follows.
    """

    weights: Mapping[str, torch.Tensor]
    last: bool


@dataclass(frozen=True)
class Repetition:
    """A request to train the last batch again from the same state, with weights that are rounded differently.

    Attributes:
        attempt: the number of earlier repetitions of the batch.
    """

    attempt: int


@dataclass(frozen=True)
class Answer:
    """A part of the reference's record.

    Attributes:
        number: the number of the batch.
        layer: the number of the layer to which the values belong.
        values: the values, by key.
        rounding: the rounding of the numbers from which the batch is computed.
        notes: remarks about the whole batch.
        last: whether no other part of the record follows.
        continues: whether the process can train the batches after this one. A repetition cannot if the workers of a
            loader belong to another process.
    """

    number: int
    layer: int
    values: Mapping[ValueKey, Any]
    rounding: Rounding
    notes: Sequence[str] = ()
    last: bool = False
    continues: bool = True


@dataclass(frozen=True)
class ReferenceEnded:
    """The reference has ended.

    Attributes:
        reason: the reason, for messages.
        error: a traceback, or an empty string.
        too_large: whether one process does not have enough memory for the module.
    """

    reason: str
    error: str = ""
    too_large: bool = False


class ReferenceProcess:
    """The reference as seen by rank 0.

    Args:
        pid: the process ID of the reference.
        connection: the connection to the reference.
        folder: an empty folder to which the reference may write. It is deleted with the process.
    """

    def __init__(self, pid: int, connection: Connection, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._folder = folder
        self._pid = pid
        self._connection = connection
        self._ended: ReferenceEnded | None = None

    def send(self, order: Order | Repetition | PipelineWeights) -> None:
        """Send a request to train another batch, or to train the last one again, or weights for the next batch."""
        with suppress(OSError):  # `receive` returns the reason
            self._connection.send(order)

    def receive(self, check: Callable[[], object]) -> Answer | ReferenceEnded:
        """Return the next answer of the reference.

        Args:
            check: called repeatedly while the call waits. It raises an error if other ranks have failed.
        """
        if self._ended is not None:
            return self._ended
        try:
            while not self._connection.poll(_REFERENCE_POLL_SECONDS):
                check()
            answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            answer = ReferenceEnded("it was killed, as the kernel does where memory is short")
        if isinstance(answer, ReferenceEnded):
            self._ended = answer
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """Kill the reference, including its snapshots and repetitions."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # the process group, with snapshots and repetitions
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._folder.cleanup()


def fork_reference(strategy: Strategy, trainer: pl.Trainer, module: pl.LightningModule) -> ReferenceProcess | None:
    """Fork the reference.

    Args:
        strategy: the strategy of the pipeline.
        trainer: the trainer. In the reference, it gets a plain strategy.
        module: the module to train.

    Returns:
        The reference in the calling process, and None in the reference.
    """
    here, there = Pipe()
    folder = tempfile.TemporaryDirectory(prefix="lightning_pipes_verify_", ignore_cleanup_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        there.close()
        with suppress(OSError):  # the reference may have done so already
            os.setpgid(pid, pid)
        return ReferenceProcess(pid, here, folder)
    os.setpgid(0, 0)
    gc.freeze()  # process groups in the other process's garbage would wait for threads that do not exist here
    try:
        here.close()
        _become_reference(strategy, trainer, module, there, folder.name)
    except BaseException as error:
        _leave(there, ReferenceEnded(f"{type(error).__name__}: {error}", traceback.format_exc()))
    return None


def _become_reference(
    strategy: Strategy, trainer: pl.Trainer, module: pl.LightningModule, connection: Connection, folder: str
) -> None:
    _die_with_parent()
    torch.set_num_threads(1)  # a fork does not copy the threads of the other process
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    dist.group.WORLD = None
    rank_zero_only.rank = 0  # type: ignore[attr-defined]
    plain = ReferenceStrategy(connection, strategy)
    plain.connect(module)
    private.replace_strategy(trainer, plain, folder)
    private.remove_progress_bars(trainer)
    vars(trainer)["callbacks"] = [c for c in private.callbacks(trainer) if not _needs_pipeline(c)]
    trainer.loggers = [SilentLogger(folder) for _ in trainer.loggers]
    plain.setup_environment()


def _needs_pipeline(callback: pl.Callback) -> bool:
    rooms = ("lightning_pipes.trainer.", "lightning_pipes.arrays.")
    return isinstance(callback, StageListener) or any(
        kind.__module__.startswith(rooms) for kind in type(callback).__mro__
    )


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _leave(connection: Connection, last: ReferenceEnded) -> NoReturn:
    try:
        connection.send_bytes(pickle.dumps(last))
    finally:
        os._exit(0)


class SilentLogger(DummyLogger):
    """A logger that writes nothing.

    Args:
        folder: an empty folder, for code that requests the folder of the logs.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        return self._folder

    @property
    def log_dir(self) -> str:
        return self._folder

    @property
    def root_dir(self) -> str:
        return self._folder


class ReferenceStrategy(SingleDeviceStrategy):
    """Lightning's strategy for one device, extended to record the values of each batch and send them to rank 0.

    It does not save or remove files, because they belong to the other process.

    Args:
        connection: the connection to rank 0.
        pipeline: the strategy that this one replaces.
    """

    def __init__(self, connection: Connection, pipeline: Strategy) -> None:
        super().__init__(CPU, CPUAccelerator(), pipeline.checkpoint_io, pipeline.precision_plugin)
        self._connection = connection
        self._draws = SampleDraws(CPU)
        self._record: Record | None = None
        self._order: Order | None = None
        self._span = Span(0, 0)
        self._parts: ModuleParts | None = None
        self._notes: list[str] = []
        self._cast: torch.dtype | None = None
        self._snapshot: Snapshot | None = None
        self._has_workers = False

    # ---- called by Lightning

    def setup(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        reason = no_room_for(module)
        if reason:
            _leave(self._connection, ReferenceEnded(reason, too_large=True))
        super().setup(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch = next(iter((*args, *kwargs.values())))
        module = self.lightning_module
        assert module is not None
        order = self._order = self._next_order()
        number = module.trainer.fit_loop.total_batch_idx
        if number != order.number:
            _leave(
                self._connection,
                ReferenceEnded(f"it trains batch {number} where the pipeline trains batch {order.number}"),
            )
        if self._parts is None:
            self._parts = self._watch(module, order)
        self._take_snapshot(module)
        record = self._record = Record(number)
        self._notes = []
        record.add(Phase.BATCH, OUTSIDE, "the batch", checksum_batch(batch))
        with self.precision_plugin.train_step_context():
            self._cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        self._parts.add_modes(record)
        self._span = Span(0, order.rows)
        self._draws.begin_batch(order.seed, order.job, number, order.rows)
        run_step = partial(super().training_step, *args, **kwargs)
        with self._draws.draw_by_sample():
            if order.units is None:
                self._enter(BEFORE_LAYERS)
                out = run_step()
            else:
                step = WholeStep(module, order.units, CPU)
                out = step.run(
                    run_step,
                    batch,
                    lambda number: self._draws.enter(number, order.spans[step.stage]),
                    self._draws.enter_whole,
                )
        self._notes += [f"draws {name}" for name in dict.fromkeys(self._draws.common)]
        add_results(record, out)
        self._span = Span(0, 0)
        return out

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with forked_rng(CPU):
            return super().validation_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._draws.draw_by_sample():  # recomputed forwards draw again
            loss = super().backward(*args, **kwargs)
        if self._record is not None and self._parts is not None:
            self._parts.add_gradients(self._record, Phase.GRADIENT)
        return loss

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        pass

    def remove_checkpoint(self, filepath: Any) -> None:
        pass

    def on_train_start(self) -> None:
        module = self.lightning_module
        assert module is not None
        call_after(module, "configure_gradient_clipping", self._before_step)
        call_after(module, "on_train_batch_end", lambda *_, **__: self._end_batch(module))

    def on_train_end(self) -> None:
        self._next_order()  # this may be a repetition of the last batch
        _leave(self._connection, ReferenceEnded("its training ends after fewer batches"))

    def on_exception(self, exception: BaseException) -> None:
        text = "".join(traceback.format_exception(exception))
        _leave(self._connection, ReferenceEnded(f"{type(exception).__name__}: {exception}", text))

    def teardown(self) -> None:
        _leave(self._connection, ReferenceEnded("its training ends after fewer batches"))

    # ---- recording

    def _next_order(self) -> Order:
        order = self._receive()
        assert isinstance(order, Order)
        return order

    def _receive(self) -> Order | PipelineWeights:
        """Return the next message of rank 0 after repeating the last batch as often as rank 0 requests."""
        try:
            message: Order | Repetition | PipelineWeights = self._connection.recv()
        except EOFError:
            os._exit(0)
        if isinstance(message, Repetition):
            assert self._snapshot is not None
            self._snapshot.repeat(message.attempt)
        return message

    def _end_batch(self, module: nn.Module) -> None:
        """Send the values of the batch, and take the weights of the pipeline."""
        waits = self._record is not None and self._order is not None and self._order.adopts
        self._send()
        while waits:
            received = self._receive()
            assert isinstance(received, PipelineWeights)
            with torch.no_grad():
                for name, weight in received.weights.items():
                    module.get_parameter(name).copy_(weight)
            waits = not received.last

    def _take_snapshot(self, module: nn.Module) -> None:
        """Keep the state before a batch in a forked process.

        In each repetition of the batch, this method returns again.
        """
        if self._snapshot is not None:
            self._snapshot.close()
        else:
            self._has_workers = bool(multiprocessing.active_children())
        attempt, self._snapshot = fork_snapshot(self._snapshot)
        if attempt is not None:
            perturb_weights(module, attempt)

    def _watch(self, module: pl.LightningModule, order: Order) -> ModuleParts:
        if order.units is not None:
            names, layers = list(order.units.modules), order.units.number_modules(module)
        else:
            assert order.path is not None
            container = module.get_submodule(order.path)
            names = list(container._modules)
            layers = {n: layer for n, layer in enumerate(container._modules.values()) if layer is not None}
            for number, layer in layers.items():
                layer.register_forward_pre_hook(self._entering(number), prepend=True)
            layers[len(names) - 1].register_forward_hook(self._leaving, always_call=True)
        LayerInputs(layers, lambda: None if self._record is None or not self._span.rows else (self._record, self._span))
        return ModuleParts(module, order.path, layers, names)

    def _enter(self, number: int) -> None:
        """Draw from the streams of a layer of a module that is cut between layers, or of the code around the layers."""
        assert self._order is not None
        self._draws.enter(number, self._order.spans[number])

    def _entering(self, number: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if self._span.rows:
                self._enter(number)

        return enter

    def _leaving(self, *_: Any) -> None:
        if self._span.rows:
            self._enter(AFTER_LAYERS)

    def _before_step(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self._record is None or self._parts is None:
            return
        self._parts.add_gradients(self._record, Phase.STEP_GRADIENT)
        plain = private.plain_optimizer(optimizer)
        numbers = [private.plain_optimizer(each) for each in self.optimizers]
        add_settings(self._record, next((n for n, each in enumerate(numbers) if each is plain), 0), plain)

    def _send(self) -> None:
        """Send the values of the batch, layer by layer."""
        record, parts = self._record, self._parts
        if record is None or parts is None:
            return
        self._record = None
        module = self.lightning_module
        assert module is not None
        parts.add_weights(record, has_buffer=lambda _: True)
        for name, value in private.logged_values(module.trainer).items():
            record.add(Phase.LOG, OUTSIDE, name, value)
        layers = record.layers()
        rounding = Rounding.from_record(record.values, self._cast)
        for layer in layers:
            values, last = record.of_layer(layer), layer == layers[-1]
            continues = self._snapshot is None or not (self._snapshot.is_repetition and self._has_workers)
            answer = Answer(record.number, layer, values, rounding, tuple(self._notes), last, continues)
            self._connection.send_bytes(pickle.dumps(answer, protocol=5))


class Snapshot:
    """The state of the reference before a batch, in a process that waits.

    On request, which is a byte in a pipe, this process forks a process that trains the batch again. The new process can
    be asked for another repetition in the same way, or continues as the reference.

    Args:
        pipe: the pipe to the waiting process. Closing it means that the batch will not be repeated.
        is_repetition: whether the current process trains a batch again.
    """

    def __init__(self, pipe: int, is_repetition: bool) -> None:
        self._pipe = pipe
        self.is_repetition = is_repetition

    def repeat(self, attempt: int) -> NoReturn:
        """Train the batch again in another process.

        The current process ends, or waits to be ended if other processes need it.
        """
        os.write(self._pipe, bytes([attempt]))
        os.close(self._pipe)
        if self.is_repetition:
            os._exit(0)
        while True:  # its loader workers belong to it, and the process group is killed as a whole
            signal.pause()

    def close(self) -> None:
        """End the waiting process."""
        os.close(self._pipe)


def fork_snapshot(before: Snapshot | None) -> tuple[int | None, Snapshot]:
    """Fork a process that keeps the current state.

    Args:
        before: the last snapshot, which has been closed, or None.

    Returns:
        None and the snapshot. In a repetition, the number of the attempt and the snapshot.
    """
    repeated = before is not None and before.is_repetition
    wait, ask = os.pipe()
    if os.fork():
        os.close(wait)
        return None, Snapshot(ask, repeated)
    while True:
        os.close(ask)
        asked = os.read(wait, 1)
        os.close(wait)
        if not asked:
            os._exit(0)
        wait, ask = os.pipe()
        if not os.fork():
            os.close(wait)
            return asked[0], Snapshot(ask, True)


def perturb_weights(module: nn.Module, attempt: int) -> None:
    """Change each weight by a random number of a few roundings, for a repetition of a batch.

    Args:
        module: the module. Weights on `meta` are skipped.
        attempt: the number of the repetition, on which the random numbers depend.
    """
    generator = torch.Generator().manual_seed(attempt)
    amplitude = _PERTURBATION_ROUNDINGS[attempt % len(_PERTURBATION_ROUNDINGS)]
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and not parameter.is_meta:
                eps = torch.finfo(parameter.dtype).eps
                moved = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.data.mul_((1 + amplitude * eps * moved.double()).to(parameter))


def no_room_for(module: nn.Module) -> str:
    """Return the reason why a process cannot train the whole module, or an empty string if it can."""
    if has_meta(module):
        return "the module is made on meta, and no process has its weights"
    needed = _TENSORS_PER_WEIGHT * sum(p.nbytes for p in module.parameters())
    free = psutil.virtual_memory().available
    if needed <= free // 2:
        return ""
    return f"one process takes about {needed / 2**30:.1f} GiB for the whole module, and {free / 2**30:.1f} GiB are free"


def call_after(module: nn.Module, name: str, then: Callable[..., None]) -> Callable[[], None]:
    """Call `then` after a hook of the module, with the arguments of the hook. Return a function that undoes this."""
    hook, own = getattr(module, name), module.__dict__.get(name)

    @wraps(hook)
    def call_both(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        then(*args, **kwargs)
        return result

    module.__dict__[name] = call_both

    def undo() -> None:
        if own is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = own

    return undo
