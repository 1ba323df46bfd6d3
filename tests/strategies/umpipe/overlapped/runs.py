"""Runs of a batch with overlapping forward and backward, with the order and the rows in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_pipes.ir import STEP, B, Cut, F, InputError, Kind, Plan, Program, short_repr
from lightning_pipes.sim.loops.jit import Kernel
from lightning_pipes.strategies.umpipe.network import Network, Scheme, spans_of_size
from lightning_pipes.strategies.umpipe.overlapped import Merge, kernel
from lightning_pipes.strategies.umpipe.overlapped.tables import (
    NO_CAP,
    Chunks,
    Memory,
    make_log,
    make_memory,
    make_room,
)


@dataclass(frozen=True, eq=False)
class OverlappedRun:
    """The result of a run: the time, order, and rows in flight of a batch.

    Attributes:
        network, scheme: the input of the run. Times are in the unit of the network.
        policy: the policy of the stages.
        makespan: the time at which the last backward ended.
        order: for each stage, the kind and the index of its chunks in the order in which they ran. The index counts the
            chunks of the same kind.
        starts: for each process, the start times of its chunks. The forward processes come first, from the first stage
            on, and then the backward processes.
        peak_rows: for each stage, the maximum number of rows in flight, from the start of F to the end of B.
        caps: for each stage, the number of rows in flight above which it started no further forward. None means no
            caps.
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
        """The number of rows of each stage with a forward before the first backward of the stage."""
        sizes = sizes_of_scheme(self.network, self.scheme)[0][::2]
        first = ([kind for kind, _ in row].index(Kind.B) for row in self.order)
        return tuple(min(n * size, self.network.rows) for n, size in zip(first, sizes, strict=True))

    @cached_property
    def cut(self) -> Cut:
        """The cut of the batch, in spans of samples."""
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
    """Return the run of a batch with `scheme`, including the order of chunks that a static program needs.

    Args:
        network: the times of all processes and options.
        scheme: the option of each process.
        caps: for each stage, the number of rows in flight above which it starts no further forward. A stage with
            nothing in flight may always start a forward, so a chunk may be larger than the cap.
        policy: the policy of a stage that could start a forward and a backward.

    Raises:
        InputError: the network does not have an option, the caps are invalid, or all stages wait for each other.
    """
    return _logged(network, scheme, caps, policy, kernel.OVERLAPPED_KERNELS.python)


def _logged(
    network: Network, scheme: Scheme, caps: Sequence[int] | None, policy: Merge, machine: Kernel
) -> OverlappedRun:
    plain = chunks_of(network, scheme)
    chunks = Chunks(plain.rows, machine.copy(plain.busy), machine.copy(plain.size))
    limits = None if caps is None else check_caps(network, caps)
    memory = make_memory(machine, network.stages, None if limits is None else in_flight(network, limits))
    room, log = make_room(machine, network.stages), make_log(machine, chunks)
    end = machine.run.run_chunks(chunks, int(policy), kernel.LATEST_TIME, memory, room, log)
    if end == kernel.LATEST_TIME:
        raise InputError(
            f"with at most {short_repr(limits)} rows in flight on its stages all of them wait for each other: a "
            "stage that "
            f"may start no forward has not yet sent all rows of its neighbour's next chunk. The chunks of stages and "
            f"links have {short_repr(sizes_of_scheme(network, scheme))} rows; raise the caps, or take sizes that "
            "fit each other"
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
    """Return the chunks of all processes, forward and then backward.

    Raises:
        InputError: the scheme does not have an option for each process.
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


def sizes_of_scheme(network: Network, scheme: Scheme) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of samples in a chunk of each process, forward and backward."""
    forward, backward = scheme
    return tuple(network.sizes[q] for q in forward), tuple(network.sizes[q] for q in backward)


def check_caps(network: Network, caps: Sequence[int]) -> tuple[int, ...]:
    """Return the caps as a tuple of integers, one for each stage.

    Raises:
        InputError: there is not one cap for each stage, or a cap is not an integer of at least 1.
    """
    given = tuple(caps)
    if len(given) != network.stages or not all(isinstance(c, int | np.integer) and c >= 1 for c in given):
        raise InputError(
            f"caps are rows in flight from 1 on, one for each of {network.stages} stages; got {short_repr(caps)}"
        )
    return tuple(int(c) for c in given)


def in_flight(network: Network, caps: Sequence[int]) -> Memory:
    """Return the memory tables that count only rows in flight."""
    each = network.stages
    return Memory(tuple(caps), (1,) * each, (0,) * each, (0,) * each, (NO_CAP,) * each)


def cut_of(network: Network, scheme: Scheme) -> Cut:
    """Return the cut of a batch by `scheme`, in spans of samples. Links are listed by the stage that sends."""
    sizes = sizes_of_scheme(network, scheme)
    forward, backward = ([spans_of_size(network.rows, size) for size in each] for each in sizes)
    backward = backward[::-1]  # from the first stage on, as a cut lists them
    return Cut(
        network.rows,
        tuple(forward[::2]),
        tuple(backward[::2]),
        (*forward[1::2], forward[-1]),
        (backward[0], *backward[1::2]),
    )
