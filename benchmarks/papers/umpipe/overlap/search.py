"""The search for sizes of chunks whose directions overlap: coordinate descent from given schemes, then seeded kicks.

Given the sizes, stages that never wait for something better come within half a percent of the best order. So only the
sizes are searched: a process takes the best of its options while the others keep theirs, until none has a better one;
then a few processes take others at random, and what is beside them follows. The rows that a stage may have in flight
are searched in the same way: a stage that runs ahead less can be back in time for something more urgent.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from lightning_pipes.ir import InputError, check_count, short_repr
from lightning_pipes.strategies.umpipe.network import Network, Scheme
from lightning_pipes.strategies.umpipe.overlapped.kernel import NEVER, OVERLAPPED
from lightning_pipes.strategies.umpipe.overlapped.run import Merge, OverlappedRun, check_caps, chunks_of, in_flight
from lightning_pipes.strategies.umpipe.overlapped.tables import Chunks, Memory, make_log, make_memory, make_room

# ---- The best order of a run's chunks by OR-Tools' CP-SAT, an extra: it says what waiting for something better wins.


class Merged(NamedTuple):
    """The time of the best order that was found, and a bound that no order goes below: equal if it is proven best."""

    value: int
    lower_bound: int


def best_merge(run: OverlappedRun, seconds: float, seed: int = 0) -> Merged:
    """The time of the chunks of `run` if stages may run them in any order and wait; rows in flight are not limited.

    Raises:
        InputError: OR-Tools is not installed.
    """
    if find_spec("ortools") is None:
        raise InputError("CP-SAT needs OR-Tools, which is not installed; pip install lightning-pipes[proof]")
    from ortools.sat.python import cp_model

    chunks = chunks_of(run.network, run.scheme)
    rows, busy, sizes = chunks.rows, chunks.busy.tolist(), chunks.size.tolist()
    model = cp_model.CpModel()
    starts: list[list[Any]] = []
    stages: dict[int, list[Any]] = {}
    for p, begun in enumerate(run.starts):
        stage = min(p, len(busy) - 1 - p)
        starts.append([model.new_int_var(0, run.makespan, f"start {p} {i}") for i in range(len(begun))])
        for i, start in enumerate(starts[p]):
            model.add_hint(start, begun[i])
            if i > 0:
                model.add(start >= starts[p][i - 1] + busy[p])
            if p > 0:
                last = min((i + 1) * sizes[p], rows) - 1
                model.add(start >= starts[p - 1][last // sizes[p - 1]] + busy[p - 1])
            if stage % 2 == 0:
                chunk = model.new_fixed_size_interval_var(start, busy[p], f"chunk {p} {i}")
                stages.setdefault(stage, []).append(chunk)
    for intervals in stages.values():
        model.add_no_overlap(intervals)
    model.minimize(starts[-1][-1] + busy[-1])
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Merged(run.makespan, 0)
    return Merged(round(solver.objective_value), round(solver.best_objective_bound))


EAGER = (Merge.BACKWARD_FIRST, Merge.FORWARD_FIRST)
"""The policies that a search tries for each scheme."""
CAPS = 12
"""Caps that a stage is offered, from a part of what it may hold to all of it."""
CAPS_EVERY = 8
"""Kicks of which one lets all caps be looked at, too."""
DESCENTS = 3
"""Starts from which a search descends."""
HOPELESS = 1.5
"""Times the best start, above which a start is not worth a descent."""
COARSE = 0.2
"""The share of a search in which sizes differ by twice and more: where there are many they come to much the same."""
KICKED = (1, 4)
"""Processes, at least and at most, that a kick gives other options."""


@dataclass(frozen=True)
class Found:
    """The best scheme of a search.

    Attributes:
        scheme, policy: what to run.
        value: its makespan, in the network's unit.
        caps: the rows in flight above which its stages start no further forward.
        evaluations: how many runs that took.
    """

    scheme: Scheme
    policy: Merge
    value: int
    caps: tuple[int, ...]
    evaluations: int


@dataclass(frozen=True)
class Effort:
    """When a search ends: after so many evaluations, or seconds in which its thread computed, whichever is first.

    Raises:
        InputError: neither is given, or one is below 1, or not above 0.
    """

    evaluations: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.evaluations is not None:
            check_count("evaluations", self.evaluations)
        if self.seconds is not None and not self.seconds > 0:
            raise InputError(f"seconds of a search must be above 0, got {short_repr(self.seconds)}")
        if self.evaluations is None and self.seconds is None:
            raise InputError("a search needs a limit: give it evaluations, or seconds")

    def part(self, share: float) -> Effort:
        """A share of it."""
        return Effort(
            None if self.evaluations is None else max(1, round(share * self.evaluations)),
            None if self.seconds is None else share * self.seconds,
        )

    def over(self) -> Callable[[int], bool]:
        """Whether so many evaluations are enough; the seconds count from this call."""
        most = math.inf if self.evaluations is None else self.evaluations
        end = math.inf if self.seconds is None else time.thread_time() + self.seconds
        return lambda done: done >= most or time.thread_time() >= end


def search(
    network: Network,
    starts: Iterable[Scheme] = (),
    *,
    seconds: float | None = None,
    evaluations: int | None = None,
    seed: int = 0,
    caps: Sequence[int] | None = None,
    policies: Sequence[Merge] = EAGER,
) -> Found:
    """The best scheme that was found, never worse than any of `starts` or than equal chunks everywhere.

    With `evaluations` alone the same seed finds the same.

    Args:
        starts: schemes to begin at besides equal ones; the best flushed scheme is a good one.
        caps: of each stage the most rows in flight; its forward chunks are not larger. By default any, and they are
            searched too.
        policies: what is tried for each scheme.

    Raises:
        InputError: no limit of effort, a start or caps that the network does not have, or no size is within the caps.
    """
    effort = Effort(evaluations, seconds)
    limits = None if caps is None else check_caps(network, caps)
    if limits is not None and min(limits) < network.sizes[-1]:
        raise InputError(
            f"caps of {short_repr(limits)} rows in flight leave a stage without any chunk, the smallest one has "
            f"{network.sizes[-1]} rows; raise the caps or offer smaller sizes"
        )
    memory = in_flight(network, (network.rows,) * network.stages if limits is None else limits)
    return Descent(network, memory, policies, tune_caps=limits is None).found([*starts], effort, seed)


class Descent:
    """A scheme with its makespan, and what improves it.

    Attributes:
        genes: the options of all processes, forward then backward.
        value, policy: the makespan, and whose it is; NEVER where the scheme does not run.
        evaluations: runs so far.
    """

    def __init__(
        self, network: Network, memory: Memory, policies: Sequence[Merge] = EAGER, *, tune_caps: bool = False
    ) -> None:
        machine = OVERLAPPED.fastest
        self.network = network
        self._machine, self._run = machine, machine.run
        self._times = machine.copy(np.concatenate([network.forward, network.backward]))
        self._sizes = machine.copy(network.sizes)
        self._policies = machine.copy(policies)
        self._memory = make_memory(machine, network.stages, memory)
        self._tuned = tune_caps
        self._room, self._log = make_room(machine, network.stages), make_log(machine)
        every, few = _options(network, memory), _doublings(network.sizes)
        self._every = [machine.copy(options) for options in every]
        self._few = [machine.copy([q for q in options if q in few] or options) for options in every]
        self._options = self._every
        self._best = machine.fill(4)
        self.genes = [0] * (2 * network.processes)
        self.value, self.policy, self.evaluations = NEVER, Merge(policies[0]), 0
        self._chunks = Chunks(network.rows, machine.fill(len(self.genes)), machine.fill(len(self.genes)))

    @property
    def scheme(self) -> Scheme:
        """The options that the genes name."""
        width = self.network.processes
        return Scheme(tuple(self.genes[:width]), tuple(self.genes[width:]))

    @property
    def caps(self) -> tuple[int, ...]:
        """Of each stage the rows in flight above which it starts no further forward."""
        return tuple(int(cap) for cap in self._memory.caps)

    def peaks(self) -> tuple[int, ...]:
        """Of each stage the most that it holds."""
        self._run.run_chunks(self._chunks, int(self.policy), NEVER, self._memory, self._room, self._log)
        return tuple(int(peak) for peak in self._room.peak)

    def take(self, scheme: Scheme, caps: Sequence[int] | None = None) -> None:
        """Goes to `scheme`, and to `caps` if some are given.

        Raises:
            InputError: it is none of this network.
        """
        chunks = chunks_of(self.network, scheme)
        for i, cap in enumerate(caps or ()):
            self._memory.caps[i] = cap
        self.genes = [*scheme.forward, *scheme.backward]
        self._chunks = Chunks(chunks.rows, self._machine.copy(chunks.busy), self._machine.copy(chunks.size))
        self.value = NEVER
        allowed = all(q in options for q, options in zip(self.genes, self._options, strict=True))
        for policy in self._policies if allowed else ():
            end = self._run.run_chunks(self._chunks, policy, self.value, self._memory, self._room, self._log)
            self.evaluations += 1
            if end < self.value:
                self.value, self.policy = int(end), Merge(int(policy))

    def improve(self, p: int) -> bool:
        """Gives process p the best of its options; whether that is a better one."""
        best = self._best
        best[0], best[1], best[2], best[3] = self.value, self.genes[p], int(self.policy), 0
        self._run.improve_option(
            p, self._options[p], self._times, self._sizes, self._policies,
            self._chunks, self._memory, self._room, self._log, best,
        )  # fmt: skip
        self.evaluations += int(best[3])
        better = int(best[0]) < self.value
        self.value, self.genes[p], self.policy = int(best[0]), int(best[1]), Merge(int(best[2]))
        return better

    def _improve_cap(self, i: int) -> None:
        size, best = int(self._chunks.size[2 * i]), self._best
        most = min(self.network.rows, int(self._memory.most[i]) // int(self._memory.held[i]))
        caps = sorted({max(size, most * n // CAPS // size * size) for n in range(1, CAPS + 1)})
        best[0], best[1], best[2], best[3] = self.value, self._memory.caps[i], int(self.policy), 0
        self._run.improve_cap(
            i, self._machine.copy(caps), self._policies, self._chunks, self._memory, self._room, self._log, best
        )
        self.evaluations += int(best[3])
        self.value, self.policy = int(best[0]), Merge(int(best[2]))

    def descend(self, rng: random.Random, over: Callable[[int], bool], changed: Iterable[int] | None = None) -> None:
        """Improves one process after the other, in random order, until none has a better option.

        After a change of a few, `changed`, it looks at those and the ones beside them, and at more only as far as these
        improve. What holds for processes holds for caps; they have numbers after those of processes.
        """
        caps = range(len(self.genes), len(self.genes) + len(self._memory.caps) * self._tuned)
        if changed is None:
            waiting = [*range(len(self.genes)), *caps]
        else:
            waiting = sorted({n for p in changed for n in self._beside(p)})
            waiting += caps if rng.randrange(CAPS_EVERY) == 0 else ()
        while waiting and not over(self.evaluations):
            p = waiting.pop(rng.randrange(len(waiting)))
            if p in caps:
                self._improve_cap(p - len(self.genes))
            elif self.improve(p):
                waiting += sorted(n for n in self._beside(p) if n not in waiting and n != p)

    def _beside(self, p: int) -> set[int]:
        """The process, those before and after it, and those of the other direction at the same places."""
        last = len(self.genes) - 1
        near = {n for n in (p - 1, p, p + 1) if 0 <= n <= last}
        return near | {last - n for n in near}

    def kick(self, rng: random.Random) -> list[int]:
        """Gives a few processes other options, none that takes longer than all does now; says which."""
        genes, times, counts = list(self.genes), self._times, self.network.counts
        chosen = rng.sample(range(len(genes)), min(len(genes), rng.randint(*KICKED)))
        for p in chosen:
            row = p * len(counts)
            genes[p] = rng.choice(
                [q for q in self._options[p] if times[row + q] * counts[q] < self.value] or [genes[p]]
            )
        width = self.network.processes
        self.take(Scheme(tuple(map(int, genes[:width])), tuple(map(int, genes[width:]))))
        return chosen

    def found(self, starts: Sequence[Scheme], effort: Effort, seed: int) -> Found:
        """The best of descents from the best of `starts` and of equal schemes, and of kicks after that."""
        rng = random.Random(seed)
        over = effort.over()
        ranked, free = [], self.caps
        for scheme in [*starts, *map(self.network.equal_scheme, range(len(self.network.sizes)))]:
            self.take(scheme)
            ranked.append((self.value, self.policy, scheme, free))
        ranked.sort(key=lambda each: each[0])
        best = ranked[0]
        descents = [each for each in ranked[:DESCENTS] if each[0] <= HOPELESS * best[0]]
        enough = effort.part(COARSE).over()
        self._options = self._few
        while best[0] < NEVER and not over(self.evaluations):
            changed = None
            if self._options is self._few and enough(self.evaluations):
                self._options, descents = self._every, [best]
            if descents:
                self.take(*descents.pop(0)[2:])
            else:
                self.take(*best[2:])
                changed = self.kick(rng)
            self.descend(rng, over, changed)
            if self.value <= best[0]:
                best = (self.value, self.policy, self.scheme, self.caps)
        value, policy, scheme, caps = best
        return Found(scheme, policy, value, caps, self.evaluations)


def _doublings(sizes: Sequence[int]) -> set[int]:
    """The numbers of some of the `sizes`, which descend: the first, and always the next that is at most half of it."""
    found = [0]
    for number, size in enumerate(sizes):
        if 2 * size <= sizes[found[-1]]:
            found.append(number)
    return {*found, len(sizes) - 1}


def _options(network: Network, memory: Memory) -> list[list[int]]:
    """The options of each process, of stages those whose chunks are within the caps."""
    every = [list(range(len(network.sizes))) for _ in range(2 * network.processes)]
    for i, cap in enumerate(memory.caps):
        every[2 * i] = [q for q in every[2 * i] if network.sizes[q] <= cap]
    return every
