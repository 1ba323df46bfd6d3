"""Search for the fastest choice among priced cuts.

A choice has one option for each stage, for both of its directions, and one option for each direction of a link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from random import Random
from typing import NamedTuple

from lightning_pipes.ir import Cut, Kind, Plan, Span
from lightning_pipes.sim.loops.jit import LATEST_TIME
from lightning_pipes.strategies.umpipe.network import align_spans, spans_of_size
from lightning_pipes.strategies.umpipe.overlapped import Merge
from lightning_pipes.strategies.umpipe.overlapped.kernel import OVERLAPPED_KERNELS
from lightning_pipes.strategies.umpipe.overlapped.tables import (
    NO_CAP,
    Chunks,
    Memory,
    make_log,
    make_memory,
    make_room,
)
from lightning_pipes.strategies.umpipe.pricing import CutOption

N_DESCENTS = 6
"""The number of starts from which the search descends."""
N_RESTARTS = 24
"""The number of restarts from the best choice, after changing the sizes of a few neighboring stages."""
N_STAGE_GROUPS = 6
"""The number of groups into which stages are divided by the time that a coarser size saves them."""
MAX_SEARCH_CHUNKS = 3_000_000
"""The number of chunks that one search runs, which takes a few seconds in Python. Large plans get fewer evaluations."""


class _Part(NamedTuple):
    """The choice for one process: the number of the process, and the size and duration of a chunk."""

    process: int
    size: int
    time: int


@dataclass(frozen=True)
class Choices:
    """All options among which the search chooses: the options of each stage, and of both directions of each link.

    Attributes:
        rows: the number of samples in the batch.
        stages: the options of each stage.
        links: the options of each link, forward and backward. Only `forward` and `forward_time` of these options are
            used.
        least: the minimum number of samples in a chunk. If the last chunk would be smaller, it is merged into the chunk
            before it, at the price of one chunk.
    """

    rows: int
    stages: tuple[tuple[CutOption, ...], ...]
    links: tuple[tuple[tuple[CutOption, ...], tuple[CutOption, ...]], ...]
    least: int = 1

    @cached_property
    def kernel_options(self) -> list[list[tuple[_Part, ...]]]:
        """The options of each decision in the form that the kernel takes: stages, then links forward and back."""
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
        """Return the choice with chunks of `size` everywhere, or None if a process has no such option."""
        chosen = []
        for options in self.kernel_options:
            same = [n for n, parts in enumerate(options) if all(part.size == size for part in parts)]
            if not same:
                return None
            chosen.append(same[0])
        return tuple(chosen)

    def list_graded(self, coarse: int, fine: int) -> list[tuple[int, ...]]:
        """Return choices between two sizes, in which some of the stages take the coarser size.

        These are one stage, several shares of all stages, or all stages but one. The stages that save the largest share
        of their work with the coarser size take it first. The messages that a stage sends have the size of the stage.
        """

        def saved_work(stage: int) -> float:
            both = [self.stage_moves[stage].get(size) for size in (coarse, fine)]
            coarser, finer = (None if move is None else self._work(stage, move[stage]) for move in both)
            return 0.0 if coarser is None or finer is None else finer / max(1, coarser)

        n = len(self.stages)
        order = sorted(range(n), key=saved_work, reverse=True)
        found = []
        for most in sorted({1, n - 1, *(n * part // N_STAGE_GROUPS for part in range(1, N_STAGE_GROUPS))} - {0, n}):
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
        """Return `chosen` with one size in a few neighboring stages, and on the links between and after them."""
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
        """The joint moves of each stage by size: the option of the stage and of the messages that it sends."""
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
        """Return the choice with the sizes and the whole forwards of `plan`, or None if it is not among the options."""

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
        """Return `base` with the batch cut as in `chosen`."""
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
            early_recompute=base.early_recompute,
            kept_microbatches=base.kept_microbatches,
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
    """Return the choices found by descents, with their time in nanoseconds, the fastest first.

    A descent first changes one stage at a time, together with the messages that it sends, and gives it the best size
    for both directions. It then changes one process at a time to its best option, until no process has a better one.
    The search is seeded and does not read a clock, so equal input gives equal output.

    The descents begin at the best among the equal choices, the choices between two sizes, and `starts`. In a choice
    between two sizes, stages whose time hardly depends on the number of samples take the coarser size, and stages whose
    time is proportional to it take the finer size.

    Args:
        choices: the options of all stages and links.
        merge: which chunk a stage starts if it could start a forward and a backward.
        caps: the maximum number of samples that each stage may hold between F and B. Empty means no limit.
        starts: additional choices from which descents may begin.
        ranks: the rank of each stage. By default, each stage has a rank of its own.
    """
    search = _Search(choices, merge, caps, ranks)
    sizes = sorted({part.size for options in choices.kernel_options for parts in options for part in parts})
    every = [*map(tuple, starts), *(same for size in sizes if (same := choices.equal_choice(size)) is not None)]
    every += [choice for a, b in combinations(sizes, 2) for choice in choices.list_graded(b, a)]
    ranked = sorted((search.evaluate_choice(start), start) for start in dict.fromkeys(every))
    found = dict.fromkeys(ranked)
    rng = Random(0)
    for improved, enough in ((search.descend_by_stage, MAX_SEARCH_CHUNKS // 2), (search.descend_by_process, 0)):
        for value, start in sorted(found)[:N_DESCENTS]:
            if value < LATEST_TIME:
                found[improved(value, start)] = None
        for _ in range(N_RESTARTS):
            value, best = min(found)
            if value < LATEST_TIME and search.left > enough:
                start = choices.perturb_choice(best, sizes, rng)
                found[improved(search.evaluate_choice(start), start)] = None
    return sorted(each for each in found if each[0] < LATEST_TIME)


def value_choice(choices: Choices, merge: Merge, chosen: Sequence[int]) -> int:
    """Return the time of one choice in nanoseconds, with each stage on a rank of its own."""
    return _Search(choices, merge, (), ()).evaluate_choice(chosen)


class _Search:
    """Evaluation of choices, and descents from them.

    Attributes:
        left: the number of chunks that the search may still run.
    """

    def __init__(self, choices: Choices, merge: Merge, caps: Sequence[int], ranks: Sequence[int]) -> None:
        self._machine = machine = OVERLAPPED_KERNELS.fastest
        stages = len(choices.stages)
        each = (1,) * stages
        limit = Memory(tuple(caps), each, (0,) * stages, (0,) * stages, (NO_CAP,) * stages) if caps else None
        self._choices, self._merge, self._caps = choices, int(merge), tuple(caps)
        self._memory, self._room = make_memory(machine, stages, limit), make_room(machine, stages, ranks)
        self._log = make_log(machine)
        processes = 4 * stages - 2
        self._chunks = Chunks(choices.rows, machine.fill(processes), machine.fill(processes, choices.rows))
        self.left = MAX_SEARCH_CHUNKS

    def evaluate_choice(self, chosen: Sequence[int], limit: int = LATEST_TIME) -> int:
        """Return the time of a choice in nanoseconds.

        The result is LATEST_TIME if it is not below `limit`, or if a chunk exceeds the cap of its stage.
        """
        for options, choice in zip(self._choices.kernel_options, chosen, strict=True):
            self._put(options[choice])
        return self._run(limit)

    def _put(self, parts: Sequence[_Part]) -> None:
        for process, size, time in parts:
            self._chunks.size[process], self._chunks.busy[process] = size, time

    def _run(self, limit: int) -> int:
        if any(self._chunks.size[2 * s] > cap for s, cap in enumerate(self._caps)):
            return LATEST_TIME
        self.left -= sum(-(-self._choices.rows // int(size)) for size in self._chunks.size)
        return int(self._machine.run.run_chunks(self._chunks, self._merge, limit, self._memory, self._room, self._log))

    def descend_by_stage(self, value: int, start: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return the result of a descent that changes one stage at a time, together with its messages."""
        chosen, before = tuple(start), LATEST_TIME + 1
        while value < before and self.left > 0:
            before = value
            for moves in self._choices.stage_moves:
                for move in moves.values():
                    other = tuple(move.get(at, n) for at, n in enumerate(chosen))
                    if other != chosen and (took := self.evaluate_choice(other, value)) < value:
                        value, chosen = took, other
        return value, chosen

    def descend_by_process(self, value: int, start: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Return the result of a descent that changes one process at a time."""
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
