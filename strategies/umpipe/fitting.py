"""The fastest choice among priced ways to cut: stages whose forward and backward are chosen together, and links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from random import Random
from typing import NamedTuple

from lightning_pipes.ir import Cut, Kind, Plan, Span
from lightning_pipes.strategies.umpipe.network import align_spans, spans_of_size
from lightning_pipes.strategies.umpipe.overlapped.kernel import NEVER, OVERLAPPED
from lightning_pipes.strategies.umpipe.overlapped.run import Merge
from lightning_pipes.strategies.umpipe.overlapped.tables import FREE, Chunks, Memory, make_log, make_memory, make_room
from lightning_pipes.strategies.umpipe.pricing import CutOption

DESCENTS = 6
"""Starts from which a search descends."""
KICKS = 24
"""How often it begins again from the best choice, with other sizes in a few neighbouring stages."""
GRADES = 6
"""Parts into which stages are divided by what a coarser size saves them."""
EFFORT = 3_000_000
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
        links: of each link the options of its two directions; `CutOption.forward` and `forward_time` say all.
        least: the fewest samples of a chunk: a shorter last one joins the one before it, at the price of one.
    """

    rows: int
    stages: tuple[tuple[CutOption, ...], ...]
    links: tuple[tuple[tuple[CutOption, ...], tuple[CutOption, ...]], ...]
    least: int = 1

    @cached_property
    def kernel_options(self) -> list[list[tuple[_Part, ...]]]:
        """Options of each decision as the kernel takes them: stages, then links forward and back."""
        last = 4 * len(self.stages) - 3
        found: list[list[tuple[_Part, ...]]] = [
            [(_Part(2 * s, o.forward, o.forward_time), _Part(last - 2 * s, o.backward, o.backward_time)) for o in every]
            for s, every in enumerate(self.stages)
        ]
        for s, (there, back) in enumerate(self.links):
            found.append([(_Part(2 * s + 1, o.forward, o.forward_time),) for o in there])
            found.append([(_Part(last - 1 - 2 * s, o.forward, o.forward_time),) for o in back])
        return found

    def equal_choice(self, size: int) -> tuple[int, ...] | None:
        """Chunks of `size` everywhere; None where some process has no such option."""
        chosen = []
        for options in self.kernel_options:
            same = [n for n, parts in enumerate(options) if all(part.size == size for part in parts)]
            if not same:
                return None
            chosen.append(same[0])
        return tuple(chosen)

    def list_graded(self, coarse: int, fine: int) -> list[tuple[int, ...]]:
        """Choices between two sizes: a few stages, half of them, and so on take the coarser one, those first that save
        most of their work by it; what a stage sends has its size."""

        def saved_work(stage: int) -> float:
            both = [self.stage_moves[stage].get(size) for size in (coarse, fine)]
            coarser, finer = (None if move is None else self._work(stage, move[stage]) for move in both)
            return 0.0 if coarser is None or finer is None else finer / max(1, coarser)

        n = len(self.stages)
        order = sorted(range(n), key=saved_work, reverse=True)
        found = []
        for most in sorted({1, n - 1, *(n * part // GRADES for part in range(1, GRADES))} - {0, n}):
            chosen = [0] * len(self.kernel_options)
            for rank, stage in enumerate(order):
                offered = self.stage_moves[stage]
                size = coarse if rank < most else fine
                move = (
                    offered.get(size) or offered[max((each for each in offered if each < size), default=min(offered))]
                )
                for at, option in move.items():
                    chosen[at] = option
            found.append(tuple(chosen))
        return found

    def _work(self, stage: int, number: int) -> int:
        return sum(-(-self.rows // part.size) * part.time for part in self.kernel_options[stage][number])

    def perturb_choice(self, chosen: Sequence[int], sizes: Sequence[int], rng: Random) -> tuple[int, ...]:
        """`chosen` with one size in a few neighbouring stages, and on the links between them and after them."""
        n = len(self.stages)
        first = rng.randrange(n)
        stages = range(first, min(n, first + rng.randint(1, max(1, n // 2))))
        other = self.equal_choice(rng.choice(sizes))
        if other is None:
            return tuple(chosen)
        links = {n + 2 * s + back for s in stages if s < n - 1 for back in (0, 1)}
        return tuple(
            o if at in stages or at in links else c for at, (c, o) in enumerate(zip(chosen, other, strict=True))
        )

    @cached_property
    def stage_moves(self) -> list[dict[int, dict[int, int]]]:
        """Joint moves of each stage by size: the option of its place and of its messages."""
        n = len(self.stages)
        found: list[dict[int, dict[int, int]]] = []
        for s, options in enumerate(self.stages):
            sends = [n + 2 * s] * (s < n - 1) + [n + 2 * s - 1] * (s > 0)
            moves: dict[int, dict[int, int]] = {}
            for number, option in enumerate(options):
                if option.forward == (size := option.backward):
                    same = {
                        at: next(i for i, (part,) in enumerate(self.kernel_options[at]) if part.size == size)
                        for at in sends
                    }
                    moves[size] = {s: number, **same}
            found.append(moves)
        return found

    def choice_of_plan(self, plan: Plan) -> tuple[int, ...] | None:
        """Return the choice with the sizes and whole forwards of `plan`; None where there is none."""

        def size(kind: Kind, stage: int) -> int:
            return plan.spans(kind, stage)[0].rows

        whole = plan.whole_forward or (False,) * plan.n_stages
        stages = range(plan.n_stages)
        wanted: list[tuple[int, ...]] = [(size(Kind.F, s), size(Kind.B, s), whole[s]) for s in stages]
        for s in range(plan.n_stages - 1):
            wanted += [(size(Kind.SF, s),), (size(Kind.SB, s + 1),)]
        offered: list[list[tuple[int, ...]]] = [[(o.forward, o.backward, o.whole) for o in x] for x in self.stages]
        offered += [[(o.forward,) for o in side] for both in self.links for side in both]
        found = [each.index(one) for each, one in zip(offered, wanted, strict=True) if one in each]
        return tuple(found) if len(found) == len(wanted) else None

    def plan(self, chosen: Sequence[int], base: Plan) -> Plan:
        """`base` cut as chosen."""
        n = len(self.stages)
        options = [every[choice] for every, choice in zip(self.stages, chosen, strict=False)]
        there = [every[choice].forward for (every, _), choice in zip(self.links, chosen[n::2], strict=True)]
        back = [every[choice].forward for (_, every), choice in zip(self.links, chosen[n + 1 :: 2], strict=True)]

        def cut_into(size: int) -> tuple[Span, ...]:
            return spans_of_size(self.rows, size, self.least)

        forward = tuple(cut_into(o.forward) for o in options)
        backward = tuple(
            align_spans(cut_into(o.backward), f, self.least) for o, f in zip(options, forward, strict=True)
        )
        cut = Cut(
            self.rows,
            forward,
            forward if all(o.forward == o.backward for o in options) else backward,
            (*map(cut_into, there), forward[-1]),
            (backward[0], *map(cut_into, back)),
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


def fit_choices(
    choices: Choices,
    merge: Merge,
    caps: Sequence[int] = (),
    starts: Sequence[Sequence[int]] = (),
    ranks: Sequence[int] = (),
) -> list[tuple[int, tuple[int, ...]]]:
    """(nanoseconds, choice) of what descents have found, the fastest first: one stage after the other takes the best
    size for both directions and for what it sends, and from there one process after the other its best option, until
    none has a better one. Seeded, and without a clock: equal input, equal answer.

    Descents begin at the best of equal choices, and of those between two sizes: stages whose time hardly depends on the
    samples take the coarser one, and those whose time is proportional to them the finer one.

    Args:
        merge: what a stage runs that could run a forward and a backward.
        caps: samples that each stage may hold between F and B at most; empty means no limit.
        starts: choices to begin at besides equal ones, which are always among them.
        ranks: of each stage; by default one of its own.
    """
    search = _Search(choices, merge, caps, ranks)
    sizes = sorted({part.size for options in choices.kernel_options for parts in options for part in parts})
    every = [*map(tuple, starts), *(same for size in sizes if (same := choices.equal_choice(size)) is not None)]
    every += [choice for a, b in combinations(sizes, 2) for choice in choices.list_graded(b, a)]
    ranked = sorted((search.evaluate_choice(start), start) for start in dict.fromkeys(every))
    found = dict.fromkeys(ranked)
    rng = Random(0)
    for improved, enough in ((search.descend_by_stage, EFFORT // 2), (search.descend_by_process, 0)):
        for value, start in sorted(found)[:DESCENTS]:
            if value < NEVER:
                found[improved(value, start)] = None
        for _ in range(KICKS):
            value, best = min(found)
            if value < NEVER and search.left > enough:
                start = choices.perturb_choice(best, sizes, rng)
                found[improved(search.evaluate_choice(start), start)] = None
    return sorted(each for each in found if each[0] < NEVER)


def value_choice(choices: Choices, merge: Merge, chosen: Sequence[int]) -> int:
    """Return nanoseconds of one choice, each stage on a rank of its own."""
    return _Search(choices, merge, (), ()).evaluate_choice(chosen)


class _Search:
    """Evaluates choices.

    Attributes:
        left: the effort that is left, in chunks.
    """

    def __init__(self, choices: Choices, merge: Merge, caps: Sequence[int], ranks: Sequence[int]) -> None:
        self._machine = machine = OVERLAPPED.fastest
        stages = len(choices.stages)
        each = (1,) * stages
        limit = Memory(tuple(caps), each, (0,) * stages, (0,) * stages, (FREE,) * stages) if caps else None
        self._choices, self._merge, self._caps = choices, int(merge), tuple(caps)
        self._memory, self._room = make_memory(machine, stages, limit), make_room(machine, stages, ranks)
        self._log = make_log(machine)
        processes = 4 * stages - 2
        self._chunks = Chunks(choices.rows, machine.fill(processes), machine.fill(processes, choices.rows))
        self.left = EFFORT

    def evaluate_choice(self, chosen: Sequence[int], limit: int = NEVER) -> int:
        """Return nanoseconds of a choice; NEVER where that is not below `limit`, or stages may not hold so much."""
        for options, choice in zip(self._choices.kernel_options, chosen, strict=True):
            self._put(options[choice])
        return self._run(limit)

    def _put(self, parts: Sequence[_Part]) -> None:
        for process, size, time in parts:
            self._chunks.size[process], self._chunks.busy[process] = size, time

    def _run(self, limit: int) -> int:
        if any(self._chunks.size[2 * s] > cap for s, cap in enumerate(self._caps)):
            return NEVER
        self.left -= sum(-(-self._choices.rows // int(size)) for size in self._chunks.size)
        return int(self._machine.run.run_chunks(self._chunks, self._merge, limit, self._memory, self._room, self._log))

    def descend_by_stage(self, value: int, start: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return the end of a descent over one stage at a time, with its messages."""
        chosen, before = tuple(start), NEVER + 1
        while value < before and self.left > 0:
            before = value
            for moves in self._choices.stage_moves:
                for move in moves.values():
                    other = tuple(move.get(at, n) for at, n in enumerate(chosen))
                    if other != chosen and (took := self.evaluate_choice(other, value)) < value:
                        value, chosen = took, other
        return value, chosen

    def descend_by_process(self, value: int, start: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return the end of a descent over one process at a time."""
        chosen = list(start)
        self.evaluate_choice(chosen)
        places = self._choices.kernel_options
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
