"""How finely every stage, direction and link cuts a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_pipes.ir import Cut, Plan, PlanError, Span
from lightning_pipes.planning.planner import EvenPlanner, Planner, Problem


class Counts(NamedTuple):
    """Micro-batches of each stage and direction, and messages of each link; links that are empty take the sender's."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    forward_links: tuple[int, ...] = ()
    backward_links: tuple[int, ...] = ()

    def cut(self, rows: int, stages: int) -> Cut:
        """A batch of `rows` samples cut so; a count that it has not so many samples for means one of each.

        Raises:
            PlanError: not one number for each stage and link.
        """
        entries = {"forward": stages, "backward": stages, "forward_links": stages - 1, "backward_links": stages - 1}
        for what, needed in entries.items():
            got = getattr(self, what)
            if len(got) != needed and (got or not what.endswith("links")):
                of = "links" if what.endswith("links") else "stages"
                raise PlanError(f"{what} {got} has {len(got)} numbers, and the pipeline {needed} {of}; give one for each")
        forward = tuple(spans_of(rows, p) for p in self.forward)
        backward = tuple(spans_of(rows, q) for q in self.backward)
        # The last stage sends nothing on, the first one nothing back.
        there = (*(spans_of(rows, p) for p in self.forward_links), forward[-1]) if self.forward_links else ()
        back = (backward[0], *(spans_of(rows, q) for q in self.backward_links)) if self.backward_links else ()
        return Cut(rows, forward, backward, there, back)


def spans_of(rows: int, count: int) -> tuple[Span, ...]:
    """`count` micro-batches of ceil(rows / count) samples, the last of which may be shorter; fewer where they would be
    empty."""
    size = -(-rows // min(count, rows))
    return sized(rows, size)


def sized(rows: int, size: int) -> tuple[Span, ...]:
    """Micro-batches of `size` samples, the last of which may be shorter."""
    return tuple(Span(start, min(start + size, rows)) for start in range(0, rows, size))


@dataclass(frozen=True)
class UnequalPlanner(Planner):
    """Cuts as the user says; else as is fastest by the profile; evenly where there is none.

    Attributes:
        given: what the user says.
        overlapped: whether backwards may run before all forwards have.
        every_count: whether to choose from all numbers of micro-batches, not from powers of two only.
    """

    given: Counts | None = None
    overlapped: bool = False
    every_count: bool = False

    def plan(self, problem: Problem) -> Plan:
        even = EvenPlanner().plan(problem)
        if self.given is not None:
            if problem.microbatches is not None:
                raise PlanError(
                    f"{problem.schedule.name}: microbatches is {problem.microbatches}, and forward {self.given.forward} "
                    "says how many each stage has; leave one of them out"
                )
            return Plan(even.ranks, (self.given.cut(problem.rows, even.n_stages),), layers=even.layers, recompute=even.recompute)
        return even
