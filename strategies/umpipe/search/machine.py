"""The machine that runs the searches' loops: Python, or with numba machine code; see `sim.loops.machine`."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from lightning_pipes.sim.loops.machine import Progress, compiled
from lightning_pipes.strategies.umpipe.search import kernel

FUNCTIONS = (
    kernel.ended,
    kernel.ended_all,
    kernel.passed,
    kernel.lasting,
    kernel.through,
    kernel.local,
    kernel.descended,
    kernel.bounded,
    kernel.lengthened,
    kernel.grown,
    kernel.undominated,
)
PATIENCE = 100_000
"""Chunks that Python passes before numba is loaded, which takes about as long."""

PYTHON = SimpleNamespace(**{function.__name__: function for function in FUNCTIONS})


@cache
def numba_loops() -> SimpleNamespace | None:
    """The compiled loops; None where numba is not installed."""
    made = compiled(*FUNCTIONS)
    return None if made is None else SimpleNamespace(**made)


_progress = Progress()


def loops(chunks: int) -> SimpleNamespace:
    """The loops for the next `chunks` chunks: Python until it has passed PATIENCE of them, then numba if there is."""
    return (_progress.pays(chunks, PATIENCE) and numba_loops()) or PYTHON


def load_loops() -> str:
    """Loads machine code now rather than when it pays; "numba", or "python" where there is none."""
    return "python" if loops(PATIENCE + 1) is PYTHON else "numba"
