"""The machine that runs the event loop: Python, or with numba machine code; see `sim.loops.machine`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace

import numpy as np

from lightning_pipes.sim.loops import machine as loops
from lightning_pipes.strategies.umpipe.overlapped import kernel
from lightning_pipes.strategies.umpipe.overlapped.tables import Chunks, Log, Memory, Room

FUNCTIONS = (kernel.place, kernel.dispatched, kernel.tried, kernel.capped)
FREE = 1 << 40
"""More rows and bytes than a stage has."""


class Kernel(loops.Kernel):
    """One way to run the event loop, and what it takes."""

    def room(self, stages: int, ranks: Sequence[int] = ()) -> Room:
        """Notes for so many stages, which sit on these ranks; by default each on one of its own."""
        processes, runners = 4 * stages - 2, 3 * stages - 2
        lengths = (*(processes,) * 4, *(runners,) * 3, 2 * runners, *(stages,) * 3)
        where = tuple(ranks) or tuple(range(stages))
        same = [[s for s in range(stages) if where[s] == rank] for rank in where]
        lead = self.copy([there[0] for there in same])
        beside = self.copy([there[(there.index(s) + 1) % len(there)] for s, there in enumerate(same)])
        return Room(lead, beside, *map(self.fill, lengths))

    def log(self, chunks: Chunks | None = None) -> Log:
        """Room for all of `chunks`; without, nothing is logged."""
        if chunks is None:
            return Log(self.fill(0), self.fill(0), self.fill(0))
        counts = [-(-chunks.rows // int(size)) for size in chunks.size]
        ends = np.cumsum(counts)
        return Log(self.copy(ends - counts), self.fill(int(ends[-1])), self.fill(int(ends[-1])))

    def memory(self, stages: int, memory: Memory | None = None) -> Memory:
        """Its numbers for the kernel; without, rows in flight count, and nothing is limited."""
        if memory is None:
            memory = Memory(*((value,) * stages for value in (FREE, 1, 0, 0, FREE)))
        return Memory(*map(self.copy, memory))


PYTHON = Kernel("python", SimpleNamespace(**{function.__name__: function for function in FUNCTIONS}))


@cache
def numba_kernel() -> Kernel | None:
    """The compiled kernel; None where numba is not installed."""
    made = loops.compiled(*FUNCTIONS)
    return None if made is None else Kernel("numba", SimpleNamespace(**made))


def fastest() -> Kernel:
    """The machine for a search: it decides how long that takes, never what comes out of so many evaluations."""
    return numba_kernel() or PYTHON
