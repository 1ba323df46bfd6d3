"""The machine that runs the event loop: Python, or with numba machine code; see `sim.loops.machine`."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

from benchmarks.papers.csp.emulation import kernel
from lightning_pipes.sim.loops.machine import Kernel, Progress, compiled

PATIENCE = 100_000
"""Tasks that Python runs before numba is loaded, which takes about as long."""

PYTHON = Kernel("python", SimpleNamespace(stream=kernel.stream))


@cache
def numba_kernel() -> Kernel | None:
    """The compiled loop; None where numba is not installed."""
    made = compiled(kernel.stream)
    return None if made is None else Kernel("numba", SimpleNamespace(**made))


_progress = Progress()


def kernel_for(tasks: int) -> Kernel:
    """The machine that runs the next so many tasks: Python until it has run PATIENCE of them, then numba if there
    is."""
    return (_progress.pays(tasks, PATIENCE) and numba_kernel()) or PYTHON


def load_loops() -> str:
    """Loads machine code now rather than when it pays; "numba", or "python" where there is none."""
    return kernel_for(PATIENCE + 1).name
