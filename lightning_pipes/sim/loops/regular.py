"""Programs of regular plans as numbers, without asking for each micro-batch what it needs.

Where every stage, direction and link cuts a batch alike, micro-batches do not mix before the STEP: what the first one
needs and sends, every other needs and sends likewise. So `ir.needs` and `ir.lowering.sends_after` are asked once a kind
and stage, which compiles large plans more than ten times faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_pipes.ir import COMPUTE, RECEIVES, SENDS, Instruction, Kind, Plan, Program, needs, send_of
from lightning_pipes.ir.lowering import sends_after


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


class _Unit(NamedTuple):
    """All micro-batches of one kind, stage, job and batch."""

    places: list[int]  # of each micro-batch in `Numbered`, -1 until it is there
    own: tuple[list[int], ...]  # places of what it needs on its rank, micro-batch by micro-batch
    whole: tuple[list[int], ...]  # places of what it needs entirely: of a STEP the gradients of all micro-batches
    messages: tuple[list[int], ...]  # places of the messages that it needs
    sends: tuple[_Send, ...]
    groups: dict[int, int]  # by rows


class _Send(NamedTuple):
    places: list[int]
    kind: Kind
    stage: int
    link: int
    groups: dict[int, int]


def numbered(program: Program, plan: Plan) -> Numbered | None:
    """The finite `program`, which has no transfers yet; None where the plan is not regular, or where the program can't
    run: whoever looks at each instruction says why."""
    if plan.after or not all(plan.uniform) or program.n_ranks != plan.n_ranks:
        return None
    return _Numbering(plan).run(program)


class _Numbering:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found = Numbered()
        self._units: dict[tuple[Kind, int, int, int], _Unit] = {}
        self._places: dict[tuple[Kind, int, int, int], list[int]] = {}
        self._links: dict[tuple[int, int], int] = {}
        self._at = [{span: n for n, span in enumerate(cut.forward[0])} for cut in plan.jobs]

    def run(self, program: Program) -> Numbered | None:
        found, units, where = self._found, self._units, self._plan.ranks
        instructions, ranks, links, groups = found.instructions, found.ranks, found.links, found.groups
        before = found.before

        def add(i: Instruction, rank: int, link: int, known: dict[int, int], places: list[int], n: int) -> None:
            start, stop = i[4]
            group = known.get(stop - start)
            if group is None:
                group = known[stop - start] = len(found.like)
                found.like.append(i)
            places[n] = len(instructions)
            instructions.append(i)
            ranks.append(rank)
            links.append(link)
            groups.append(group)
            found.first.append(len(before))

        awake = list(range(program.n_ranks - 1, -1, -1))
        sleepers: dict[tuple[int, int], list[int]] = {}  # ranks that wait, by id of places and micro-batch
        next_ = [0] * program.n_ranks
        while awake:
            rank = awake.pop()
            row = program.head[rank]
            for at in range(next_[rank], len(row)):
                i = row[at]
                kind, stage, job, batch, span = i
                unit = units.get((kind, stage, job, batch))
                if unit is None:
                    if kind not in COMPUTE or stage >= self._plan.n_stages or job >= len(self._at):
                        return None
                    unit = self._unit(i)
                there, own, whole, messages, sends, known = unit
                n = 0 if kind is Kind.STEP else self._at[job].get(span, -1)
                if n < 0 or there[n] >= 0 or where[stage] != rank:
                    return None  # no such micro-batch, twice, or elsewhere
                for places in own:
                    if places[n] < 0:
                        return None  # its own rank runs later what it needs
                for places in whole:
                    if min(places) < 0:
                        return None
                for places in messages:
                    if places[n] < 0:
                        sleepers.setdefault((id(places), n), []).append(rank)
                        break
                else:
                    for places in messages:
                        before.append(places[n])
                    add(i, rank, -1, known, there, n)
                    for places, sent, source, link, alike in sends:
                        add(Instruction(sent, source, job, batch, span), rank, link, alike, places, n)
                        if (id(places), n) in sleepers:
                            awake += sleepers.pop((id(places), n))
                    continue
                next_[rank] = at
                break
            else:
                next_[rank] = len(row)
        return found if all(at == len(row) for at, row in zip(next_, program.head, strict=True)) else None

    def _unit(self, i: Instruction) -> _Unit:
        """The needs and messages of all micro-batches like `i`."""
        plan = self._plan
        own: list[list[int]] = []
        whole: list[list[int]] = []
        messages: list[list[int]] = []
        for n in {n[:4]: n for n in needs(i, plan)}.values():  # a STEP needs all micro-batches of a kind
            places = self._placed(send_of(n) if n.kind in RECEIVES else n)
            if n.kind in RECEIVES or n.kind in SENDS or plan.ranks[n.stage] != plan.ranks[i.stage]:
                messages.append(places)
            elif n.span == i.span:
                own.append(places)
            else:
                whole.append(places)
        sends = tuple(
            _Send(self._placed(s), s.kind, s.stage, self._link(s), {}) for s in sends_after(i, plan) if s.span == i.span
        )
        unit = _Unit(self._placed(i), tuple(own), tuple(whole), tuple(messages), sends, {})
        self._units[i[:4]] = unit
        return unit

    def _placed(self, i: Instruction) -> list[int]:
        """Where the micro-batches like `i` are."""
        key = i[:4]
        if key not in self._places:
            self._places[key] = [-1] * (1 if i.kind is Kind.STEP else len(self._at[i.job]))
        return self._places[key]

    def _link(self, i: Instruction) -> int:
        pair = (self._plan.ranks[i.stage], self._plan.ranks[i.stage + 1 if i.kind is Kind.SF else i.stage - 1])
        link = self._links.setdefault(pair, len(self._links))
        if link == len(self._found.pairs):
            self._found.pairs.append(pair)
        return link
