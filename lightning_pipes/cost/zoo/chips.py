"""Devices by name, and the seconds that they need for an operation of known shape.

An operation takes the device's launch time, plus the longer of its FLOPs and its bytes at the bandwidth of memory.
Large
products reach a share of the peak, small ones less: a product of `half_flops` reaches half of that share, as if each
product had `half_flops` more. The peaks are the makers' public figures, dense. The shares are guesses within the range
that well-tuned training reports, so the result is a plausible device and no measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_pipes.cost.lookup import lookup_name
from lightning_pipes.cost.zoo.shapes import Operation
from lightning_pipes.ir import InputError, check_type, short_repr

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_WEIGHTS = 2
_LAUNCH = 5e-6


@dataclass(frozen=True)
class Chip:
    """A device with its peak figures.

    Attributes:
        flops: at most, per second, by type of number.
        bandwidth: of its memory, bytes per second.
        memory: bytes.
        share: of `flops` that large matrix products reach, 0 to 1.
        half_flops: of a product that reaches half of that share.
        bandwidth_share: of `bandwidth` that is reached, 0 to 1.
        launch: seconds until an operation begins.
        byte_masks: whether dropout keeps a byte for each element, as on GPUs, or as much as an activation.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    share: float = 0.6
    half_flops: float = 2e9
    bandwidth_share: float = 0.8
    launch: float = _LAUNCH
    byte_masks: bool = True

    def operation_seconds(self, operation: Operation, part: int, rows: int, dtype: str) -> float:
        """Return the seconds of an operation for `rows` samples. Part 0 is its forward, 1 the gradients of its inputs,
        2 those of its weights."""
        if not operation.kernels[part]:
            return 0.0
        flops = operation.flops[part] * rows
        if part < _WEIGHTS:
            whole = operation.weights if flops else 0.0  # an embedding reads some rows of its table only
        else:
            whole = 4 * operation.weights  # a gradient is written, and read and added to the sum of earlier ones
        moved = operation.moved[part] * rows + whole
        computing = (flops + self.half_flops) / (self.flops[dtype] * self.share) if flops else 0.0
        return self.launch * operation.kernels[part] + max(computing, self.transfer_seconds(moved))

    def transfer_seconds(self, size: float) -> float:
        """Return the seconds that memory takes to read or write `size` bytes."""
        return size / (self.bandwidth * self.bandwidth_share)


def dtype_named(name: str, chip: Chip) -> str:
    """Return the full name of a type of numbers.

    Raises:
        InputError: the type is unknown, or the chip has no figure for it.
    """
    check_type("dtype", name, str)
    full = _ALIASES.get(name, name)
    if full not in chip.flops:
        raise InputError(f"{chip.name} has no figures for dtype {short_repr(name)}; it has {', '.join(chip.flops)}")
    return full


def _gpu(name: str, float32: float, float16: float, bfloat16: float | None, gb_per_second: float, gib: int) -> Chip:
    """Return a GPU, given teraFLOPs per second; those of its tensor cores where it has some for the type."""
    tera = {"float32": float32, "float16": float16} | ({"bfloat16": bfloat16} if bfloat16 else {})
    return Chip(name, {dtype: 1e12 * most for dtype, most in tera.items()}, 1e9 * gb_per_second, gib * 2**30)


CHIPS = {
    chip.name: chip
    for chip in (
        _gpu("A100-40G", 19.5, 312, 312, 1555, 40),
        _gpu("A100-80G", 19.5, 312, 312, 2039, 80),
        _gpu("V100-16G", 15.7, 125, None, 900, 16),
        _gpu("V100-32G", 15.7, 125, None, 900, 32),
        _gpu("H100", 67, 989, 989, 3350, 80),
        _gpu("H200", 67, 989, 989, 4800, 140),
        _gpu("RTX-2080Ti", 13.4, 53.8, None, 616, 11),
        _gpu("RTX-3090", 35.6, 71, 71, 936, 24),
        # One core at 3 GHz with two units for 8 products and sums each, and its share of the memory's bandwidth.
        Chip("CPU-core", {"float32": 96e9}, 10e9, 4 * 2**30, half_flops=1e6, launch=3e-6, byte_masks=False),
    )
}


def chip_named(name: str) -> Chip:
    """Return a device by its name.

    Raises:
        InputError: there is none; lists all names.
    """
    return lookup_name(CHIPS, name, "device")
