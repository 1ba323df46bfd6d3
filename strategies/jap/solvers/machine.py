"""The machine that runs the solvers' kernel: Python, or with numba machine code; see `sim.loops.machine`."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from lightning_pipes.sim.loops.machine import Kernel, compiled
from lightning_pipes.strategies.jap.solvers import kernel

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


PYTHON = Kernel("python", SimpleNamespace(**{function.__name__: function for function in FUNCTIONS}))


@cache
def numba_kernel() -> Kernel | None:
    """The compiled kernel; None where numba is not installed."""
    made = compiled(*FUNCTIONS)
    return None if made is None else Kernel("numba", SimpleNamespace(**made))


def kernel_for(blocks: int) -> Kernel:
    """The machine that places so many blocks: it decides how long that takes, never what comes out."""
    return PYTHON if blocks <= PATIENCE else numba_kernel() or PYTHON
