"""Measures the end-to-end time of messages between neighbours, with copies, serialisation and waking up."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median

import torch

from lightning_pipes.cost import Link
from lightning_pipes.engine.messages.mailbox import Transport
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
    """Return the measured links from this rank, by (from rank, to rank).

    A collective call of all ranks of the pipeline, between windows. A message of each size goes there and a small one
    comes back, so clocks need not agree; a link is what fits the medians best: half a small message's round trip is
    its latency.

    Args:
        sizes: bytes of the messages.
    """
    found: dict[tuple[int, int], Link] = {}
    edges = [s for s in range(plan.n_stages - 1) if plan.is_remote_edge(s)]
    pairs = {(plan.ranks[s], plan.ranks[s + 1]): s for s in reversed(edges)}  # one edge for each pair of neighbours
    for phase in (0, 1):  # neighbours of one phase have no rank in common
        for (low, high), s in pairs.items():
            if s % 2 != phase or rank not in (low, high):
                continue
            forward, backward = Instruction(Kind.RF, s + 1), Instruction(Kind.RB, s)
            for source, target, there, back in ((low, high, forward, backward), (high, low, backward, forward)):
                exchange = _Exchange(transport, there, back, tuple(sizes), repeats, device)
                if rank == source:
                    found[source, target] = fit_link(exchange.measure_trips(target))
                else:
                    exchange.answer_trips(source)
    return found


def fit_link(seconds: Mapping[int, float]) -> Link:
    """Return the link that fits the seconds of messages, by bytes; the smallest one's time is all latency."""
    smallest = min(seconds)
    latency = seconds[smallest]
    extra = [(size - smallest, t - latency) for size, t in seconds.items() if size > smallest]
    moved = sum(size * t for size, t in extra)  # least squares through the origin: the large ones count
    return Link(sum(size * size for size, _ in extra) / moved if moved > 0 else float("inf"), max(latency, 0.0))


@dataclass(frozen=True)
class _Exchange:
    """Messages `there`, and small ones `back`, named by the instructions that receive them."""

    transport: Transport
    there: Instruction
    back: Instruction
    sizes: tuple[int, ...]
    repeats: int
    device: torch.device | None

    def measure_trips(self, peer: int) -> dict[int, float]:
        """Return the seconds of a message one way, by bytes."""
        trips: dict[int, list[float]] = {}
        for number, size in self._rounds():
            message = self._message(size)
            begun = time.perf_counter()
            self.transport.send(peer, (-number, self.there), message)
            self.transport.mailbox.wait((-number, self.back))
            trips.setdefault(size, []).append(time.perf_counter() - begun)
            self.transport.mailbox.take_message((-number, self.back))
        small = median(trips[_SMALL]) / 2
        return {_SMALL: small, **{size: median(trips[size]) - small for size in self.sizes}}

    def answer_trips(self, peer: int) -> None:
        """Answer every message of the other end's `measure_trips`."""
        reply = self._message(_SMALL)
        for number, _ in self._rounds():
            self.transport.mailbox.wait((-number, self.there))
            self.transport.mailbox.take_message((-number, self.there))
            self.transport.send(peer, (-number, self.back), reply)

    def _message(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def _rounds(self) -> list[tuple[int, int]]:
        """Return numbers of messages and their sizes. Sizes alternate, so that a disturbance affects all of them."""
        numbers = count(1)
        every = (_SMALL, *self.sizes)
        return [(next(numbers), size) for _ in range(self.repeats + 1) for size in every][len(every) :]
