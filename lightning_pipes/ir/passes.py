"""The runs of one computation where forward and backward of its stage cut a batch differently.

Autograd frees a graph when it has been differentiated. So samples that belong to different forwards, or to different
backwards, need graphs of their own:

    F   |        0:4        |        one forward, or one for each graph
        | 0:1 | 1:2 |  2:4  |        three graphs
    B   | 0:1 | 1:2 |  2:4  |
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from lightning_pipes.ir.instruction import COMPUTE, Instruction, Kind
from lightning_pipes.ir.plan import Plan, Spans
from lightning_pipes.ir.span import Span

Alike = int | tuple["Pass", ...]


class Pass(NamedTuple):
    """One run through a stage's layers, or back.

    Attributes:
        rows: its samples.
        again: whether these samples keep only what the stage received, so that backward runs their forward again.
    """

    rows: int
    again: bool


def graphs(i: Instruction, plan: Plan) -> Spans:
    """The samples of the forward or backward `i`, cut into those that share a forward and a backward."""
    cut = plan.jobs[i.job]
    if cut.forward[i.stage] is cut.backward[i.stage]:  # as nearly always
        return (i.span,)
    others = plan.overlapping(Kind.B if i.kind is Kind.F else Kind.F, i.stage, i.job, i.span)
    return tuple(Span(max(i.span.start, o.start), min(i.span.stop, o.stop)) for o in others)


def passes(i: Instruction, plan: Plan) -> tuple[Pass, ...]:
    """The runs of the computation `i`, one after the other; see `Plan.recompute` and `Plan.whole_forward`."""
    if i.kind is Kind.STEP:
        return (Pass(0, False),)
    again = bool(plan.recompute) and plan.recompute[i.stage]
    parts = graphs(i, plan)
    if len(parts) == 1 and i.kind is Kind.F:
        return (Pass(i.span.rows, again),)
    if not plan.whole_forward or not plan.whole_forward[i.stage]:
        return tuple([Pass(part.rows, again) for part in parts])
    if i.kind is Kind.F:
        return (Pass(i.span.rows, True),)
    return tuple(
        [Pass(part.rows, again or plan.overlapping(Kind.F, i.stage, i.job, part)[0] != part) for part in parts]
    )


def alike(i: Instruction, plan: Plan) -> Alike:
    """A value that computations of one kind, stage, job and batch have in common if they cost the same."""
    cut = plan.jobs[i.job]
    return i.span.rows if cut.forward[i.stage] is cut.backward[i.stage] else passes(i, plan)


def sorts(kind: Kind, stage: int, plan: Plan) -> list[tuple[Instruction, int]]:
    """One instruction of job 0 of every sort that costs the same, and how many of it there are."""
    cut, spans = plan.jobs[0], plan.spans(kind, stage)
    if kind not in COMPUTE or cut.forward[stage] is cut.backward[stage]:
        return [(Instruction(kind, stage, span=span), count) for span, count in _sizes(spans)]
    every = [Instruction(kind, stage, span=span) for span in spans]
    counts = Counter(passes(i, plan) for i in every)
    return [(i, counts[same]) for same, i in {passes(i, plan): i for i in every}.items()]


@lru_cache(maxsize=64)
def _sizes(spans: Spans) -> tuple[tuple[Span, int], ...]:
    """A span of every size, and how many have it."""
    counts = Counter(span.rows for span in spans)
    return tuple((span, counts[rows]) for rows, span in {span.rows: span for span in spans}.items())
