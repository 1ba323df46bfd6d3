"""Compile programs of regular plans to numbers, without looking up the needs of each micro-batch.

Where every stage, direction and link cuts a batch alike, micro-batches do not mix before the STEP: what the first one
needs and sends, every other needs and sends likewise. So `ir.needs` and `ir.lowering.sends_after` are asked once a kind
and stage, which compiles large plans more than ten times faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_pipes.ir import RECEIVES, Instruction, Kind, Plan, Program, needs, send_of
from lightning_pipes.ir.lowering import sends_after
from lightning_pipes.ir.regular import IrregularError, Unit, is_regular, walk_program


@dataclass(frozen=True)
class Numbered:
    """Computations and sends, each after all that it waits for.

    Attributes:
        instructions: what they are.
        ranks: who runs each of them.
        links: the link of each send; -1 for a computation.
        groups: the index into `like` of each.
        first, before: `before[first[i] : first[i + 1]]` are the messages that operation i waits for; all else is in
            its rank's own order.
        like: one instruction of every group that costs the same.
        pairs: (from rank, to rank) of every link.
    """

    instructions: list[Instruction] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=lambda: [0])
    before: list[int] = field(default_factory=list)
    like: list[Instruction] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)


class _Costs(NamedTuple):
    """All micro-batches of one computation, as they are numbered."""

    messages: tuple[list[int], ...]  # places of the messages that it needs, micro-batch by micro-batch
    sends: tuple[_Send, ...]
    groups: dict[int, int]  # by rows


class _Send(NamedTuple):
    places: list[int]
    kind: Kind
    stage: int
    link: int
    groups: dict[int, int]


def number_regular(program: Program, plan: Plan) -> Numbered | None:
    """The finite `program`, which has no transfers yet; None where the plan is not regular, or where the program can't
    run: whoever looks at each instruction says why."""
    return _Numbering(plan).run(program) if is_regular(program, plan) else None


class _Numbering:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found = Numbered()
        self._places: dict[tuple[Kind, int, int, int], list[int]] = {}  # of messages
        self._links: dict[tuple[int, int], int] = {}

    def run(self, program: Program) -> Numbered | None:
        found = self._found
        instructions, ranks, links, groups = found.instructions, found.ranks, found.links, found.groups
        first, before, like = found.first, found.before, found.like
        try:
            for rank, i, unit, n in walk_program(program, self._plan):
                costs = unit.note
                if costs is None:
                    costs = unit.note = self._costs(i, unit)
                assert isinstance(costs, _Costs)
                for places in costs.messages:
                    before.append(places[n])
                start, stop = i[4]
                group = costs.groups.get(stop - start)
                if group is None:
                    group = costs.groups[stop - start] = len(like)
                    like.append(i)
                instructions.append(i)
                ranks.append(rank)
                links.append(-1)
                groups.append(group)
                first.append(len(before))
                for places, kind, stage, link, known in costs.sends:
                    send = Instruction(kind, stage, i[2], i[3], i[4])
                    group = known.get(stop - start)
                    if group is None:
                        group = known[stop - start] = len(like)
                        like.append(send)
                    places[n] = len(instructions)
                    instructions.append(send)
                    ranks.append(rank)
                    links.append(link)
                    groups.append(group)
                    first.append(len(before))
        except IrregularError:
            return None
        return found

    def _costs(self, i: Instruction, unit: Unit) -> _Costs:
        """The messages that all micro-batches like `i` need and send."""
        received = {n[:4]: n for n in needs(i, self._plan) if n.kind in RECEIVES}.values()
        messages = tuple(self._placed(send_of(n), len(unit.ran)) for n in received)
        sends = tuple(
            _Send(self._placed(s, len(unit.ran)), s.kind, s.stage, self._link(s), {})
            for s in sends_after(i, self._plan)
            if s.span == i.span
        )
        return _Costs(messages, sends, {})

    def _placed(self, send: Instruction, count: int) -> list[int]:
        """Where the messages like `send` are."""
        return self._places.setdefault(send[:4], [-1] * count)

    def _link(self, i: Instruction) -> int:
        pair = (self._plan.rank_of(i), self._plan.target_rank(i))
        link = self._links.setdefault(pair, len(self._links))
        if link == len(self._found.pairs):
            self._found.pairs.append(pair)
        return link
