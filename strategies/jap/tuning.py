"""How an array without rounds is set up: into how many micro-batches batches are cut, and what a stage takes first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_pipes.cost import Costs
from lightning_pipes.ir import Cut, check_count
from lightning_pipes.strategies.jap.stream import Job, Stream

BATCHES = 12
"""Batches of each job that a trial simulates, after as many that fill the pipeline."""


@dataclass(frozen=True)
class Setup:
    """Settings for a `Stream` and its jobs.

    Attributes:
        backward_first: see `Stream`.
        microbatches: by the rows of a batch.
    """

    backward_first: bool
    microbatches: Mapping[int, int]


def tuned(stages: int, costs: Costs, resident: int, rows: Iterable[int]) -> Setup:
    """The setup under which equal jobs run fastest: `resident` of them for each number of rows, simulated.

    S blocks have to be under way to fill S stages, so each batch is cut into about S / A micro-batches if A jobs are
    resident; one more is tried, and twice as many. A cut changes the order of a job's sums, never another job's.

    Raises:
        InputError: no stages, no place, or a batch without rows.
    """
    check_count("resident jobs", resident)
    least = max(1, -(-stages // resident))
    sizes = sorted({check_count("rows of a batch", size) for size in rows})
    best: tuple[float, Setup] | None = None
    for backward_first in (False, True):
        chosen = {}
        total = 0.0
        for size in sizes:
            cuts = sorted({min(m, size) for m in ({1} if least == 1 else {least, least + 1, 2 * least})})
            times = {m: batch_time(stages, costs, resident, Cut.even(size, m, stages), backward_first) for m in cuts}
            chosen[size] = min(times, key=lambda m: (times[m], m))
            total += times[chosen[size]] / size  # jobs see equal numbers of samples
        if best is None or total < best[0]:
            best = total, Setup(backward_first, chosen)
    assert best is not None
    return best[1]


def batch_time(stages: int, costs: Costs, resident: int, cut: Cut, backward_first: bool) -> float:
    """Nanoseconds in which one batch of each of `resident` equal jobs runs, once the pipeline is full."""

    def time(batches: int) -> int:
        stream = Stream(stages, costs, resident, backward_first=backward_first)
        for number in range(resident):
            stream.admit(Job(number, cut, batches))
        return stream.advance().time

    return (time(2 * BATCHES) - time(BATCHES)) / BATCHES
