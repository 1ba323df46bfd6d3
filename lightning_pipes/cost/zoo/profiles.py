"""Profiles of named models on named devices, for planning on hardware that is not available."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_pipes.cost.layer import LayerProfile, Table, sum_tables
from lightning_pipes.cost.profile import ModelProfile
from lightning_pipes.cost.zoo.models import named_model
from lightning_pipes.cost.zoo.shapes import FLOAT32_BYTES, LayerShape, Operation
from lightning_pipes.ir import InputError, check_type, short_repr
from lightning_pipes.ir.checks import lookup_name

BYTES_PER_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WEIGHTS = 2
_LAUNCH_SECONDS = 5e-6


@dataclass(frozen=True)
class Chip:
    """A device with its peak performance.

    Attributes:
        name: the name of the device.
        flops: for each data type, the peak FLOPs per second.
        bandwidth: the peak bandwidth of the memory in bytes per second.
        memory: the size of the memory in bytes.
        share: the share of `flops` that large matrix products reach, from 0 to 1.
        half_flops: the FLOPs of a product that reaches half of this share.
        bandwidth_share: the share of `bandwidth` that is reached, from 0 to 1.
        launch: the seconds until an operation starts.
        byte_masks: whether a dropout mask has one byte per element, as on GPUs. Otherwise, an element of the mask is as
            large as an element of the activation.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    share: float = 0.6
    half_flops: float = 2e9
    bandwidth_share: float = 0.8
    launch: float = _LAUNCH_SECONDS
    byte_masks: bool = True

    def operation_seconds(self, operation: Operation, part: int, rows: int, dtype: str) -> float:
        """Return the seconds of one part of an operation.

        Args:
            operation: the operation.
            part: 0 for the forward, 1 for the gradients of the inputs, 2 for the gradients of the weights.
            rows: the number of samples.
            dtype: the data type.
        """
        if not operation.kernels[part]:
            return 0.0
        flops = operation.flops[part] * rows
        if part < _WEIGHTS:
            whole = operation.weights if flops else 0.0  # an embedding reads only a few rows of its table
        else:
            whole = 4 * operation.weights  # write the gradient, then read it and add it to the accumulated gradient
        moved = operation.moved[part] * rows + whole
        computing = (flops + self.half_flops) / (self.flops[dtype] * self.share) if flops else 0.0
        return self.launch * operation.kernels[part] + max(computing, self.transfer_seconds(moved))

    def transfer_seconds(self, size: float) -> float:
        """Return the seconds that the memory needs to read or write `size` bytes."""
        return size / (self.bandwidth * self.bandwidth_share)


def dtype_named(name: str, chip: Chip) -> str:
    """Return the full name of a data type.

    Raises:
        InputError: if the data type is unknown, or if the chip has no figures for it.
    """
    check_type("dtype", name, str)
    full = _DTYPE_ALIASES.get(name, name)
    if full not in chip.flops:
        raise InputError(f"{chip.name} has no figures for dtype {short_repr(name)}; it has {', '.join(chip.flops)}")
    return full


def _make_gpu(
    name: str, float32: float, float16: float, bfloat16: float | None, gb_per_second: float, gib: int
) -> Chip:
    """Return a GPU with the given teraFLOPs per second, on tensor cores if it has them for the data type."""
    tera = {"float32": float32, "float16": float16} | ({"bfloat16": bfloat16} if bfloat16 else {})
    return Chip(name, {dtype: 1e12 * most for dtype, most in tera.items()}, 1e9 * gb_per_second, gib * 2**30)


CHIPS = {
    chip.name: chip
    for chip in (
        _make_gpu("A100-40G", 19.5, 312, 312, 1555, 40),
        _make_gpu("A100-80G", 19.5, 312, 312, 2039, 80),
        _make_gpu("V100-16G", 15.7, 125, None, 900, 16),
        _make_gpu("V100-32G", 15.7, 125, None, 900, 32),
        _make_gpu("H100", 67, 989, 989, 3350, 80),
        _make_gpu("H200", 67, 989, 989, 4800, 140),
        _make_gpu("RTX-2080Ti", 13.4, 53.8, None, 616, 11),
        _make_gpu("RTX-3090", 35.6, 71, 71, 936, 24),
        # One core at 3 GHz with two units of 8 multiply-adds each, and its share of the memory bandwidth.
        Chip("CPU-core", {"float32": 96e9}, 10e9, 4 * 2**30, half_flops=1e6, launch=3e-6, byte_masks=False),
    )
}


def chip_named(name: str) -> Chip:
    """Return a device by its name.

    Raises:
        InputError: if there is no such device. The message lists all names.
    """
    return lookup_name(CHIPS, name, "device")


PROFILED_ROWS = (1, 2, 4, 8, 16, 32, 64)
VALUES_PER_PARAMETER = {"sgd": 0, "momentum": 1, "adam": 2}
"""The number of float32 values that each optimizer keeps per parameter."""


def named_profile(
    name: str,
    device: str | Chip = "A100-80G",
    rows: Sequence[int] = PROFILED_ROWS,
    dtype: str = "bfloat16",
    optimizer: str = "adam",
    recompute: bool = False,
) -> ModelProfile:
    """Return the costs of the layers of a named model on a device, computed by formulas.

    `zoo.shapes` and `Chip` describe the formulas. Weights, gradients and activations have the data type `dtype`. The
    optimizer keeps its state in float32, and also a float32 copy of the weights if `dtype` is smaller.

    Args:
        name: the name of the model.
        device: the name of a device, or a `Chip`.
        rows: the numbers of samples for which times are computed. Times are linear between them.
        dtype: "float32", "bfloat16" or "float16".
        optimizer: "sgd", "momentum" or "adam".
        recompute: whether each layer keeps only its input and runs the forward again before its backward, as with
            `torch.utils.checkpoint` around every layer. In contrast, `Plan.recompute` applies to whole stages.

    Raises:
        InputError: if a name is unknown. The message lists all names.
    """
    model = named_model(name)
    chip = device if isinstance(device, Chip) else chip_named(device)
    dtype = dtype_named(dtype, chip)
    kept = FLOAT32_BYTES * (
        lookup_name(VALUES_PER_PARAMETER, optimizer, "optimizer") + (BYTES_PER_ELEMENT[dtype] < FLOAT32_BYTES)
    )
    check_type("recompute", recompute, bool)
    check_type("rows", rows, Sequence[int])
    if not rows or sorted(set(rows)) != list(rows) or rows[0] < 1:
        raise InputError(f"rows ascend from 1 or more, got {short_repr(rows)}")
    given = model.layer_shapes(BYTES_PER_ELEMENT[dtype], 1 if chip.byte_masks else BYTES_PER_ELEMENT[dtype])
    *layers, loss = (_make_layer_profile(shape, chip, rows, dtype, kept) for shape in given)
    if recompute:
        layers = [_recompute_layer(layer, shape) for layer, shape in zip(layers, given, strict=False)]
    again = ", each layer recomputed" if recompute else ""
    return ModelProfile(
        tuple(layers),
        after=loss,
        widened=FLOAT32_BYTES / BYTES_PER_ELEMENT[dtype],
        device=chip.name,
        source=f"formula: {model.name}, {model.about}, {dtype}, {optimizer}{again}",
    )


def _make_layer_profile(shape: LayerShape, chip: Chip, rows: Sequence[int], dtype: str, kept: int) -> LayerProfile:
    def seconds(*parts: int) -> Table:
        return tuple(
            (r, sum(chip.operation_seconds(o, p, r, dtype) for o in shape.operations for p in parts)) for r in rows
        )

    def bytes_of(by_sample: float) -> Table:
        return tuple((r, r * by_sample) for r in rows)

    weights = shape.parameters * BYTES_PER_ELEMENT[dtype]
    state = shape.parameters * kept
    return LayerProfile(
        shape.name,
        forward=seconds(0),
        backward=seconds(1, 2),
        input_backward=seconds(1),
        weight_backward=seconds(2),
        step=chip.transfer_seconds(
            3 * weights + 2 * state
        ),  # read the gradient; read and write the weight and the state
        weight_bytes=weights + shape.buffer_bytes,
        gradient_bytes=weights,
        optimizer_bytes=state,
        saved=bytes_of(shape.saved),
        keeps_input=shape.keeps_input,
        output=bytes_of(shape.output),
        working=tuple((r, shape.working_bytes(r)) for r in rows),
    )


def _recompute_layer(layer: LayerProfile, shape: LayerShape) -> LayerProfile:
    """Return a layer that keeps only its input and recomputes everything else during its backward."""
    return replace(
        layer,
        backward=sum_tables((layer.forward, layer.backward)),
        input_backward=sum_tables((layer.forward, layer.input_backward)),
        saved=tuple((r, r * shape.input) for r, _ in layer.saved),
        keeps_input=False,  # the input is counted in `saved`
        working=sum_tables((layer.working, layer.saved)),
    )
