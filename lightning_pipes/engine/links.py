"""Measures what messages between neighbours take, end to end: copies, serialisation and waking up included."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count
from statistics import median

import torch

from lightning_pipes.cost import Link
from lightning_pipes.engine.mailbox import Transport
from lightning_pipes.ir import Instruction, Kind, Plan

SIZES = (2**12, 2**16, 2**18, 2**20, 2**22)
REPEATS = 9
_SMALL = 64


def measure_links(
    plan: Plan,
    rank: int,
    transport: Transport,
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    device: torch.device | None = None,
) -> dict[tuple[int, int], Link]:
    """What this rank has measured of the links from itself, by (from rank, to rank).

    A collective call of all ranks of the pipeline, between windows. A message of each size goes there and a small one
    comes back, so clocks need not agree; a link is what fits the medians best: half a small message's round trip is
    its latency.

    Args:
        sizes: bytes of the messages.
    """
    found: dict[tuple[int, int], Link] = {}
    edges = [s for s in range(plan.n_stages - 1) if plan.crosses(s)]
    pairs = {(plan.ranks[s], plan.ranks[s + 1]): s for s in reversed(edges)}  # one edge for each pair of neighbours
    for phase in (0, 1):  # neighbours of one phase have no rank in common
        for (low, high), s in pairs.items():
            if s % 2 != phase or rank not in (low, high):
                continue
            forward, backward = Instruction(Kind.RF, s + 1), Instruction(Kind.RB, s)
            for source, target, there, back in ((low, high, forward, backward), (high, low, backward, forward)):
                if rank == source:
                    times = _ping(transport, target, there, back, sizes, repeats, device)
                    found[source, target] = fitted(times)
                else:
                    _pong(transport, source, there, back, sizes, repeats, device)
    return found


def fitted(seconds: Mapping[int, float]) -> Link:
    """The link whose messages take so long, by bytes; the smallest one's time is all latency."""
    smallest = min(seconds)
    latency = seconds[smallest]
    extra = [(size - smallest, t - latency) for size, t in seconds.items() if size > smallest]
    moved = sum(size * t for size, t in extra)  # least squares through the origin: the large ones count
    return Link(sum(size * size for size, _ in extra) / moved if moved > 0 else float("inf"), max(latency, 0.0))


def _ping(
    transport: Transport,
    peer: int,
    there: Instruction,
    back: Instruction,
    sizes: Sequence[int],
    repeats: int,
    device: torch.device | None,
) -> dict[int, float]:
    trips: dict[int, list[float]] = {}
    for number, size in _rounds(sizes, repeats):
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        begun = time.perf_counter()
        transport.send(peer, (-number, there), message)
        transport.mailbox.wait((-number, back))
        trips.setdefault(size, []).append(time.perf_counter() - begun)
        transport.mailbox.take((-number, back))
    small = median(trips[_SMALL]) / 2
    return {_SMALL: small, **{size: median(trips[size]) - small for size in sizes}}


def _pong(
    transport: Transport,
    peer: int,
    there: Instruction,
    back: Instruction,
    sizes: Sequence[int],
    repeats: int,
    device: torch.device | None,
) -> None:
    reply = torch.zeros(_SMALL, dtype=torch.uint8, device=device)
    for number, _ in _rounds(sizes, repeats):
        transport.mailbox.wait((-number, there))
        transport.mailbox.take((-number, there))
        transport.send(peer, (-number, back), reply)


def _rounds(sizes: Sequence[int], repeats: int) -> list[tuple[int, int]]:
    """Numbers of messages and their sizes: the sizes in turn, so that a disturbance meets all of them."""
    numbers = count(1)
    return [(next(numbers), size) for _ in range(repeats + 1) for size in (_SMALL, *sizes)][len(sizes) + 1 :]
