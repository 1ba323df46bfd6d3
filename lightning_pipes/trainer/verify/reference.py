"""One plain process of Lightning beside rank 0: it trains the same batches and answers with its values.

It is forked when a fit begins, before anything of the pipeline is set up, and goes on with the user's `fit` under
Lightning's own strategy for one device. It shares nothing with the pipeline but the seeds of random numbers.
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
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import nn

from lightning_pipes.engine.compute.rng import AFTER_LAYERS, BEFORE_LAYERS, forked_rng
from lightning_pipes.ir import Span
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.run import StageListener
from lightning_pipes.trainer.module.batches import checksum_batch
from lightning_pipes.trainer.module.deferred import has_meta
from lightning_pipes.trainer.units.whole_step import StreamUnits, WholeStep
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

CPU = torch.device("cpu")
_POLL_SECONDS = 0.2
_TENSORS_PER_WEIGHT = 6
"""Weights, which are copied when they are stepped, their snapshot, gradients, what an optimizer keeps, and what is
sent."""
_AMPLITUDES = (2.0, 4.0, 8.0, 16.0)
"""By how many roundings weights are perturbed when a batch is repeated, in turns."""


@dataclass(frozen=True)
class Order:
    """One batch for the reference to train.

    Attributes:
        number: of the batch, counted since training began.
        rows: its samples.
        path: of the container of the layers; None where the module is cut by units.
        seed, job: of the random streams.
        spans: of the micro-batches, by layer, and before and after the layers.
        units: the units of the step; None where the module is cut between layers.
    """

    number: int
    rows: int
    path: str | None
    seed: int
    job: int
    spans: Mapping[int, Sequence[Span]]
    units: StreamUnits | None = None


@dataclass(frozen=True)
class Repetition:
    """The last batch, to be trained again from the same state, with weights that are rounded in another way.

    Attributes:
        attempt: the number of repetitions before.
    """

    attempt: int


@dataclass(frozen=True)
class Answer:
    """A part of the reference's record.

    Attributes:
        layer: whose values they are.
        values: by key.
        rounding: of the numbers that the batch is computed from.
        notes: remarks about the whole batch.
        last: whether no other part follows.
        continues: whether the process can train the batches after this one. A repetition can't if loader workers
            belong to another process.
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
        error: a traceback.
        too_large: whether one process has no room for the module.
    """

    reason: str
    error: str = ""
    too_large: bool = False


class ReferenceProcess:
    """The reference as rank 0 sees it.

    Args:
        pid: of the process.
        connection: to it.
        folder: an empty one that it may write to; it goes with the process.
    """

    def __init__(self, pid: int, connection: Connection, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._folder = folder
        self._pid = pid
        self._connection = connection
        self._ended: ReferenceEnded | None = None

    def send(self, order: Order | Repetition) -> None:
        """Make it train another batch, or the last one again."""
        with suppress(OSError):  # `receive` says why
            self._connection.send(order)

    def receive(self, check: Callable[[], object]) -> Answer | ReferenceEnded:
        """Return its next answer.

        Args:
            check: called while there is none; raises where other ranks have failed.
        """
        if self._ended is not None:
            return self._ended
        try:
            while not self._connection.poll(_POLL_SECONDS):
                check()
            answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            answer = ReferenceEnded("it was killed, as the kernel does where memory is short")
        if isinstance(answer, ReferenceEnded):
            self._ended = answer
        return answer  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # with its snapshots and repetitions
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._folder.cleanup()


def fork_reference(strategy: Strategy, trainer: pl.Trainer, module: pl.LightningModule) -> ReferenceProcess | None:
    """Fork the reference. It returns twice: with its process, and in that process with None, where the Trainer has a
    plain strategy from then on."""
    here, there = Pipe()
    folder = tempfile.TemporaryDirectory(prefix="lightning_pipes_verify_", ignore_cleanup_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        there.close()
        with suppress(OSError):  # it has done so itself
            os.setpgid(pid, pid)
        return ReferenceProcess(pid, here, folder)
    os.setpgid(0, 0)
    gc.freeze()  # garbage of the other process may have process groups in it, whose end waits for their threads
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
    torch.set_num_threads(1)  # the threads of the other process are not here
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    private.forget_process_groups()
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
        folder: an empty one, for code that asks where logs are.
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
    """Lightning's strategy for one device: it keeps the values of a batch and sends them to rank 0.

    It saves nothing and removes nothing: files belong to the other process.

    Args:
        connection: to rank 0.
        pipeline: the strategy in whose place it is.
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

    # ---- what Lightning calls

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
        self._draws.begin_batch(order.seed, order.job, number, order.rows, order.spans)
        run_step = partial(super().training_step, *args, **kwargs)
        with self._draws.draw_by_sample():
            self._draws.enter(BEFORE_LAYERS)
            if order.units is None:
                out = run_step()
            else:
                step = WholeStep(module, order.units, CPU)
                out = step.run(run_step, batch, self._draws.enter, self._draws.enter_whole)
        self._notes += [f"draws {name}" for name in dict.fromkeys(self._draws.common)]
        add_results(record, out)
        self._span = Span(0, 0)
        return out

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with forked_rng(CPU):
            return super().validation_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._draws.draw_by_sample():  # forwards that run again draw again
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
        call_after(module, "on_train_batch_end", lambda *_, **__: self._send())

    def on_train_end(self) -> None:
        self._next_order()  # it may be to repeat the last batch
        _leave(self._connection, ReferenceEnded("its training ends after fewer batches"))

    def on_exception(self, exception: BaseException) -> None:
        text = "".join(traceback.format_exception(exception))
        _leave(self._connection, ReferenceEnded(f"{type(exception).__name__}: {exception}", text))

    def teardown(self) -> None:
        _leave(self._connection, ReferenceEnded("its training ends after fewer batches"))

    # ---- what is kept

    def _next_order(self) -> Order:
        try:
            order: Order | Repetition = self._connection.recv()
        except EOFError:
            os._exit(0)
        if isinstance(order, Repetition):
            assert self._snapshot is not None
            self._snapshot.repeat(order.attempt)
        return order

    def _take_snapshot(self, module: nn.Module) -> None:
        """Keep the state before a batch in a process of its own. It returns again in each repetition of the batch."""
        if self._snapshot is not None:
            self._snapshot.close()
        else:
            self._has_workers = bool(multiprocessing.active_children())
        attempt, self._snapshot = fork_snapshot(self._snapshot)
        if attempt is not None:
            perturb_weights(module, _AMPLITUDES[attempt % len(_AMPLITUDES)], attempt)

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

    def _entering(self, number: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if self._span.rows:
                self._draws.enter(number)

        return enter

    def _leaving(self, *_: Any) -> None:
        if self._span.rows:
            self._draws.enter(AFTER_LAYERS)

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

    Asked by a byte, the process forks one that trains the batch again. That asks in the same way, or goes on as the
    reference.

    Args:
        pipe: to the process that waits; its end means that nothing will be repeated.
        is_repetition: whether this process trains the batch again.
    """

    def __init__(self, pipe: int, is_repetition: bool) -> None:
        self._pipe = pipe
        self.is_repetition = is_repetition

    def repeat(self, attempt: int) -> NoReturn:
        """Have the batch trained again. This process ends, or waits for the end if others depend on it."""
        os.write(self._pipe, bytes([attempt]))
        os.close(self._pipe)
        if self.is_repetition:
            os._exit(0)
        while True:  # its workers serve it, and the process group is ended as a whole
            signal.pause()

    def close(self) -> None:
        """End the process that waits."""
        os.close(self._pipe)


def fork_snapshot(before: Snapshot | None) -> tuple[int | None, Snapshot]:
    """Fork a process that keeps this moment. Return None and the snapshot; in a repetition the number of the attempt.

    Args:
        before: the last snapshot, which has been closed.
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


def perturb_weights(module: nn.Module, amplitude: float, seed: int) -> None:
    """Change each weight by up to `amplitude` roundings, at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                eps = torch.finfo(parameter.dtype).eps
                moved = torch.rand(parameter.shape, generator=generator) * 2 - 1
                parameter.data.mul_((1 + amplitude * eps * moved.double()).to(parameter.dtype))


def no_room_for(module: nn.Module) -> str:
    """Return why a process can't train the whole module; nothing if it can."""
    if has_meta(module):
        return "the module is made on meta, and no process has its weights"
    needed = _TENSORS_PER_WEIGHT * sum(p.nbytes for p in module.parameters())
    free = psutil.virtual_memory().available
    if needed <= free // 2:
        return ""
    return f"one process takes about {needed / 2**30:.1f} GiB for the whole module, and {free / 2**30:.1f} GiB are free"


def call_after(module: nn.Module, name: str, then: Callable[..., None]) -> Callable[[], None]:
    """Have `then` called after a hook of the module, with its arguments; return what undoes it."""
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
