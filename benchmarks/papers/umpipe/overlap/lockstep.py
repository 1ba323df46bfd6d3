"""A whole population of schemes in step, as array code: the open problem that the paper names (its section VI).

All individuals start everything that can start, then each goes on to its own next end of a chunk. An array has a row
for each individual and a column for each process, forward then backward: turned round, the column of a stage's forward
is that of its backward. So numpy and torch do the same, on any device, with the numbers of the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.network import Network, Times
from lightning_pipes.strategies.umpipe.overlapped.kernel import NEVER
from lightning_pipes.strategies.umpipe.overlapped.run import Merge, check_caps
from lightning_pipes.strategies.umpipe.overlapped.tables import FREE


class Results(NamedTuple):
    """By individual the makespan, NEVER where its stages wait for each other, and by stage the most rows in flight."""

    makespans: Times
    peak_rows: Times


def lockstep(
    network: Network,
    options: npt.ArrayLike,
    caps: Sequence[int] | None = None,
    policy: Merge = Merge.BACKWARD_FIRST,
    *,
    xp: Any = np,
    device: str = "cpu",
) -> Results:
    """Makespans and peaks of many schemes at once, those that `run_overlapped` says.

    Args:
        options: a row for each individual, K options of forward and K of backward processes.
        caps: as for `run_overlapped`, the same for all.
        xp: the module of the arrays, numpy or torch.
        device: torch's name of where the arrays are.

    Raises:
        InputError: options or caps that the network does not have.
    """
    genes = np.asarray(options)
    width, sizes = 2 * network.processes, len(network.sizes)
    if genes.ndim != 2 or genes.shape[1] != width or not np.issubdtype(genes.dtype, np.integer):
        raise InputError(
            f"options need {width} columns of whole numbers, one for each process and direction; got {genes.dtype} in "
            f"shape {genes.shape}"
        )
    if genes.size and not 0 <= genes.min() <= genes.max() < sizes:
        raise InputError(f"options go from 0 to {sizes - 1}, got {genes.min()} to {genes.max()}")
    limits = np.full(width, FREE)
    if caps is not None:
        limits[: network.processes : 2] = check_caps(network, caps)
    times = np.concatenate([network.forward, network.backward])

    def there(numbers: Any) -> Any:
        return xp.asarray(numbers, device=device)

    busy = there(times[np.arange(width), genes])
    size = there(np.array(network.sizes, np.int64)[genes])
    ends, peaks = _run(xp, there, network.rows, busy, size, there(limits), Merge(policy))
    return Results(
        np.asarray(ends.tolist(), np.int64), np.asarray(peaks.tolist(), np.int64).reshape(-1, network.stages)
    )


def _run(xp: Any, there: Any, rows: int, busy: Any, size: Any, caps: Any, policy: Merge) -> tuple[Any, Any]:
    """When each individual ends, and its peaks; `there` makes arrays where the others are."""
    count, width = busy.shape
    column = np.arange(width)
    forward = column < width // 2
    computes = there(np.where(forward, column % 2 == 0, column % 2 == 1))
    yields = there(forward if policy is Merge.BACKWARD_FIRST else ~forward) & computes
    waits = there(~forward) & computes
    stages = there(column[: width // 2 : 2])
    begun, done, now = busy * 0, busy * 0, busy[:, 0] * 0
    until = busy * 0 + NEVER
    peaks, makespans = begun[:, stages], now + NEVER
    who = there(np.arange(count))  # those that have not ended; when half of them have, they are left out
    source = begun[:, :1] + rows
    while len(who):
        end = xp.minimum(begun + size, source)
        arrived = xp.concatenate((source, done[:, :-1]), 1)
        gone = _turned(xp, done)
        idle = until == NEVER
        ready = idle & (_turned(xp, idle) | ~computes) & (begun < source) & (arrived >= end)
        ready = ready & ((end - gone <= caps) | (begun == gone))
        if policy is Merge.ALL_FORWARDS_FIRST:
            ready = ready & ((_turned(xp, begun) == source) | ~waits)
        else:
            ready = ready & ~(_turned(xp, ready) & yields)
        until = xp.where(ready, now[:, None] + busy, until)
        begun = xp.where(ready, end, begun)
        peaks[who] = xp.maximum(peaks[who], (begun - gone)[:, stages])
        soonest = xp.amin(until, 1)
        over = soonest == NEVER
        if over.any():
            whole = over & (done[:, -1] == rows)
            makespans[who[whole]] = now[whole]
            left = ~over
            who, now, soonest, source = who[left], now[left], soonest[left], source[left]
            begun, done, until, busy, size = begun[left], done[left], until[left], busy[left], size[left]
        now = soonest
        finished = until == now[:, None]
        done = xp.where(finished, begun, done)
        until = xp.where(finished, source * 0 + NEVER, until)
    return makespans, peaks


def _turned(xp: Any, array: Any) -> Any:
    return xp.flip(array, (1,))
