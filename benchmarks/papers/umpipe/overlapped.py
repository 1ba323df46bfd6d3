"""The gain of unequal micro-batches whose directions overlap, over the best scheme with all forwards first.

The search for the sizes of chunks is a coordinate descent from given schemes, followed by seeded kicks. A stage starts
any computation that is ready and never waits for a better one, so only the sizes are searched. In a descent, a process
takes the best of its options while the other processes keep theirs, until no process has a better option. A kick gives
random options to a few processes, after which their neighbors are improved again. The number of rows that a stage may
have in flight is searched in the same way, because a stage that runs ahead less can be available earlier for more
urgent work.

A search takes two seconds of one core, or less with `--quick`. "Equal" is the best 1F1B with equal chunks everywhere.
Simulation networks are those of the paper, in which each size of a chunk has a random time from 1 to 100. Realistic
networks have times that are plausible for devices.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.report import Report
from lightning_pipes.ir import InputError, check_count, short_repr
from lightning_pipes.sim.loops.jit import LATEST_TIME
from lightning_pipes.strategies.umpipe.network import Network, Scheme
from lightning_pipes.strategies.umpipe.overlapped import Merge
from lightning_pipes.strategies.umpipe.overlapped.kernel import OVERLAPPED_KERNELS
from lightning_pipes.strategies.umpipe.overlapped.tables import Chunks, make_log, make_memory, make_room
from lightning_pipes.strategies.umpipe.search import search_optimum
from tests.strategies.umpipe.overlapped.runs import chunks_of, in_flight
from tests.strategies.umpipe.search.greedy import best_equal_scheme, equal_scheme
from tests.strategies.umpipe.synthetic_networks import powers_of_two, realistic, simulated

EAGER = (Merge.BACKWARD_FIRST, Merge.FORWARD_FIRST)
"""The policies that a search tries for each scheme."""
CAPS = 12
"""The number of caps that the search tries for a stage, in equal steps up to the most that the stage may hold."""
CAPS_EVERY = 8
"""The mean number of kicks per kick after which all caps are searched, too."""
DESCENTS = 3
"""The number of starts from which a search descends."""
HOPELESS = 1.5
"""The largest makespan of a start from which a search descends, relative to the best start."""
COARSE = 0.2
"""The share of a search that only uses sizes that differ by a factor of two or more.

If there are many sizes, the sizes between these have similar makespans.
"""
KICKED = (1, 4)
"""The smallest and the largest number of processes that a kick changes."""


@dataclass(frozen=True)
class Found:
    """The best scheme of a search.

    Attributes:
        scheme: the scheme to run.
        policy: the policy with which it runs.
        value: the makespan, in the network's unit.
        caps: the largest number of rows in flight with which each stage starts another forward.
        evaluations: the number of runs that the search needed.
    """

    scheme: Scheme
    policy: Merge
    value: int
    caps: tuple[int, ...]
    evaluations: int


@dataclass(frozen=True)
class Effort:
    """The limit of a search. The search ends when the first of the limits is reached.

    Attributes:
        evaluations: the number of evaluations, or None.
        seconds: the processor time of the searching thread, or None.

    Raises:
        InputError: no limit is given, `evaluations` is less than 1, or `seconds` is not positive.
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
        """Return this effort multiplied by `share`."""
        return Effort(
            None if self.evaluations is None else max(1, round(share * self.evaluations)),
            None if self.seconds is None else share * self.seconds,
        )

    def over(self) -> Callable[[int], bool]:
        """Return a function that returns whether the search has to end, given the number of evaluations.

        The processor time counts from this call.
        """
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
) -> Found:
    """Return the best scheme of a search.

    It is not worse than any of `starts` or than equal chunks everywhere. If only `evaluations` is given, the same seed
    gives the same scheme.

    Args:
        network: the times of all processes and options.
        starts: schemes to begin with, in addition to the equal ones. The best flushed scheme is a good start.
        seconds: the limit of processor time, see `Effort`.
        evaluations: the limit of evaluations, see `Effort`.
        seed: the seed of the kicks and of the order in which processes are improved.

    Raises:
        InputError: the search has no limit, or a start is not a scheme of this network.
    """
    return Descent(network).found([*starts], Effort(evaluations, seconds), seed)


class Descent:
    """A scheme with its makespan, and methods that improve it.

    Attributes:
        network: the times of all processes and options.
        genes: the options of all processes, first the forward ones and then the backward ones.
        value: the makespan, or LATEST_TIME if the scheme can't run.
        policy: the policy with this makespan.
        evaluations: the number of runs so far.
    """

    def __init__(self, network: Network) -> None:
        machine = OVERLAPPED_KERNELS.fastest
        self.network = network
        self._machine, self._run = machine, machine.run
        self._times = machine.copy(np.concatenate([network.forward, network.backward]))
        self._sizes = machine.copy(network.sizes)
        self._policies = machine.copy(EAGER)
        self._memory = make_memory(machine, network.stages, in_flight(network, (network.rows,) * network.stages))
        self._room, self._log = make_room(machine, network.stages), make_log(machine)
        few = _doublings(network.sizes)
        self._every = machine.copy(range(len(network.sizes)))
        self._few = machine.copy(sorted(few))
        self._options = self._every
        self._best = machine.fill(4)
        self.genes = [0] * (2 * network.processes)
        self.value, self.policy, self.evaluations = LATEST_TIME, EAGER[0], 0
        self._chunks = Chunks(network.rows, machine.fill(len(self.genes)), machine.fill(len(self.genes)))

    @property
    def scheme(self) -> Scheme:
        """The scheme with the current options."""
        width = self.network.processes
        return Scheme(tuple(self.genes[:width]), tuple(self.genes[width:]))

    @property
    def caps(self) -> tuple[int, ...]:
        """The largest number of rows in flight with which each stage starts another forward."""
        return tuple(int(cap) for cap in self._memory.caps)

    def take(self, scheme: Scheme, caps: Sequence[int] = ()) -> None:
        """Change to a scheme, and to `caps` if they are given.

        Raises:
            InputError: the scheme does not belong to this network.
        """
        chunks = chunks_of(self.network, scheme)
        for i, cap in enumerate(caps):
            self._memory.caps[i] = cap
        self.genes = [*scheme.forward, *scheme.backward]
        self._chunks = Chunks(chunks.rows, self._machine.copy(chunks.busy), self._machine.copy(chunks.size))
        self.value = LATEST_TIME
        allowed = all(q in self._options for q in self.genes)
        for policy in self._policies if allowed else ():
            end = self._run.run_chunks(self._chunks, policy, self.value, self._memory, self._room, self._log)
            self.evaluations += 1
            if end < self.value:
                self.value, self.policy = int(end), Merge(int(policy))

    def improve(self, p: int) -> bool:
        """Change process p to the best of its options, and return whether this option is a better one."""
        best = self._best
        best[0], best[1], best[2], best[3] = self.value, self.genes[p], int(self.policy), 0
        self._run.improve_option(
            p, self._options, self._times, self._sizes, self._policies,
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
        """Improve one process or cap after another, in random order, until none has a better option.

        Args:
            rng: the source of random numbers.
            over: returns whether the search has to end.
            changed: the processes that have changed. In this case, only these and their neighbors are improved, and
                further ones only next to processes that have improved. Caps have numbers after the processes.
        """
        caps = range(len(self.genes), len(self.genes) + len(self._memory.caps))
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
        """Return the process, its neighbors, and the processes of the other direction at the same places."""
        last = len(self.genes) - 1
        near = {n for n in (p - 1, p, p + 1) if 0 <= n <= last}
        return near | {last - n for n in near}

    def kick(self, rng: random.Random) -> list[int]:
        """Change a few processes to random options, and return these processes.

        No option is used whose own time exceeds the current makespan.
        """
        genes, times, counts = list(self.genes), self._times, self.network.counts
        chosen = rng.sample(range(len(genes)), min(len(genes), rng.randint(*KICKED)))
        for p in chosen:
            row = p * len(counts)
            genes[p] = rng.choice([q for q in self._options if times[row + q] * counts[q] < self.value] or [genes[p]])
        width = self.network.processes
        self.take(Scheme(tuple(map(int, genes[:width])), tuple(map(int, genes[width:]))))
        return chosen

    def found(self, starts: Sequence[Scheme], effort: Effort, seed: int) -> Found:
        """Return the best result of descents from the best starts and equal schemes, and of the kicks that follow."""
        rng = random.Random(seed)
        over = effort.over()
        ranked, free = [], self.caps
        for scheme in [*starts, *(equal_scheme(self.network, q) for q in range(len(self.network.sizes)))]:
            self.take(scheme)
            ranked.append((self.value, self.policy, scheme, free))
        ranked.sort(key=lambda each: each[0])
        best = ranked[0]
        descents = [each for each in ranked[:DESCENTS] if each[0] <= HOPELESS * best[0]]
        enough = effort.part(COARSE).over()
        self._options = self._few
        while best[0] < LATEST_TIME and not over(self.evaluations):
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
    """Return the positions of some of `sizes`, which are in descending order.

    Each selected size is at most half of the one before. The last size is always included.
    """
    found = [0]
    for number, size in enumerate(sizes):
        if 2 * size <= sizes[found[-1]]:
            found.append(number)
    return {*found, len(sizes) - 1}


def gain(quick: bool) -> Report:
    """Compare the best flushed scheme with the result of a search for overlapped directions."""
    lines = ["gain: mean times over seeds; gain over the best flushed scheme, mean (least to largest)"]
    lines.append("networks      N     P  options  seeds   GPipe  flushed  proven    equal  overlapped  gain")
    simulation = [(2, 512, 3), (5, 512, 3), (10, 512, 3)] if quick else [(2, 512, 10), (5, 512, 10), (10, 64, 10)]
    simulation += [] if quick else [(10, 512, 10), (20, 512, 10), (20, 1024, 3)]
    real = [(8, 64, 3), (14, 512, 3)] if quick else [(8, 64, 10), (14, 512, 10), (16, 64, 10), (32, 512, 5)]
    cases = [("simulation", *case) for case in simulation] + [("realistic", *case) for case in real]
    cases += [] if quick else [("realistic, all", 16, 64, 5), ("realistic, all", 14, 512, 5)]
    keys: dict[str, float] = {}
    ratios: dict[str, list[float]] = {"simulation": [], "realistic": []}
    for name, stages, rows, seeds in cases:
        table, proven = [], 0
        for seed in range(seeds):
            network = _network(name, stages, rows, seed)
            best = search_optimum(network, seconds=10)
            proven += best.gap == 0
            found = search(network, [best.scheme], seconds=0.7 if quick else 2, seed=seed)
            table.append((best_equal_scheme(network).value, best.value, equal(network), found.value))
        values = np.array(table, float)
        here = values[:, 1] / values[:, 3]
        ratios[name.partition(",")[0]] += here.tolist()
        means = values.mean(axis=0)
        options = "2^n" if name == "realistic" else "1..P"
        lines.append(
            f"{name.partition(',')[0]:10} {stages:4} {rows:5} {options:>8} {seeds:6} {means[0]:7.0f} {means[1]:8.1f} "
            f"{proven:7} {means[2]:8.1f} {means[3]:11.1f}  {here.mean() - 1:+.1%} "
            f"({here.min() - 1:+.1%} to {here.max() - 1:+.1%})"
        )
        kind = {"simulation": "simulation", "realistic": "realistic", "realistic, all": "all"}[name]
        keys[f"gain_{kind}_n{stages}_p{rows}"] = float(here.mean())
    keys["um1f1b_gain"] = float(np.mean(ratios["realistic"]))
    keys["um1f1b_gain_simulation"] = float(np.mean(ratios["simulation"]))
    return Report(lines, keys)


def equal(network: Network) -> int:
    """Return the least time with equal chunks everywhere and any number of rows in flight."""
    descent, values = Descent(network), []
    for q in range(len(network.sizes)):
        descent.take(equal_scheme(network, q))
        values.append(descent.value)
    return min(values)


def _network(name: str, stages: int, rows: int, seed: int) -> Network:
    if name == "simulation":
        return simulated(stages, rows, seed).network
    return realistic(stages, rows, seed, powers_of_two(rows) if name == "realistic" else None).network
