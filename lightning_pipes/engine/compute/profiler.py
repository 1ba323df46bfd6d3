"""Measures the costs of layers, one after the other, by running them as the engine does."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.cost import LayerProfile, ModelProfile, Table
from lightning_pipes.engine import trees
from lightning_pipes.engine.compute import autograd
from lightning_pipes.engine.compute.autograd import SavedForward
from lightning_pipes.engine.compute.footprint import (
    count_bytes,
    measure_footprint,
    saved_for_backward,
    storage_of,
)
from lightning_pipes.engine.compute.rng import forked_rng
from lightning_pipes.engine.compute.split import backward_inputs
from lightning_pipes.engine.compute.stage import IN_PLACE_ERROR, clone_leaf
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import InputError, Kind, Span
from lightning_pipes.ir.clock import read_seconds

N_LAYER_REPEATS = 5
JOINED_BYTES = 2**21
"""The bytes of the tensor that is joined from two halves to measure the time per byte.

This is large compared with the launch of a kernel, and small compared with a shared cache.
"""
CallLayer = Callable[[nn.Module, Any], Any]
Progress = Callable[[str, float], None]
"""Called with the name of the current measurement and the completed share of all measurements, from 0 to 1."""


@dataclass
class _LayerMeasurements:
    """The measurements of one layer, by number of rows."""

    times: dict[Kind, dict[int, list[float]]] = field(default_factory=lambda: {k: {} for k in Kind})
    saved: dict[int, float] = field(default_factory=dict)
    output: dict[int, float] = field(default_factory=dict)
    working: dict[int, float] = field(default_factory=dict)
    keeps_input: bool = False
    in_place: bool = False
    """Whether the layer works in place on its input, so that it must be given a copy, as in a stage."""

    def median_table(self, kind: Kind) -> Table:
        return tuple((rows, median(found)) for rows, found in sorted(self.times[kind].items()))


def profile_layers(
    layers: Sequence[nn.Module],
    inputs: Mapping[int, Any],
    *,
    names: Sequence[str] = (),
    optimizer: Optimizer | None = None,
    call: CallLayer = lambda layer, x: layer(x),
    device: torch.device | None = None,
    split: bool = False,
    repeats: int = N_LAYER_REPEATS,
    seconds: float = float("inf"),
    entered: bool = False,
    flags: Mapping[int, autograd.Flags] | None = None,
    progress: Progress = lambda what, done: None,
) -> ModelProfile:
    """Return the times and bytes of every layer for every number of rows in `inputs`.

    Each layer runs forward and backward separately, on the output of the previous layer, with the code that the engine
    uses. Weights, buffers, gradients and random states are restored afterwards.

    Args:
        layers: the layers in the order in which they run.
        inputs: the input of the first layer by number of rows; axis 0 of its tensors is rows.
        names: the names of the layers in the profile; by default, their numbers.
        optimizer: an optimizer of the kind and settings whose step is measured; without it, steps take no time and no
            bytes.
        call: runs a layer on its input.
        device: the device of the layers; the CPU by default.
        split: whether to measure the two halves of a split backward (I and W), too.
        repeats: the number of runs for each number of rows, after a warm-up run; the profile contains their median.
        seconds: no run begins after this number of seconds, except the warm-up and first counted run of each number of
            rows.
        entered: whether the input of the first layer is the output of another layer, which already counts its bytes.
        flags: for each tensor of the input of the first layer, by number of rows, whether the backward of this layer
            computes its gradient, because something before the layer is trained. By default, no gradient is computed.
        progress: called before each run.

    Raises:
        InputError: there are no layers or no inputs.
    """
    if not layers or not inputs:
        raise InputError(f"there is nothing to profile: {len(layers)} layers, {len(inputs)} inputs")
    device = device or torch.device("cpu")
    measured = [_LayerMeasurements() for _ in layers]
    entering = dict.fromkeys(inputs, ()) if flags is None else flags
    started = read_seconds()
    total, done = len(inputs) * (repeats + 1), 0
    with forked_rng(device), _unchanged(layers), torch.enable_grad():
        for rows, x in inputs.items():
            _measure_saved(layers, rows, x, entering[rows], measured, call, entered)
            _measure_working(layers, rows, x, entering[rows], measured, call, device)
        for repeat in range(-1, repeats):
            for rows, x in inputs.items():
                done += 1
                if repeat > 0 and read_seconds() - started > seconds:
                    break
                progress(f"{rows} rows", done / total)
                for in_two in (False, True) if split else (False,):
                    _measure_times(layers, rows, x, entering[rows], measured, call, device, in_two, count=repeat >= 0)
        steps = [_step(layer, optimizer, device) for layer in layers]
    given = list(names) or [str(number) for number in range(len(layers))]
    return ModelProfile(
        tuple(_profile(n, each, layer, *s) for n, each, layer, s in zip(given, measured, layers, steps, strict=True)),
        joining=joining_seconds(device),
        device=torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
    )


def joining_seconds(device: torch.device) -> float:
    """Return the measured seconds per byte for joining tensors on a device."""
    halves = [torch.zeros(JOINED_BYTES // 8, device=device) for _ in range(2)]
    times = []
    for _ in range(N_LAYER_REPEATS + 1):
        wait_for_device(device)
        begun = read_seconds()
        torch.cat(halves)
        wait_for_device(device)
        times.append(read_seconds() - begun)
    return median(times[1:]) / JOINED_BYTES


def _profile(name: str, seen: _LayerMeasurements, layer: nn.Module, step: float, optimizer_bytes: int) -> LayerProfile:
    trained = [p for p in layer.parameters() if p.requires_grad]
    return LayerProfile(
        name,
        forward=seen.median_table(Kind.F),
        backward=seen.median_table(Kind.B),
        input_backward=seen.median_table(Kind.I),
        weight_backward=seen.median_table(Kind.W),
        step=step,
        weight_bytes=sum(t.nbytes for t in (*layer.parameters(), *layer.buffers())),
        gradient_bytes=sum(p.nbytes for p in trained),
        optimizer_bytes=optimizer_bytes,
        saved=tuple(sorted(seen.saved.items())),
        keeps_input=seen.keeps_input,
        output=tuple(sorted(seen.output.items())),
        working=tuple(sorted(seen.working.items())),
    )


def _copy_input(x: Any) -> Any:
    """Return a copy of an input, because the first layer may change its input."""
    return trees.map_tensors(torch.clone, x)


def _enter_layer(seen: _LayerMeasurements, x: Any, flags: autograd.Flags, saved: SavedForward) -> Any:
    """Return the input of a layer, in which the tensors that want gradients are leaves of a new graph."""
    x = autograd.enter_stage(x, flags, saved) if flags else x
    return trees.map_tensors(clone_leaf, x) if seen.in_place else x


def gradient_flags(layer: nn.Module, x: Any, flags: autograd.Flags) -> autograd.Flags:
    """Return, for each tensor of the output of a layer, whether its gradient is needed.

    Args:
        layer: the layer, which runs once.
        x: the input of the layer, which is not changed.
        flags: for each tensor of the input, whether its gradient is needed.
    """
    with torch.enable_grad():
        return _run_forward(layer, 0, _copy_input(x), flags, _LayerMeasurements(), lambda layer, x: layer(x))[1]


def _run_forward(
    layer: nn.Module, rows: int, x: Any, flags: autograd.Flags, seen: _LayerMeasurements, call: CallLayer
) -> tuple[Any, autograd.Flags]:
    """Return the output of a layer without its graph, and note in `seen` whether the layer works in place."""
    saved = SavedForward(Span(0, rows), None)
    try:
        out = call(layer, _enter_layer(seen, x, flags, saved))
    except RuntimeError as error:
        if IN_PLACE_ERROR not in str(error):
            raise
        seen.in_place, saved = True, SavedForward(Span(0, rows), None)
        out = call(layer, _enter_layer(seen, x, flags, saved))
    return autograd.leave_stage(out, saved)


def _measure_times(
    layers: Sequence[nn.Module],
    rows: int,
    x: Any,
    flags: autograd.Flags,
    measured: Sequence[_LayerMeasurements],
    call: CallLayer,
    device: torch.device,
    in_two: bool,
    count: bool,
) -> None:
    span = Span(0, rows)

    def run_timed(layer: int, kind: Kind, work: Callable[[], Any]) -> Any:
        wait_for_device(device)
        begun = read_seconds()
        result = work()
        wait_for_device(device)
        if count:
            measured[layer].times[kind].setdefault(rows, []).append(read_seconds() - begun)
        return result

    x = _copy_input(x)
    for number, layer in enumerate(layers):
        saved = SavedForward(span, None)

        x = _enter_layer(measured[number], x, flags, saved)

        def forward(layer: nn.Module = layer, saved: SavedForward = saved, x: Any = x) -> Any:
            return autograd.leave_stage(call(layer, x), saved)

        x, flags = run_timed(number, Kind.STEP if in_two else Kind.F, forward)
        if not any(flags):
            continue  # no layer so far is trained
        # Backward runs directly after the layer's forward. If it ran after the forwards of all layers, the time of the
        # layer at the peak of activations would include allocating memory again that was returned to the system.
        records = [(saved, [torch.ones_like(t) for t, flag in zip(tensors_in(x), flags, strict=True) if flag])]
        if in_two:
            left = run_timed(number, Kind.I, partial(backward_inputs, records, False))
            run_timed(number, Kind.W, left.compute)
        else:
            run_timed(number, Kind.B, partial(autograd.backward, records, False))


def _measure_saved(
    layers: Sequence[nn.Module],
    rows: int,
    x: Any,
    flags: autograd.Flags,
    measured: Sequence[_LayerMeasurements],
    call: CallLayer,
    entered: bool,
) -> None:
    """Measure the bytes that every layer saves for backward, and the bytes of its output.

    A tensor that the previous layer has already saved is not counted again.
    """
    x = _copy_input(x)
    weights = {storage_of(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    counted = {storage_of(t) for t in tensors_in(x)} if entered else set()
    for layer, seen in zip(layers, measured, strict=True):
        given = {storage_of(t) for t in tensors_in(x)}
        with saved_for_backward() as found:
            x, flags = _run_forward(layer, rows, x, flags, seen, call)
        seen.keeps_input = bool(given & found.keys() & counted)
        seen.saved[rows] = sum(size for _, size in found.keys() - weights - counted)
        seen.output[rows] = sum(t.nbytes for t in tensors_in(x))
        counted = (counted | found.keys()) & {storage_of(t) for t in tensors_in(x)}  # the storages that are still alive


def _measure_working(
    layers: Sequence[nn.Module],
    rows: int,
    x: Any,
    flags: autograd.Flags,
    measured: Sequence[_LayerMeasurements],
    call: CallLayer,
    device: torch.device,
) -> None:
    """Measure the temporary bytes of every layer while it runs, without saved tensors and outputs."""
    x = _copy_input(x)
    for layer, seen in zip(layers, measured, strict=True):
        saved = SavedForward(Span(0, rows), None)
        for p in layer.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None  # as after the first micro-batch
        with measure_footprint(device) as bytes_:
            x, flags = autograd.leave_stage(call(layer, _enter_layer(seen, x, flags, saved)), saved)
            forward = bytes_.peak_bytes - bytes_.live_bytes
            gradients = [torch.ones_like(t) for t, flag in zip(tensors_in(x), flags, strict=True) if flag]
            bytes_.reset_peak()
            held = bytes_.live_bytes
            autograd.backward([(saved, gradients)], False)
            backward = bytes_.peak_bytes - held
        seen.working[rows] = max(forward, backward, 0)
        for p in layer.parameters():
            p.grad = None


def _step(layer: nn.Module, optimizer: Optimizer | None, device: torch.device) -> tuple[float, int]:
    """Measure a step of such an optimizer on copies of the layer's weights.

    Returns:
        The seconds of the second step, and the bytes of the optimizer state.
    """
    own = _step_copy(layer, optimizer)
    if own is None:
        return 0.0, 0
    wait_for_device(device)
    begun = read_seconds()
    own.step()
    wait_for_device(device)
    return read_seconds() - begun, sum(map(count_bytes, _state_tensors(own)))


def optimizer_state(layer: nn.Module, optimizer: Optimizer | None) -> list[torch.Tensor]:
    """Return the state that such an optimizer has for the weights of a layer after a step.

    Neither the optimizer nor the layer is changed.
    """
    own = _step_copy(layer, optimizer)
    return [] if own is None else _state_tensors(own)


def _step_copy(layer: nn.Module, optimizer: Optimizer | None) -> Optimizer | None:
    """Return a copy of the optimizer that has stepped copies of the weights, or None if there is no weight to step."""
    trained = [p for p in layer.parameters() if p.requires_grad]
    if optimizer is None or not trained:
        return None
    copies = [nn.Parameter(p.detach().clone()) for p in trained]
    for p in copies:
        p.grad = torch.zeros_like(p)
    own = copy.copy(optimizer)  # a copy keeps all settings, even those that the constructor does not accept
    own.param_groups = [{**optimizer.param_groups[0], "params": copies}]
    own.state = defaultdict(dict)
    own.step()
    return own


def _state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]


@contextmanager
def _unchanged(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Restore gradients and buffers after the block."""
    layers = list(layers)
    gradients = [(p, p.grad) for layer in layers for p in layer.parameters()]
    buffers = [(b, b.clone()) for layer in layers for b in layer.buffers()]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in gradients:
            p.grad = grad
        with torch.no_grad():
            for b, before in buffers:
                b.copy_(before)


def wait_for_device(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
