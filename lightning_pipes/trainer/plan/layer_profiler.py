"""Measurement of the times and bytes of the layers of a whole module, around the user's training_step, on all ranks."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple, TypeGuard, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.cost.profile import MIN_ROWS_NOTE
from lightning_pipes.engine import trees
from lightning_pipes.engine.compute.profiler import gradient_flags, profile_layers, wait_for_device
from lightning_pipes.engine.compute.rng import RngUse, forked_rng
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.cuts.layers.capture import CacheSwitch, Interceptor, named_step
from lightning_pipes.trainer.cuts.layers.proxy import Layers, StageProxy
from lightning_pipes.trainer.cuts.layers.tape import TapedLayer, identify_layer
from lightning_pipes.trainer.cuts.steps import loss_of
from lightning_pipes.trainer.data.batches import copy_batch, rows_of, take_samples
from lightning_pipes.trainer.data.sample import NoSampleError
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.results.logs import recorded
from lightning_pipes.trainer.results.loss_weights import compare_losses
from lightning_pipes.trainer.user.hooks import has_hooks
from lightning_pipes.trainer.user.unchanged import evaluation_mode, keep_unchanged

T = TypeVar("T")

LAYER_SECONDS = 1.0
"""The seconds for which layers are measured, after each layer has run twice with every number of samples."""
MIN_LAYER_RUNS = 3
N_OUTER_RUNS = 5
"""The number of runs of the code around the layers, which no trial measures again."""
OVERHEAD_SECONDS = 150e-6
"""The seconds that the engine needs before each computation, measured on a CPU with empty stages."""
MIN_MEASURED_SECONDS = 0.02
"""The seconds of all layers per batch below which another cut would save less than other work costs."""


class NotMeasuredError(Exception):
    """The reason why no profile exists, the same on all ranks.

    Attributes:
        quiet: whether the reason needs no message.
    """

    def __init__(self, reason: str, quiet: bool = False) -> None:
        super().__init__(reason)
        self.quiet = quiet


class UnsuitableContainerError(NotMeasuredError):
    """The reason why the step cannot run the layers of a container in a pipeline, the same on all ranks.

    Attributes:
        reason: the text without what the user can do about it.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_HOOKS_BEFORE_STEP = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    *_TRANSFER_HOOKS,
)


def repeats_in_training(error: BaseException | None, trainer: pl.Trainer) -> TypeGuard[RuntimeError]:
    """Return whether an error in a measurement will also end training.

    This is the case if torch rejected the input of a layer, for example because of its shape, and no hook of the user
    can change the layers or the input before the first step. The layers run on all ranks, so the result is the same on
    all of them.
    """
    if type(error) is not RuntimeError or LayerProfiler._time_forward.__code__ not in (
        frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)
    ):
        return False
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    return not has_hooks(trainer.lightning_module, private.callbacks(trainer), _HOOKS_BEFORE_STEP) and not any(
        is_overridden(name, data, pl.LightningDataModule) for name in _TRANSFER_HOOKS if data is not None
    )


class CollectiveCall:
    """Calls a function on all ranks, and fails on all ranks if it fails on one.

    Args:
        control: the control channel of all ranks.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self.is_alone = control.size == 1

    def __call__(self, work: Callable[[], T]) -> list[T]:
        """Return the results of `work()` on every rank, once all ranks have finished it.

        Raises:
            NotMeasuredError: the function raised on any rank. The error of this rank is the cause.
            UnsuitableContainerError: the function raised a PipelineError.
        """
        reason, quiet, refused, value = "", False, "", None
        cause: Exception | None = None
        try:
            value = work()
        except NotMeasuredError as why:
            reason, quiet = str(why), why.quiet
        except Exception as error:  # an error of the user's code, which training will raise with more context
            text = str(error).partition("\n")[0]
            refused = error.reason.partition("\n")[0] if isinstance(error, PipelineError) else ""
            reason = text if refused or isinstance(error, NoSampleError) else f"{type(error).__name__}: {text}"
            cause = error
        of_ranks = self._control.all_gather((reason, quiet, refused, value))
        try:
            for reason, quiet, refused, _ in of_ranks:
                if reason:
                    found = UnsuitableContainerError(reason, refused) if refused else NotMeasuredError(reason, quiet)
                    raise found from cause
        finally:
            del cause  # the traceback of the error holds this frame
        return [value for _, _, _, value in of_ranks]


@dataclass
class _Around:
    """The seconds of the user's code before and after the layers in each run, as forward and backward times."""

    before: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    after: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))


class OperationCounts(NamedTuple):
    """The floating-point operations of one forward of a step.

    A part is a module without children, or all code outside of modules.

    Attributes:
        inside: the operations in the layers.
        around: the operations around the layers.
        largest: the operations of the largest part around the layers.
    """

    inside: int
    around: int
    largest: int


class LayerProfiler:
    """Runs the training step and the layers of a whole module, and restores the module at the end of its `with` block.

    All methods are collective: all ranks make one profiler and make the same calls at the same time, so that each rank
    computes with its threads next to all other ranks, as in training.

    Args:
        trainer: the Trainer.
        path: the path of the pipelined container in the module.
        batch: a batch from a loader, with at least the largest number of samples in `rows`.
        rows: the numbers of samples to measure, in ascending order.
        device: the device to which layers are moved, one after the other.
        collective: makes calls on all ranks.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        path: str,
        batch: Any,
        rows: Sequence[int],
        device: torch.device,
        collective: CollectiveCall,
    ) -> None:
        self._trainer = trainer
        self._module = module = trainer.lightning_module
        full = module.get_submodule(path)
        assert isinstance(full, Layers)
        self._path = path
        self._full = full
        self._batch = batch
        self._rows = tuple(rows)
        self._device = device
        self._collective = collective
        self._interceptor = Interceptor(f"self.{path}", isinstance(full, nn.ModuleList), CacheSwitch(module))
        self._taped = [TapedLayer(layer, n) for n, layer in enumerate(full)]
        with_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._arguments = (0,) if with_number else ()
        self._logs = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        self._undo = ExitStack()
        self._writes = False
        """Whether the forward of a layer has changed weights."""
        self._entering_flags: dict[int, tuple[bool, ...]] = {}
        """For each tensor of the input of the layers, by number of samples, whether its gradient is needed."""

    def __enter__(self) -> LayerProfiler:
        with ExitStack() as stack:
            stack.enter_context(forked_rng(self._device))
            stack.enter_context(keep_unchanged(self._module, skip=self._full))  # each layer is protected while it runs
            stack.enter_context(recorded(self._module))
            stack.enter_context(without_loggers())
            stack.enter_context(self._trainer.precision_plugin.train_step_context())
            stack.enter_context(self._intercept_layers())
            stack.enter_context(torch.enable_grad())
            self._collective(self._prepare)
            self._undo = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.__exit__(kind, error, trace)

    def profile(self, pieces: int | None, split: bool) -> ModelProfile:
        """Return the seconds and bytes of the layers on this rank, and of the user's code before and after them.

        Rank 0 does not run the code after the layers, because its loggers would write. Its profile has no times for
        this code.

        Args:
            pieces: the number of micro-batches of a batch, or None to measure the layers even if they take little time.
            split: whether to also measure the two parts of backwards.

        Raises:
            NotMeasuredError: the layers take too little time for cuts to matter, or the user's code failed.
        """
        most = max(self._rows)
        entering = {most: self.capture_input(most)}
        leaving: list[Any] = []
        self._check_worth_it(lambda: self._time_forward(entering[most], leaving), pieces)
        around = {most: self._time_around(most, leaving)}
        notes = {}
        for n in self._rows[:-1]:
            try:
                entering[n] = self.capture_input(n)
                self._collective(partial(self._time_forward, entering[n], leaving))
                around[n] = self._time_around(n, leaving)
            except NotMeasuredError:  # such as batch normalization, which needs more than one sample
                entering.pop(n, None)
                notes[MIN_ROWS_NOTE] = n + 1
        found: list[ModelProfile] = []
        self._collective(lambda: found.append(self._profile_layers(entering, split)))
        return replace(_add_ends(found[0], around, entering), notes=notes)

    def check_step(self) -> None:
        """Run the step once with its layers one after the other, and the code after them on ranks without loggers.

        Raises:
            NotMeasuredError: the user's code failed on any rank.
            UnsuitableContainerError: the step does not call the layers once and in order, or uses them in another way.
        """
        self._collective(lambda: self._run_step(self._run_layers))

    def _run_layers(self, x: Any) -> Any:
        with torch.no_grad():
            for layer in self._taped:
                with self._place_layer(layer):
                    x = layer(x)
        return x

    def _run_step(self, run_layers: Callable[[Any], Any]) -> None:
        rows = max(self._rows)
        x = run_layers(_detach_tensors(self._capture(rows), False))
        if not self._logs or self._collective.is_alone:
            y, step = _detach_tensors(x, True), named_step(self._module, "training_step")
            self._interceptor.run_with_answer(step, lambda _: y, self._take_rows(rows), *self._arguments, apart=True)

    def is_without_gradients(self) -> bool:
        """Return whether training needs no gradients of the layers, as in a frozen teacher.

        This is the case if all weights of the layers are frozen and no gradient passes through them to weights before
        them.
        """
        if any(weight.requires_grad for weight in self._full.parameters()):
            return False
        passing = self._collective(lambda: any(t.requires_grad for t in tensors_in(self._capture(max(self._rows)))))
        return not any(passing)

    def compare_losses(self) -> str:
        """Return a description of the losses if no sum or mean of the losses of parts reproduces the loss of a batch.

        The step runs in evaluation mode. The result is empty if the losses agree, if the step draws random numbers, or
        if it cannot run with parts of a batch.
        """
        return next(filter(None, self._collective(self._compare_losses)), "")

    def _compare_losses(self) -> str:
        rows, module = rows_of(self._batch, cut=False), self._module
        if rows < 2 or (self._logs and not self._collective.is_alone):
            return ""
        step, draws = named_step(module, "training_step"), RngUse(self._device)

        def compute(parts: list[Any]) -> list[torch.Tensor]:
            draws.start()
            values = [self._interceptor.capture(step, copy_batch(part), *self._arguments) for part in parts]
            for layer in self._taped:
                with self._place_layer(layer, weights=self._writes):
                    values = [layer(x) for x in values]
            outs = [
                self._interceptor.run_with_answer(step, partial(_answer, y), copy_batch(part), *self._arguments)
                for y, part in zip(values, parts, strict=True)
            ]
            draws.stop()
            return [loss_of(out)[0].detach() for out in outs]

        try:
            with evaluation_mode(module), evaluation_mode(self._full), torch.no_grad():
                found = compare_losses(module, self._batch, rows, compute)
        except Exception:  # an error of the user's code with other numbers of samples, which the first batch reports
            return ""
        return "" if draws.was_used else found.unexplained

    def count_operations(self) -> OperationCounts:
        """Check the step, and return the floating-point operations of its forward.

        Only matrix products and convolutions are counted.

        Raises:
            NotMeasuredError, UnsuitableContainerError: see `check_step`.
        """
        counted = self._collective(self._count_operations)
        return max(counted, key=lambda each: each.around)  # ranks with loggers did not run the code after the layers

    def _count_operations(self) -> OperationCounts:
        marks, begun, parts = list[int](), dict[int, int](), Counter[int]()  # by id, because metrics hash their state

        def begin(part: nn.Module, _: Any) -> None:
            begun[id(part)] = counter.get_total_flops()

        def end(part: nn.Module, *_: Any) -> None:
            parts[id(part)] += counter.get_total_flops() - begun[id(part)]

        def run_layers(x: Any) -> Any:
            marks.append(counter.get_total_flops())
            x = self._run_layers(x)
            marks.append(counter.get_total_flops())
            parts.clear()  # the step starts again
            return x

        with FlopCounterMode(display=False) as counter, ExitStack() as hooks:
            for part in self._module.modules():
                if not [*part.children()]:
                    hooks.callback(part.register_forward_pre_hook(begin).remove)
                    hooks.callback(part.register_forward_hook(end).remove)
            self._run_step(run_layers)
            marks.append(counter.get_total_flops())
        inside, around = marks[-2] - marks[-3], marks[-1] - marks[-2]
        functions = around - parts.total()  # functions that are called with weights of the module
        return OperationCounts(inside, around, max([functions, *parts.values()]))

    def capture_input(self, rows: int) -> Any:
        """Return the input of the layers for `rows` samples.

        Raises:
            NotMeasuredError: the user's code failed on any rank.
        """
        found: list[Any] = []
        self._collective(lambda: found.append(self._capture(rows)))
        self._entering_flags[rows] = tuple(t.requires_grad for t in tensors_in(found[0]))
        return _detach_tensors(found[0], False)

    @contextmanager
    def place_layers(self, layers: Sequence[int]) -> Iterator[list[nn.Module]]:
        """Move layers to the device for the block.

        Their weights are only copied if a layer has written to weights before.
        """
        with ExitStack() as stack:
            yield [stack.enter_context(self._place_layer(self._taped[n], weights=self._writes)) for n in layers]

    @contextmanager
    def _intercept_layers(self) -> Iterator[None]:
        """Redirect the step's call of the layers to the interceptor within the block."""
        parent, _, name = self._path.rpartition(".")
        around = self._module.get_submodule(parent)
        setattr(around, name, StageProxy(self._full, (), self._interceptor, f"self.{self._path}"))
        try:
            yield
        finally:
            setattr(around, name, self._full)

    def _prepare(self) -> None:
        if self._device.type != "cpu":
            self._module.to(self._device)  # the layers are not registered at this point
        self._batch = private.on_device(self._trainer, self._batch)

    def _take_rows(self, rows: int) -> Any:
        return copy_batch(take_samples(self._batch, Span(0, rows), rows_of(self._batch, cut=False)))

    def _capture(self, rows: int) -> Any:
        return self._interceptor.capture(
            named_step(self._module, "training_step"), self._take_rows(rows), *self._arguments
        )

    @contextmanager
    def _place_layer(self, layer: nn.Module, weights: bool = True) -> Iterator[nn.Module]:
        """Move one layer to the device for the block, because all layers may not fit, and restore it afterwards."""
        with keep_unchanged(layer, weights=weights) as changed:
            if self._device.type != "cpu":
                layer.to(self._device)
            yield layer
        self._writes = self._writes or bool(changed)

    def time_layers(self, batch: Any) -> float:
        """Return the seconds of a forward of all layers for another batch, the same on all ranks.

        Raises:
            NotMeasuredError: the user's code failed on any rank.
        """
        usual, self._batch = self._batch, private.on_device(self._trainer, batch)
        try:
            entering, seconds = self.capture_input(rows_of(batch, cut=False)), list[float]()
            for _ in range(MIN_LAYER_RUNS):
                found = self._collective(partial(self._time_forward, entering, []))
                seconds.append(sum(found) / len(found))
        finally:
            self._batch = usual
        return min(seconds)

    def _time_forward(self, x: Any, leaving: list[Any]) -> float:
        """Return the seconds of all layers. `leaving` contains only their output afterwards."""
        x = trees.map_tensors(torch.clone, x)
        known: dict[Any, float] = {}
        seconds = 0.0
        with torch.no_grad():
            for number, layer in enumerate(self._taped):
                kind = identify_layer(layer.layer, number, x)
                with self._place_layer(layer):
                    if kind not in known:
                        layer(x)  # the first run may take longer
                        known[kind], x = self._time_call(partial(layer, x))
                    else:
                        x = layer(x)
                seconds += known[kind]
        leaving[:] = [x]
        return seconds

    def _check_worth_it(self, forward: Callable[[], float], pieces: int | None) -> None:
        """Run the layers at least once, and stop if they take too little time.

        Short times are measured again, because a single measurement may be much too long on a busy machine.
        """
        seconds = float("inf")
        for _ in range(1 + MIN_LAYER_RUNS):
            found = self._collective(forward)
            seconds = min(seconds, sum(found) / len(found))
            step = 3 * seconds * (pieces or 0)
            if pieces is None or step > 10 * MIN_MEASURED_SECONDS:
                return
            if step < MIN_MEASURED_SECONDS:
                what = f"the layers take about {1e3 * step:.1f} ms per batch, too little to balance"
                raise NotMeasuredError(what, quiet=True)

    def _time_around(self, rows: int, leaving: Sequence[Any]) -> _Around:
        """Measure the step around the layers, with the output of the layers in `leaving`."""
        found = _Around()
        self._collective(partial(self._run_around, rows, leaving[0], found))
        return found

    def _run_around(self, rows: int, leaving: Any, found: _Around) -> None:
        for repeat in range(-1, N_OUTER_RUNS):
            forward, x = self._time_call(lambda: self._capture(rows))
            backward = self._backward([t for t in tensors_in(x) if t.requires_grad])
            after, after_backward = self._run_after(rows, leaving) if not self._logs else self._stand_in_for_after(x)
            if repeat >= 0:
                found.before[0].append(forward)
                found.before[1].append(backward)
                if not self._logs:
                    found.after[0].append(after)
                    found.after[1].append(after_backward)

    def _run_after(self, rows: int, leaving: Any) -> tuple[float, float]:
        begun = 0.0
        y, part = _detach_tensors(leaving, True), self._take_rows(rows)

        def answer(_: Any) -> Any:
            nonlocal begun
            out = trees.map_tensors(torch.clone, y)  # the user's code may change it in place
            wait_for_device(self._device)
            begun = read_seconds()
            return out

        out = self._interceptor.run_with_answer(
            named_step(self._module, "training_step"), answer, part, *self._arguments
        )
        loss, _ = loss_of(out)
        wait_for_device(self._device)
        return read_seconds() - begun, self._backward([loss])

    def _stand_in_for_after(self, x: Any) -> tuple[float, float]:
        """Keep this rank busy while other ranks run code that must not run here."""
        with torch.no_grad(), self._place_layer(self._taped[0]) as layer:
            layer(_detach_tensors(x, False))
        return 0.0, 0.0

    def _backward(self, tensors: Sequence[torch.Tensor]) -> float:
        if not tensors:
            return 0.0
        ones = [torch.ones_like(t) for t in tensors]
        return self._time_call(lambda: torch.autograd.backward(tensors, ones))[0]

    def _time_call(self, work: Callable[[], Any]) -> tuple[float, Any]:
        wait_for_device(self._device)
        begun = read_seconds()
        result = work()
        wait_for_device(self._device)
        return read_seconds() - begun, result

    def _profile_layers(self, entering: Mapping[int, Any], split: bool) -> ModelProfile:
        names = [f"{name} {type(layer).__name__}" for name, layer in self._full.named_children()]
        optimizers = self._trainer.strategy.optimizers
        optimizer = private.plain_optimizer(optimizers[0]) if optimizers else None
        values = {n: entering[n] for n in sorted(entering)}
        known: dict[Any, ModelProfile] = {}
        found: list[LayerProfile] = []
        flags = {n: self._entering_flags[n] for n in values}
        known_flags: dict[Any, dict[int, tuple[bool, ...]]] = {}
        for number, (layer, name) in enumerate(zip(self._taped, names, strict=True)):
            kind = (bool(number), *flags.values(), *(identify_layer(layer.layer, number, x) for x in values.values()))
            with self._place_layer(layer):
                if kind not in known:
                    known[kind] = profile_layers(
                        [layer],
                        values,
                        optimizer=optimizer,
                        device=self._device,
                        split=split,
                        repeats=MIN_LAYER_RUNS,
                        seconds=LAYER_SECONDS / len(names),
                        entered=bool(number),
                        flags=flags,
                    )
                    known_flags[kind] = {n: gradient_flags(layer, x, flags[n]) for n, x in values.items()}
                with torch.no_grad():
                    values = {n: layer(x) for n, x in values.items()}
            found.append(replace(known[kind].layers[0], name=name))
            flags = known_flags[kind]
        return replace(next(iter(known.values())), layers=tuple(found))


@contextmanager
def without_loggers() -> Iterator[None]:
    """Disable `logger.experiment` on rank 0 within the block, as on other ranks."""
    rank = rank_zero_only.rank  # type: ignore[attr-defined]
    rank_zero_only.rank = rank or 1  # type: ignore[attr-defined]
    try:
        yield
    finally:
        rank_zero_only.rank = rank  # type: ignore[attr-defined]


def _answer(y: Any, _: Any) -> Any:
    """Return the known output of the layers."""
    return y


def _detach_tensors(tree: Any, trained: bool) -> Any:
    """Return the same values without their autograd history. With `trained`, they require gradients."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(trained and tensor.is_floating_point())

    return trees.map_tensors(leaf, tree)


def _add_ends(profile: ModelProfile, around: Mapping[int, _Around], entering: Mapping[int, Any]) -> ModelProfile:
    def end(name: str, seen: Mapping[int, tuple[list[float], list[float]]]) -> LayerProfile:
        forward, backward = (
            tuple((n, median(both[way])) for n, both in sorted(seen.items()) if both[way]) for way in (0, 1)
        )
        return LayerProfile(name, forward, backward)

    before = end("before", {n: each.before for n, each in around.items()})
    output = tuple((n, float(sum(t.nbytes for t in tensors_in(x)))) for n, x in sorted(entering.items()))
    after = end("after", {n: each.after for n, each in around.items()})
    return replace(profile, before=replace(before, output=output), after=after, overhead=OVERHEAD_SECONDS)
