"""The passes through the layers of a stage in a computation, and the samples that it concatenates.

The forwards and backwards of a stage may cut a batch differently. Autograd frees a graph when the graph has been
differentiated. Samples that belong to different forwards, or to different backwards, therefore need separate graphs:

    F   |        0:4        |        one forward, or one for each graph
        | 0:1 | 1:2 |  2:4  |        three graphs
    B   | 0:1 | 1:2 |  2:4  |

If a stage computes on other samples than a message holds, its samples are either cut, which copies nothing, or
concatenated, which copies them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from lightning_pipes.ir.instruction import COMPUTE_KINDS, RECOMPUTE_KINDS, Instruction, Kind, Span
from lightning_pipes.ir.plan import Plan, Spans

CostKey = int | tuple[tuple["Pass", ...], "Concat"]


class Pass(NamedTuple):
    """One pass through the layers of a stage, forward or backward.

    Attributes:
        rows: the number of samples.
        recompute: whether the stage keeps only its input for these samples, so that their forward runs again before
            the backward.
    """

    rows: int
    recompute: bool


def graph_spans(i: Instruction, plan: Plan) -> Spans:
    """Return the samples of the forward or backward `i`, with one span for each autograd graph."""
    cut = plan.jobs[i.job]
    if cut.forward[i.stage] is cut.backward[i.stage]:  # the usual case
        return (i.span,)
    others = plan.overlapping_spans(Kind.B if i.kind is Kind.F else Kind.F, i.stage, i.job, i.span)
    return tuple(Span(max(i.span.start, o.start), min(i.span.stop, o.stop)) for o in others)


def layer_passes(i: Instruction, plan: Plan) -> tuple[Pass, ...]:
    """Return the passes of the computation `i` in order.

    `Plan.recomputes` and `Plan.whole_forward` determine the passes of a stage.
    """
    if i.kind is Kind.STEP:
        return (Pass(0, False),)
    again = plan.recomputes(i.stage, i.job, i.span)
    parts = graph_spans(i, plan)
    if len(parts) == 1 and i.kind is Kind.F:
        return (Pass(i.span.rows, again),)
    if not plan.whole_forward or not plan.whole_forward[i.stage]:
        return tuple([Pass(part.rows, again) for part in parts])
    if i.kind is Kind.F:
        return (Pass(i.span.rows, True),)
    return tuple(
        [Pass(part.rows, again or plan.overlapping_spans(Kind.F, i.stage, i.job, part)[0] != part) for part in parts]
    )


def recomputation_of(i: Instruction, plan: Plan) -> Instruction | None:
    """Return the R that creates activations for the backward `i`, or None if `i` needs no R before it."""
    if not plan.early_recompute or i.kind not in RECOMPUTE_KINDS:
        return None
    return i._replace(kind=Kind.R) if any(again for _, again in layer_passes(i, plan)) else None


class Concat(NamedTuple):
    """The numbers of samples that a computation copies in order to concatenate them.

    Attributes:
        inputs: the number of samples that arrive in smaller parts than the computation needs.
        outputs: the number of samples that are computed in smaller parts than the message holds.
    """

    inputs: int
    outputs: int


_NO_CONCAT = Concat(0, 0)


def count_concatenated(i: Instruction, plan: Plan) -> Concat:
    """Return the samples that the computation `i` concatenates in its inputs and in the messages that it completes."""
    forward = i.kind is Kind.F
    if plan.uniform_jobs[i.job] or not (forward or i.kind is Kind.B or i.kind is Kind.I):
        return _NO_CONCAT
    source, target = (i.stage - 1, i.stage + 1) if forward else (i.stage + 1, i.stage - 1)
    mine = run_spans(i, plan)
    arriving = leaving = 0
    if 0 <= source < plan.n_stages:
        arriving = sum(part.rows for part in mine if len(_parts_from(source, i, part, plan)) > 1)
    if 0 <= target < plan.n_stages and plan.is_remote_edge(min(i.stage, target)):
        for message in plan.overlapping_spans(Kind.SF if forward else Kind.SB, i.stage, i.job, i.span):
            whole = any(part.start <= message.start and message.stop <= part.stop for part in mine)
            if message.stop <= i.span.stop and not whole:
                leaving += message.rows
    return Concat(arriving, leaving)


def run_spans(i: Instruction, plan: Plan) -> Spans:
    """Return the samples of every pass of a computation, in order."""
    return (i.span,) if i.kind is Kind.F and len(layer_passes(i, plan)) == 1 else graph_spans(i, plan)


def _parts_from(source: int, i: Instruction, part: Span, plan: Plan) -> Sequence[Span]:
    """Return the parts in which the samples of `part` arrive from the stage `source`.

    If the stages are on different ranks, the parts are messages. Otherwise, they are the passes on the stage `source`.
    """
    if plan.is_remote_edge(min(source, i.stage)):
        return plan.overlapping_spans(Kind.SF if i.kind is Kind.F else Kind.SB, source, i.job, part)
    spans = plan.overlapping_spans(i.kind, source, i.job, part)
    every = [run for span in spans for run in run_spans(i._replace(stage=source, span=span), plan)]
    return [run for run in every if run.overlaps(part)]


def cost_key(i: Instruction, plan: Plan) -> CostKey:
    """Return a key that is equal for computations of the same kind, stage, job and batch that have the same cost."""
    if plan.uniform_jobs[i.job] and not plan.kept_spans(i.stage, i.job):
        return i.span.rows
    return layer_passes(i, plan), count_concatenated(i, plan)


def cost_classes(kind: Kind, stage: int, plan: Plan) -> list[tuple[Instruction, int]]:
    """Return one instruction of job 0 for each class of instructions with equal cost, and the size of the class."""
    spans = plan.spans(kind, stage)
    if kind not in COMPUTE_KINDS or (plan.uniform_jobs[0] and not plan.kept_spans(stage)):
        return [(Instruction(kind, stage, span=span), count) for span, count in _count_sizes(spans)]
    every = [Instruction(kind, stage, span=span) for span in spans]
    if kind is Kind.R:
        every = [i for i in every if any(again for _, again in layer_passes(i, plan))]
    counts = Counter(cost_key(i, plan) for i in every)
    return [(i, counts[same]) for same, i in {cost_key(i, plan): i for i in every}.items()]


@lru_cache(maxsize=64)
def _count_sizes(spans: Spans) -> tuple[tuple[Span, int], ...]:
    """Return one span of each size and the number of spans of that size."""
    counts = Counter(span.rows for span in spans)
    return tuple((span, counts[rows]) for rows, span in {span.rows: span for span in spans}.items())
