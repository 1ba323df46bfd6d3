"""Profiles of models on devices, both by name, for plans beyond the available hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipes.cost.layer import LayerProfile, sum_tables
from lightning_pipes.cost.lookup import lookup_name
from lightning_pipes.cost.profile import ModelProfile
from lightning_pipes.cost.table import Table
from lightning_pipes.cost.zoo.chips import ITEMSIZE, Chip, chip_named, dtype_named
from lightning_pipes.cost.zoo.models import named_model
from lightning_pipes.cost.zoo.shapes import FLOAT32, LayerShape
from lightning_pipes.ir import InputError, check_type, short_repr

ROWS = (1, 2, 4, 8, 16, 32, 64)
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}
"""Numbers of float32 that each keeps for a parameter."""


def named_profile(
    name: str,
    device: str | Chip = "A100-80G",
    rows: Sequence[int] = ROWS,
    dtype: str = "bfloat16",
    optimizer: str = "adam",
    recompute: bool = False,
) -> ModelProfile:
    """Return the costs of the layers of the model `name` on `device`, by formula; see `zoo.shapes` and `zoo.chips`.

    Weights, gradients and activations are of type `dtype`; what the optimizer keeps is float32, with a copy of the
    weights where they are smaller.

    Args:
        rows: numbers of samples for which times are given; linear between them.
        dtype: "float32", "bfloat16" or "float16".
        optimizer: "sgd", "momentum" or "adam".
        recompute: each layer keeps its input only and runs forward again before its backward, as with
            `torch.utils.checkpoint` around every layer. A plan's own recompute is of whole stages.

    Raises:
        InputError: an unknown name; lists all names.
    """
    model = named_model(name)
    chip = device if isinstance(device, Chip) else chip_named(device)
    dtype = dtype_named(dtype, chip)
    kept = FLOAT32 * (lookup_name(OPTIMIZERS, optimizer, "optimizer") + (ITEMSIZE[dtype] < FLOAT32))
    check_type("recompute", recompute, bool)
    check_type("rows", rows, Sequence[int])
    if not rows or sorted(set(rows)) != list(rows) or rows[0] < 1:
        raise InputError(f"rows ascend from 1 or more, got {short_repr(rows)}")
    given = model.layer_shapes(ITEMSIZE[dtype], 1 if chip.byte_masks else ITEMSIZE[dtype])
    *layers, loss = (_profile(shape, chip, rows, dtype, kept) for shape in given)
    if recompute:
        layers = [_recomputed(layer, shape) for layer, shape in zip(layers, given, strict=False)]
    again = ", each layer recomputed" if recompute else ""
    return ModelProfile(
        tuple(layers),
        after=loss,
        widened=FLOAT32 / ITEMSIZE[dtype],
        device=chip.name,
        source=f"formula: {model.name}, {model.about}, {dtype}, {optimizer}{again}",
    )


def _profile(shape: LayerShape, chip: Chip, rows: Sequence[int], dtype: str, kept: int) -> LayerProfile:
    def seconds(*parts: int) -> Table:
        return tuple(
            (r, sum(chip.operation_seconds(o, p, r, dtype) for o in shape.operations for p in parts)) for r in rows
        )

    def bytes_of(by_sample: float) -> Table:
        return tuple((r, r * by_sample) for r in rows)

    weights = shape.parameters * ITEMSIZE[dtype]
    state = shape.parameters * kept
    return LayerProfile(
        shape.name,
        forward=seconds(0),
        backward=seconds(1, 2),
        input_backward=seconds(1),
        weight_backward=seconds(2),
        step=chip.transfer_seconds(
            3 * weights + 2 * state
        ),  # a gradient is read, a weight and the state are read and written
        weight_bytes=weights + shape.buffer_bytes,
        gradient_bytes=weights,
        optimizer_bytes=state,
        saved=bytes_of(shape.saved),
        keeps_input=shape.keeps_input,
        output=bytes_of(shape.output),
        working=tuple((r, shape.working_bytes(r)) for r in rows),
    )


def _recomputed(layer: LayerProfile, shape: LayerShape) -> LayerProfile:
    """Return this layer with recomputation: it keeps its input only, and the rest during its backward."""
    return replace(
        layer,
        backward=sum_tables((layer.forward, layer.backward)),
        input_backward=sum_tables((layer.forward, layer.input_backward)),
        saved=tuple((r, r * shape.input) for r, _ in layer.saved),
        keeps_input=False,  # no other layer counts the input
        working=sum_tables((layer.working, layer.saved)),
    )
