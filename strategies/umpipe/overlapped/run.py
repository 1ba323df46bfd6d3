"""Run a batch with overlapping forward and backward; each process has its own chunk size.

The paper names this UMPipeDream and gives no semantics (its section V-E says "by recursion"). Here: a process runs its
chunks in order of samples. A chunk starts when its stage or link is free and all its rows are finished in the process
before; for the first backward process that is the last forward. A stage computes one chunk at a time, forward or
backward, and never stops in the middle; a link moves one at a time in each direction. Where a stage could start either,
a policy decides. No rank waits for something better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np

from lightning_pipes.ir import STEP, B, Cut, F, InputError, Kind, Plan, Program, short_repr
from lightning_pipes.sim.loops.jit import Kernel
from lightning_pipes.strategies.umpipe.network import Network, Scheme, spans_of_size
from lightning_pipes.strategies.umpipe.overlapped import kernel
from lightning_pipes.strategies.umpipe.overlapped.tables import FREE, Chunks, Memory, make_log, make_memory, make_room


class Merge(IntEnum):
    """The chunk that a stage starts which could start a forward and a backward."""

    BACKWARD_FIRST = kernel.BACKWARD_FIRST
    """The backward: as 1F1B does."""
    FORWARD_FIRST = kernel.FORWARD_FIRST
    """The forward, if caps allow it."""
    ALL_FORWARDS_FIRST = kernel.ALL_FORWARDS_FIRST
    """No backward before the last forward: GPipe, whose time is the paper's E4."""


@dataclass(frozen=True, eq=False)
class OverlappedRun:
    """A batch that has run: its time, its order, and the rows in flight.

    Attributes:
        network, scheme: what was run; times are in the network's unit.
        policy: how stages decided.
        makespan: when the last backward ended.
        order: of each stage the chunks in the order in which it ran them, by their number among those of their kind.
        starts: of each process when each of its chunks began: forward from the first stage on, then backward.
        peak_rows: of each stage the most rows that were in flight, from the start of F to the end of B.
        caps: the rows in flight above which a stage started no further forward; None without.
    """

    network: Network
    scheme: Scheme
    policy: Merge
    makespan: int
    order: tuple[tuple[tuple[Kind, int], ...], ...]
    starts: tuple[tuple[int, ...], ...]
    peak_rows: tuple[int, ...]
    caps: tuple[int, ...] | None

    @property
    def warmup_rows(self) -> tuple[int, ...]:
        """Rows of each stage with a forward before its first backward."""
        sizes = self.network.sizes_of(self.scheme)[0][::2]
        first = ([kind for kind, _ in row].index(Kind.B) for row in self.order)
        return tuple(min(n * size, self.network.rows) for n, size in zip(first, sizes, strict=True))

    @cached_property
    def cut(self) -> Cut:
        """How the batch is cut, in spans of samples."""
        return cut_of(self.network, self.scheme)

    def plan(self, ranks: Sequence[int] = ()) -> Plan:
        """Return the plan of one batch, by default with a rank for each stage."""
        return Plan(tuple(ranks) or tuple(range(self.network.stages)), (self.cut,))

    @cached_property
    def program(self) -> Program:
        """The order of all stages as a static program, with a rank for each stage."""
        rows = []
        for stage, order in enumerate(self.order):
            spans = {Kind.F: self.cut.forward[stage], Kind.B: self.cut.backward[stage]}
            chunks = [(F if kind is Kind.F else B)(stage, spans[kind][chunk]) for kind, chunk in order]
            rows.append((*chunks, STEP(stage)))
        return Program(tuple(rows))


def run_overlapped(
    network: Network, scheme: Scheme, caps: Sequence[int] | None = None, policy: Merge = Merge.BACKWARD_FIRST
) -> OverlappedRun:
    """Return how `scheme` runs; the order of its chunks is what a static program needs.

    Args:
        caps: of each stage the rows in flight above which it starts no further forward. One that has nothing in flight
            may always start one, so a chunk can be larger than the cap.

    Raises:
        InputError: an option that the network does not have, caps that are none, or all stages wait for each other.
    """
    return _logged(network, scheme, caps, policy, kernel.OVERLAPPED.python)


def _logged(
    network: Network, scheme: Scheme, caps: Sequence[int] | None, policy: Merge, machine: Kernel
) -> OverlappedRun:
    plain = chunks_of(network, scheme)
    chunks = Chunks(plain.rows, machine.copy(plain.busy), machine.copy(plain.size))
    limits = None if caps is None else check_caps(network, caps)
    memory = make_memory(machine, network.stages, None if limits is None else in_flight(network, limits))
    room, log = make_room(machine, network.stages), make_log(machine, chunks)
    end = machine.run.run_chunks(chunks, int(policy), kernel.NEVER, memory, room, log)
    if end == kernel.NEVER:
        raise InputError(
            f"with at most {short_repr(limits)} rows in flight on its stages all of them wait for each other: a "
            "stage that "
            f"may start no forward has not yet sent all rows of its neighbour's next chunk. The chunks of stages and "
            f"links have {short_repr(network.sizes_of(scheme))} rows; raise the caps, or take sizes that fit each other"
        )
    starts = np.split(np.asarray(log.starts), np.asarray(log.first)[1:])
    turns = np.split(np.asarray(log.turns), np.asarray(log.first)[1:])
    order = []
    for stage in range(network.stages):
        forward, backward = turns[2 * stage], turns[2 * network.processes - 1 - 2 * stage]
        kinds = [(int(turn), Kind.F, i) for i, turn in enumerate(forward)]
        kinds += [(int(turn), Kind.B, i) for i, turn in enumerate(backward)]
        order.append(tuple((kind, i) for _, kind, i in sorted(kinds)))
    return OverlappedRun(
        network,
        scheme,
        Merge(policy),
        int(end),
        tuple(order),
        tuple(tuple(row.tolist()) for row in starts),
        tuple(int(rows) for rows in room.peak),
        limits,
    )


def chunks_of(network: Network, scheme: Scheme) -> Chunks:
    """Return the chunks of all processes, forward then backward.

    Raises:
        InputError: not an option for each process.
    """
    options = (*scheme.forward, *scheme.backward)
    known = range(len(network.sizes))
    if {len(scheme.forward), len(scheme.backward)} != {network.processes} or not all(q in known for q in options):
        raise InputError(
            f"a scheme names for each of {network.processes} processes and both directions an option from 0 to "
            f"{len(known) - 1}, got {short_repr(scheme)}"
        )
    times = np.concatenate([network.forward, network.backward])
    busy = times[np.arange(len(options)), list(options)]
    return Chunks(network.rows, busy, np.array(network.sizes, np.int64)[list(options)])


def check_caps(network: Network, caps: Sequence[int]) -> tuple[int, ...]:
    """Return the caps as whole numbers, one for each stage.

    Raises:
        InputError: they are not that, or one is below 1.
    """
    given = tuple(caps)
    if len(given) != network.stages or not all(isinstance(c, int | np.integer) and c >= 1 for c in given):
        raise InputError(
            f"caps are rows in flight from 1 on, one for each of {network.stages} stages; got {short_repr(caps)}"
        )
    return tuple(int(c) for c in given)


def in_flight(network: Network, caps: Sequence[int]) -> Memory:
    """Return memory that counts rows in flight and nothing else."""
    each = network.stages
    return Memory(tuple(caps), (1,) * each, (0,) * each, (0,) * each, (FREE,) * each)


def cut_of(network: Network, scheme: Scheme) -> Cut:
    """Return how `scheme` cuts a batch, in spans of samples: of stages, and of links by the stage that sends."""
    forward, backward = ([spans_of_size(network.rows, size) for size in sizes] for sizes in network.sizes_of(scheme))
    backward = backward[::-1]  # from the first stage on, as a cut lists them
    return Cut(
        network.rows,
        tuple(forward[::2]),
        tuple(backward[::2]),
        (*forward[1::2], forward[-1]),
        (backward[0], *backward[1::2]),
    )
