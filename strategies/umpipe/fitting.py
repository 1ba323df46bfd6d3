"""The fastest choice among priced ways to cut: stages whose forward and backward are chosen together, and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from random import Random
from typing import NamedTuple

from lightning_pipes.ir import Cut, Plan
from lightning_pipes.strategies.umpipe.network import sized
from lightning_pipes.strategies.umpipe.overlapped.kernel import NEVER
from lightning_pipes.strategies.umpipe.overlapped.machine import FREE, fastest
from lightning_pipes.strategies.umpipe.overlapped.run import Merge
from lightning_pipes.strategies.umpipe.overlapped.tables import Chunks, Memory
from lightning_pipes.strategies.umpipe.pricing import Option

DESCENTS = 6
"""Starts from which a search descends."""
KICKS = 24
"""How often it begins again from the best choice, with other sizes in a few neighbouring stages."""
EFFORT = 1_500_000
"""Chunks that are run in a search, in Python a few seconds: large plans are tried less often."""


class _Part(NamedTuple):
    """The choice for one process: its number, and size and time of a chunk."""

    process: int
    size: int
    time: int


@dataclass(frozen=True)
class Choices:
    """Everything there is to choose: by stage its options, by link its sizes and times, forward and backward.

    Attributes:
        rows: samples of the batch.
        stages: the options of each.
        links: of each link the options of its two directions; `Option.forward` and `forward_time` say all.
    """

    rows: int
    stages: tuple[tuple[Option, ...], ...]
    links: tuple[tuple[tuple[Option, ...], tuple[Option, ...]], ...]

    @cached_property
    def places(self) -> list[list[tuple[_Part, ...]]]:
        """Of each thing that is chosen, its options as the kernel takes them: stages, then links forward and back."""
        last = 4 * len(self.stages) - 3
        found: list[list[tuple[_Part, ...]]] = [
            [(_Part(2 * s, o.forward, o.forward_time), _Part(last - 2 * s, o.backward, o.backward_time)) for o in every]
            for s, every in enumerate(self.stages)
        ]
        for s, (there, back) in enumerate(self.links):
            found.append([(_Part(2 * s + 1, o.forward, o.forward_time),) for o in there])
            found.append([(_Part(last - 1 - 2 * s, o.forward, o.forward_time),) for o in back])
        return found

    def equal(self, size: int) -> tuple[int, ...] | None:
        """Chunks of `size` everywhere; None where some process has no such option."""
        chosen = []
        for options in self.places:
            same = [n for n, parts in enumerate(options) if all(part.size == size for part in parts)]
            if not same:
                return None
            chosen.append(same[0])
        return tuple(chosen)

    def halves(self, coarse: int, fine: int) -> tuple[int, ...]:
        """Of two sizes each process takes the one with which it works less for a batch; the finer one of equals."""

        def work(parts: tuple[_Part, ...]) -> tuple[int, int]:
            return sum(-(-self.rows // part.size) * part.time for part in parts), parts[0].size

        chosen = []
        for options in self.places:
            both = [n for n, parts in enumerate(options) if {part.size for part in parts} <= {coarse, fine}]
            same = [n for n in both if len({part.size for part in options[n]}) == 1]
            chosen.append(min(same or both or range(len(options)), key=lambda n: work(options[n])))
        return tuple(chosen)

    def kicked(self, chosen: Sequence[int], sizes: Sequence[int], rng: Random) -> tuple[int, ...]:
        """`chosen` with one size in a few neighbouring stages, and on the links between them and after them."""
        n = len(self.stages)
        first = rng.randrange(n)
        stages = range(first, min(n, first + rng.randint(1, max(1, n // 2))))
        other = self.equal(rng.choice(sizes))
        if other is None:
            return tuple(chosen)
        links = {n + 2 * s + back for s in stages if s < n - 1 for back in (0, 1)}
        return tuple(
            o if at in stages or at in links else c for at, (c, o) in enumerate(zip(chosen, other, strict=True))
        )

    def plan(self, chosen: Sequence[int], base: Plan) -> Plan:
        """`base` cut as chosen."""
        n = len(self.stages)
        options = [every[choice] for every, choice in zip(self.stages, chosen, strict=False)]
        there = [every[choice].forward for (every, _), choice in zip(self.links, chosen[n::2], strict=True)]
        back = [every[choice].forward for (_, every), choice in zip(self.links, chosen[n + 1 :: 2], strict=True)]
        forward = tuple(sized(self.rows, o.forward) for o in options)
        backward = tuple(sized(self.rows, o.backward) for o in options)
        cut = Cut(
            self.rows,
            forward,
            forward if all(o.forward == o.backward for o in options) else backward,
            (*(sized(self.rows, size) for size in there), forward[-1]),
            (backward[0], *(sized(self.rows, size) for size in back)),
        )
        whole = tuple(o.whole for o in options)
        return Plan(
            base.ranks,
            (cut,),
            layers=base.layers,
            recompute=base.recompute,
            limits=base.limits,
            whole_forward=whole if any(whole) else (),
        )


def fitted(
    choices: Choices, merge: Merge, caps: Sequence[int] = (), starts: Sequence[Sequence[int]] = ()
) -> list[tuple[int, tuple[int, ...]]]:
    """(nanoseconds, choice) of what descents have found, the fastest first: one process after the other takes its best
    option until none has a better one. Seeded, and without a clock: equal input, equal answer.

    Descents begin at the best of equal choices, and of those between two sizes: a stage whose time hardly depends on
    the samples takes the coarser one, and one whose time is proportional to them the finer one.

    Args:
        merge: what a stage runs that could run a forward and a backward.
        caps: samples that each stage may hold between F and B at most; empty means no limit.
        starts: choices to begin at besides equal ones, which are always among them.
    """
    search = _Search(choices, merge, caps)
    sizes = sorted({part.size for options in choices.places for parts in options for part in parts})
    every = [*map(tuple, starts), *(same for size in sizes if (same := choices.equal(size)) is not None)]
    every += [choices.halves(b, a) for a, b in combinations(sizes, 2)]
    ranked = sorted((search.value(start), start) for start in dict.fromkeys(every))
    found = dict.fromkeys(ranked)
    for value, start in ranked[:DESCENTS]:
        if value < NEVER:
            found[search.descended(value, start)] = None
    rng = Random(0)
    for _ in range(KICKS):
        value, best = min(found)
        if value < NEVER and search.left > 0:
            start = choices.kicked(best, sizes, rng)
            found[search.descended(search.value(start), start)] = None
    return sorted(each for each in found if each[0] < NEVER)


class _Search:
    """Evaluates choices.

    Attributes:
        left: the effort that is left, in chunks.
    """

    def __init__(self, choices: Choices, merge: Merge, caps: Sequence[int]) -> None:
        self._machine = machine = fastest()
        stages = len(choices.stages)
        each = (1,) * stages
        limit = Memory(tuple(caps), each, (0,) * stages, (0,) * stages, (FREE,) * stages) if caps else None
        self._choices, self._merge, self._caps = choices, int(merge), tuple(caps)
        self._memory, self._room, self._log = machine.memory(stages, limit), machine.room(stages), machine.log()
        processes = 4 * stages - 2
        self._chunks = Chunks(choices.rows, machine.fill(processes), machine.fill(processes, choices.rows))
        self.left = EFFORT

    def value(self, chosen: Sequence[int], limit: int = NEVER) -> int:
        """Nanoseconds of a choice; NEVER where that is not below `limit`, or stages may not hold so much."""
        for options, choice in zip(self._choices.places, chosen, strict=True):
            self._put(options[choice])
        return self._run(limit)

    def _put(self, parts: Sequence[_Part]) -> None:
        for process, size, time in parts:
            self._chunks.size[process], self._chunks.busy[process] = size, time

    def _run(self, limit: int) -> int:
        if any(self._chunks.size[2 * s] > cap for s, cap in enumerate(self._caps)):
            return NEVER
        self.left -= sum(-(-self._choices.rows // int(size)) for size in self._chunks.size)
        return int(self._machine.run.dispatched(self._chunks, self._merge, limit, self._memory, self._room, self._log))

    def descended(self, value: int, start: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Where a descent ends."""
        chosen = list(start)
        self.value(chosen)
        places = self._choices.places
        at = unchanged = 0
        while unchanged < len(places) and self.left > 0:
            before = chosen[at]
            for n, parts in enumerate(places[at]):
                if n != chosen[at]:
                    self._put(parts)
                    took = self._run(value)
                    if took < value:
                        value, chosen[at] = took, n
            self._put(places[at][chosen[at]])
            unchanged = 1 if chosen[at] != before else unchanged + 1
            at = (at + 1) % len(places)
        return value, tuple(chosen)
