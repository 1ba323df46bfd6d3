"""Measuring the layers of a module whole, before it is cut, around the user's own training_step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.engine.footprint import tensors_in
from lightning_pipes.engine.profiler import profile_layers, synchronize
from lightning_pipes.engine.rng import forked_rng
from lightning_pipes.ir import Span
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.batches import copied, rows_of, take
from lightning_pipes.trainer.capture import Interceptor, named_step
from lightning_pipes.trainer.decision import LEAST_ROWS
from lightning_pipes.trainer.logs import recorded
from lightning_pipes.trainer.proxy import Layers, StageProxy
from lightning_pipes.trainer.steps import loss_of
from lightning_pipes.trainer.tape import TapedLayer
from lightning_pipes.trainer.unchanged import unchanged

SECONDS = 1.0
"""How long layers are measured, after each has run twice for every number of rows."""
REPEATS = 3
OVERHEAD = 150e-6
"""Seconds that the engine spends before each computation: what it took on a CPU with empty stages."""
WORTH_MEASURING = 0.02
"""Seconds of all layers for a batch, below which another cut would save less than is lost elsewhere."""


class NotWorthItError(Exception):
    """Why layers were not measured."""


@dataclass
class _Around:
    """Seconds of the user's code before and after the layers, forward and backward: of each run."""

    before: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    after: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))


class Measuring:
    """Runs the training step and layers of a whole module on one rank; nothing of it is to be seen afterwards.

    Args:
        path: the pipelined container in the module.
        batch: as a loader gives it; of at least so many samples as are measured.
        rows: the numbers of samples to measure, ascending.
        device: layers are moved there, one after the other.
    """

    def __init__(self, trainer: pl.Trainer, path: str, batch: Any, rows: Sequence[int], device: torch.device) -> None:
        self._trainer = trainer
        self._module = module = trainer.lightning_module
        full = module.get_submodule(path)
        assert isinstance(full, Layers)
        self._path = path
        self._full = full
        self._batch = batch
        self._rows = tuple(rows)
        self._device = device
        self._interceptor = Interceptor(f"self.{path}", loop=isinstance(full, nn.ModuleList))
        self._taped = [TapedLayer(layer, n, lambda *_: nullcontext()) for n, layer in enumerate(full)]
        with_number = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._arguments = (0,) if with_number else ()

    def profile(self, pieces: int | None, split: bool) -> ModelProfile:
        """Seconds and bytes of the layers, and of the user's code before and after them.

        Args:
            pieces: micro-batches of a batch; with None it is measured however short it is.
            split: measure backwards in their two parts too.

        Raises:
            NotWorthItError: a batch is too short for cuts to matter.
        """
        context = self._trainer.precision_plugin.train_step_context
        with (
            forked_rng(self._device),
            unchanged(self._module),
            recorded(self._module),
            context(),
            self._standing_in(),
            torch.enable_grad(),
        ):
            self._outside_to_device()
            self._batch = private.on_device(self._trainer, self._batch)
            most = max(self._rows)
            entering = {most: self._capture(most)}
            seconds, leaving = self._forward(entering[most])
            self._check_worth_it(seconds, pieces, entering[most])
            around = {most: self._around(most, leaving)}
            notes = {}
            for n in self._rows[:-1]:
                try:
                    x = self._capture(n)
                    around[n] = self._around(n, self._forward(x)[1])
                    entering[n] = x
                except Exception:  # as batch normalisation has it, which needs more than one sample
                    notes[LEAST_ROWS] = n + 1
            profile = self._layers(entering, split)
        return replace(_with_ends(profile, around, entering), notes=notes)

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        """In the block the step's call of the layers comes to the interceptor."""
        parent, _, name = self._path.rpartition(".")
        around = self._module.get_submodule(parent)
        setattr(around, name, StageProxy(self._full, (), self._interceptor, f"self.{self._path}"))
        try:
            yield
        finally:
            setattr(around, name, self._full)

    def _outside_to_device(self) -> None:
        if self._device.type != "cpu":
            self._module.to(self._device)  # the layers are not registered now

    def _part(self, rows: int) -> Any:
        return copied(take(self._batch, Span(0, rows), rows_of(self._batch)))

    def _capture(self, rows: int) -> Any:
        return self._interceptor.capture(named_step(self._module, "training_step"), self._part(rows), *self._arguments)

    @contextmanager
    def _there(self, layer: nn.Module) -> Iterator[None]:
        """In the block a layer is on the device, by itself: all of them may not fit."""
        if self._device.type == "cpu":
            yield
            return
        with unchanged(layer):
            layer.to(self._device)
            yield

    def _forward(self, x: Any) -> tuple[float, Any]:
        """Seconds of all layers, and what comes out."""
        seconds, x = 0.0, _leaves(x, False)
        with torch.no_grad():
            for layer in self._taped:
                with self._there(layer):
                    layer(x)  # the first run may take longer
                    took, x = self._timed(partial(layer, x))
                    seconds += took
        return seconds, x

    def _check_worth_it(self, seconds: float, pieces: int | None, x: Any) -> None:
        """Short times are taken again: on a busy machine one may be much too long."""
        for _ in range(REPEATS):
            step = 3 * seconds * (pieces or 0)
            if pieces is None or step > 10 * WORTH_MEASURING:
                return
            if step < WORTH_MEASURING:
                raise NotWorthItError(f"a batch takes its layers about {1e3 * step:.1f} ms, too little to balance")
            seconds = min(seconds, self._forward(x)[0])

    def _around(self, rows: int, leaving: Any) -> _Around:
        """Runs the step around the layers, whose output is `leaving`."""
        found = _Around()
        for repeat in range(-1, REPEATS):
            begun = 0.0
            forward, x = self._timed(lambda: self._capture(rows))
            backward = self._backward([t for t in tensors_in(x) if t.requires_grad])
            y, part = _leaves(leaving, True), self._part(rows)

            def answer(_: Any, y: Any = y) -> Any:
                nonlocal begun
                synchronize(self._device)
                begun = time.perf_counter()
                return y

            out = self._interceptor.supply(named_step(self._module, "training_step"), answer, part, *self._arguments)
            loss, _ = loss_of(out)
            synchronize(self._device)
            after = time.perf_counter() - begun
            after_backward = self._backward([loss])
            if repeat >= 0:
                seconds = (forward, backward, after, after_backward)
                for known, new in zip((*found.before, *found.after), seconds, strict=True):
                    known.append(new)
        return found

    def _backward(self, tensors: Sequence[torch.Tensor]) -> float:
        if not tensors:
            return 0.0
        ones = [torch.ones_like(t) for t in tensors]
        return self._timed(lambda: torch.autograd.backward(tensors, ones))[0]

    def _timed(self, work: Callable[[], Any]) -> tuple[float, Any]:
        synchronize(self._device)
        begun = time.perf_counter()
        result = work()
        synchronize(self._device)
        return time.perf_counter() - begun, result

    def _layers(self, entering: Mapping[int, Any], split: bool) -> ModelProfile:
        names = [f"{name} {type(layer).__name__}" for name, layer in self._full.named_children()]
        optimizers = self._trainer.strategy.optimizers
        measure = partial(
            profile_layers,
            optimizer=private.plain_optimizer(optimizers[0]) if optimizers else None,
            device=self._device,
            split=split,
            repeats=REPEATS,
        )
        values = {n: _leaves(entering[n], False) for n in sorted(entering)}
        if self._device.type == "cpu":
            return measure(self._taped, values, names=names, seconds=SECONDS)
        found: list[ModelProfile] = []
        for layer, name in zip(self._taped, names, strict=True):
            with self._there(layer):
                seconds = SECONDS / len(names)
                found.append(measure([layer], values, names=[name], seconds=seconds, entered=bool(found)))
                with torch.no_grad():
                    values = {n: layer(x) for n, x in values.items()}
        return replace(found[0], layers=tuple(each.layers[0] for each in found))


def _leaves(tree: Any, trained: bool) -> Any:
    """The same values without their history; with `trained` gradients are made for them."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(trained and tensor.is_floating_point())

    return pytree.tree_map_only(torch.Tensor, leaf, tree)


def _with_ends(profile: ModelProfile, around: Mapping[int, _Around], entering: Mapping[int, Any]) -> ModelProfile:
    def end(name: str, seen: Mapping[int, tuple[list[float], list[float]]]) -> LayerProfile:
        forward, backward = (tuple((n, median(both[way])) for n, both in sorted(seen.items())) for way in (0, 1))
        return LayerProfile(name, forward, backward)

    before = end("before", {n: each.before for n, each in around.items()})
    output = tuple((n, float(sum(t.nbytes for t in tensors_in(x)))) for n, x in sorted(entering.items()))
    after = end("after", {n: each.after for n, each in around.items()})
    return replace(profile, before=replace(before, output=output), after=after, overhead=OVERHEAD)
