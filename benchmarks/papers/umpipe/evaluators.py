"""The paper's evaluators of schemes: sample by sample (A1), and one-level and two-level arrays over a population; and
the best scheme of a chain by trying all of them, with no bounds.

The same source runs on arrays of numpy and on tensors of torch: `xp` is either module. Compiled loops over chunks
(`evaluate_genes`) are faster on processors; these are for devices that want arrays, and for comparison.
"""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from lightning_pipes.sim.loops.jit import JitKernel
from lightning_pipes.strategies.umpipe.network import Network, Times
from lightning_pipes.strategies.umpipe.search.chain import Chain, chains_of_network


def one_level(chain: Chain, people: Times, xp: ModuleType = np, device: Any = None) -> Any:
    """Return when the batch has left the chain, for each row of genes: vectors over individuals (E6, A3).

    Process by process and chunk by chunk; individuals whose process has no more chunks wait. (A3 still loops over
    individuals, E6 does not; the ends of chunks stand for those of all their samples.)
    """
    sizes, counts, times, genes = _moved(xp, device, chain.sizes, chain.counts, chain.times, people)
    each = _arange(xp, device, len(people))
    most = int(chain.counts.max())
    before = _zeros(xp, device, (len(people), most), times.dtype)
    size = _zeros(xp, device, len(people), times.dtype) + chain.rows
    t = _zeros(xp, device, len(people), times.dtype)
    for k in range(chain.processes):
        step, time, count = sizes[genes[:, k]], times[k][genes[:, k]], counts[genes[:, k]]
        after = _zeros(xp, device, (len(people), most), times.dtype)
        t = _zeros(xp, device, len(people), times.dtype)
        for i in range(int(count.max())):
            last = xp.clip((i + 1) * step, None, chain.rows)  # sample of chunk i
            next_ = xp.maximum(before[each, (last - 1) // size], t) + time
            t = xp.where(i < count, next_, t)
            after[:, i] = t
        before, size = after, step
    return t


def two_level(chain: Chain, people: Times, xp: ModuleType = np, device: Any = None) -> Any:
    """Return when the batch has left the chain, for each row of genes: arrays over individuals and samples (E7, A4).

    The j-th chunk of a process that takes f a chunk starts at cummax_l(eta_l - l f) + j f, where eta_l is when the last
    sample of chunk l comes. So there is a loop over processes only. (A4 divides by the number of micro-batches; it
    must divide by their size, and cut the last one off at the batch's end.)

    The running maximum is taken by doubling over all individuals in a row, several numbers at a time; each of them is
    `apart` later than the one before, further than times can be from each other. What is added to all samples of an
    individual, f a process, is added at the end. 32 bits are enough for most networks.
    """
    count = len(people)
    apart = 2 * int((chain.times * (chain.counts + 1)).max(axis=1).sum()) + 1
    dtype = xp.int32 if apart * (count + 1) < 2**31 else xp.int64
    places = xp.int32 if xp is np and count * chain.rows < 2**31 else xp.int64  # torch takes only these
    number, last = _chunks(chain.rows, tuple(chain.sizes.tolist()), dtype, places, xp, device)
    times, genes = _moved(xp, device, chain.times, people.T)
    times = _as(times, dtype)
    begins = _as(_arange(xp, device, count)[:, None] * chain.rows, places)
    late = _as(_arange(xp, device, count) * apart, dtype)
    ready = _zeros(xp, device, (count, chain.rows), dtype) + late[:, None]
    spare = xp.zeros_like(ready).reshape(-1)
    room, shift, scaled = xp.zeros_like(ready), xp.zeros_like(ready), xp.zeros_like(number)
    where = xp.zeros_like(begins + last[:1])
    common = _zeros(xp, device, count, dtype)
    for time, options in zip(times, genes, strict=True):
        xp.multiply(number, time[:, None], out=scaled)
        _rows(xp, scaled, options, shift)
        _rows(xp, last, options, where)
        where += begins
        _picked(xp, ready, where, room)
        room -= shift
        flat, spare = _running_max(xp, room.reshape(-1), spare, chain.rows)
        room, ready = ready, flat.reshape(count, chain.rows)
        ready += shift
        common += time[options]
    return ready[:, -1] + common - late


@lru_cache(maxsize=4)
def _chunks(rows: int, sizes: tuple[int, ...], dtype: Any, places: Any, xp: ModuleType, device: Any) -> tuple[Any, Any]:
    """For each option and sample: the number of its chunk, from 1, and the last sample of that chunk. All generations
    need the same ones."""
    size = np.array(sizes)[:, None]
    number = np.arange(rows) // size + 1
    last = np.minimum(number * size, rows) - 1
    number, last = _moved(xp, device, number, last)
    return _as(number, dtype), _as(last, places)


def _running_max(xp: ModuleType, values: Any, spare: Any, reach: int) -> tuple[Any, Any]:
    """Return the greatest of each value and of as many before it as make `reach` or more, and room for as many."""
    distance = 1
    while distance < reach:
        spare[:distance] = values[:distance]
        xp.maximum(values[distance:], values[:-distance], out=spare[distance:])
        values, spare = spare, values
        distance *= 2
    return values, spare


def _rows(xp: ModuleType, table: Any, options: Any, out: Any) -> None:
    """Fill `out` with rows of `table`; new arrays of this size would cost as much as what is computed."""
    if xp is np:
        table.take(options, axis=0, out=out, mode="clip")
    else:
        xp.index_select(table, 0, options, out=out)


def _picked(xp: ModuleType, values: Any, where: Any, out: Any) -> None:
    """Fill `out` with the values at flat places."""
    if xp is np:
        values.take(where, out=out, mode="clip")
    else:
        xp.take(values, where, out=out)


def _moved(xp: ModuleType, device: Any, *arrays: Times) -> tuple[Any, ...]:
    """Return the arrays as `xp` has them, on `device`."""
    return tuple(xp.asarray(np.ascontiguousarray(each), **_on(device)) for each in arrays)


def _as(array: Any, dtype: Any) -> Any:
    return array.to(dtype) if hasattr(array, "to") else array.astype(dtype)


def _zeros(xp: ModuleType, device: Any, shape: Any, dtype: Any) -> Any:
    return xp.zeros(shape, dtype=dtype, **_on(device))


def _arange(xp: ModuleType, device: Any, n: int) -> Any:
    return xp.arange(n, **_on(device))


def _on(device: Any) -> dict[str, Any]:
    return {} if device is None else {"device": device}


def by_sample(chain: Chain, genes: Sequence[int]) -> int:
    """Return when the batch has left the chain, by A1: process by process, sample by sample.

    E_kj = max(E_{k-1,z}, E_ky) + F_k, where y is the last sample before j's chunk and z the last one in it. The paper's
    E3 uses the number of micro-batches p_k as their size; the size is ceil(P / p_k).
    """
    sizes, times = chain.sizes.tolist(), chain.times.tolist()
    before = [0] * (chain.rows + 1)
    for k, q in enumerate(genes):
        size, time = sizes[q], times[k][q]
        after = [0] * (chain.rows + 1)
        for j in range(1, chain.rows + 1):
            y = size * ((j - 1) // size)
            z = min(y + size, chain.rows)
            after[j] = max(before[z], after[y]) + time
        before = after
    return before[chain.rows]


def in_loops(chain: Chain, people: Times) -> Times:
    """Return when the batch has left the chain for each row of genes, by A1, in plain Python."""
    return np.array([by_sample(chain, genes) for genes in people.tolist()], np.int64)


def tried(rows, sizes, times, ends, options):
    """The least time in which the batch leaves the chain. Schemes that begin alike share what they begin with: row k
    of `ends` has when each sample leaves process k, and `options` are those of the scheme that is tried."""
    processes, count = times.shape
    best = 1 << 60
    k = 0
    options[0] = -1
    while k >= 0:
        options[k] += 1
        if options[k] == count:
            k -= 1
            continue
        size = sizes[options[k]]
        time = times[k, options[k]]
        t = 0
        begin = 1
        while begin <= rows:
            end = min(begin + size, rows + 1)
            before = ends[k - 1, end - 1] if k > 0 else 0
            t = max(t, before) + time
            if k + 1 < processes:
                for j in range(begin, end):
                    ends[k, j] = t
            begin = end
        if k + 1 < processes:
            k += 1
            options[k] = -1
        elif t < best:
            best = t
    return best


ENUMERATION = JitKernel(tried, patience=0)


def best_of_chain(chain: Chain) -> int:
    """The least time of all Q^K schemes."""
    ends = np.zeros((chain.processes, chain.rows + 1), np.int64)
    options = np.zeros(chain.processes, np.int64)
    return int(ENUMERATION.fastest.run.tried(chain.rows, chain.sizes, chain.times, ends, options))


def best_by_trying(network: Network) -> int:
    """The optimum: the two directions do not wait for each other but at the barrier."""
    return sum(best_of_chain(chain) for chain in chains_of_network(network))
