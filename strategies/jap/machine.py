"""The machine that runs the solvers' kernel: Python, or with numba machine code; see `sim.loops.machine`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from lightning_pipes.sim.loops.machine import compiled
from lightning_pipes.strategies.jap import kernel

FUNCTIONS = (
    kernel.draw,
    kernel.follower,
    kernel.needed,
    kernel.listed,
    kernel.timed,
    kernel.inserted,
    kernel.moved,
    kernel.annealed,
    kernel.shifted,
    kernel.polished,
    kernel.one_machine,
    kernel.block_of,
    kernel.outlook,
    kernel.constructed,
    kernel.branched,
)
PATIENCE = 300_000
"""Blocks that Python places before numba is loaded, which takes about as long."""


@dataclass(frozen=True)
class Kernel:
    """One way to run the kernel.

    Attributes:
        name: "python" or "numba".
        run: the kernel's functions, by name.
    """

    name: str
    run: SimpleNamespace

    def copy(self, numbers: Any) -> Any:
        """The same numbers, flat, as the kernel takes them."""
        flat = np.array(numbers, np.int64).reshape(-1)
        return flat if self.name == "numba" else flat.tolist()

    def fill(self, n: int, value: int = 0) -> Any:
        """Room for `n` numbers."""
        return np.full(n, value, np.int64) if self.name == "numba" else [value] * n


PYTHON = Kernel("python", SimpleNamespace(**{function.__name__: function for function in FUNCTIONS}))


@cache
def numba_kernel() -> Kernel | None:
    """The compiled kernel; None where numba is not installed."""
    made = compiled(*FUNCTIONS)
    return None if made is None else Kernel("numba", SimpleNamespace(**made))


def kernel_for(blocks: int) -> Kernel:
    """The machine that places so many blocks: it decides how long that takes, never what comes out."""
    return PYTHON if blocks <= PATIENCE else numba_kernel() or PYTHON
