"""Stages with several ranks: the samples of a micro-batch are shared out among the replicas of a stage.

    micro-batch     |     0:4     |     4:8     |
    stage 0, rank 0 | 0:2 |       | 4:6 |
             rank 1       | 2:4 |       | 6:8 |
    stage 1, rank 2 |     0:4     |     4:8     |

A schedule orders whole micro-batches on one rank for each stage. Then every rank of a stage gets that order for its own
samples. A message goes from one rank to one other: it holds the samples that both compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from lightning_pipes.ir.checks import InputError, PlanError, check_count, short_repr
from lightning_pipes.ir.instruction import Instruction, Kind, Span
from lightning_pipes.ir.plan import Cut, Plan, Spans
from lightning_pipes.ir.program import Program, Row

Seconds = Sequence[Sequence[float]]
"""By stage, the seconds of a sample on each of its ranks; only their proportions count."""


def share_rows(rows: int, seconds: Sequence[float], given: Sequence[int] = (), least: int = 0) -> tuple[int, ...]:
    """Return how many of `rows` samples each replica gets, so that the last one ends as early as possible.

    Shares are in proportion to 1 / seconds, as near as whole samples allow (DynPipe, S V-B1).

    Args:
        seconds: of a sample on each replica.
        given: samples of earlier micro-batches of the batch that each has; the shares add up to the whole batch's.
        least: samples that each replica gets, where there are as many.

    Raises:
        InputError: no replicas, or seconds that are not above 0.
    """
    check_count("rows", rows)
    if not seconds or not all(0 < each < math.inf for each in seconds):
        raise InputError(f"shares need the seconds of a sample on each replica, above 0, got {short_repr(seconds)}")
    before = list(given) or [0] * len(seconds)
    shares = [least if rows >= least * len(seconds) else 0] * len(seconds)
    for _ in range(rows - sum(shares)):
        first = min(range(len(seconds)), key=lambda n: ((before[n] + shares[n] + 1) * seconds[n], n))
        shares[first] += 1
    return tuple(shares)


def list_shares(plan: Plan) -> list[list[int]]:
    """Return, by stage, how many samples of a batch each of its ranks has."""
    cut = plan.jobs[0]
    found = [[0] * len(ranks) for ranks in plan.ranks_of_stages]
    for stage, spans in enumerate(cut.forward):
        for n, span in enumerate(spans):
            found[stage][cut.replicas[stage][n] if cut.replicas else 0] += span.rows
    return found


def replicate_plan(plan: Plan, degrees: Sequence[int], seconds: Seconds = (), least: int = 0) -> Plan:
    """Return the plan with `degrees` ranks for its stages, which are numbered from the first stage on.

    Args:
        plan: one with a rank for each stage, which cuts a batch in the same way on all of them.
        seconds: of a sample on each rank of each stage; by default they are equally fast.
        least: samples of each micro-batch that each rank gets, where there are as many. An order that does not flush
            needs one: the first forward of a batch says which weights it reads, and ranks of a stage read the same.

    Raises:
        PlanError: the plan is not of this kind, or degrees are not one number for each stage.
    """
    if plan.ranks != tuple(range(plan.n_stages)) or len(degrees) != plan.n_stages:
        raise PlanError(
            f"a plan of {plan.n_stages} stages on ranks {plan.ranks} can't get {tuple(degrees)} ranks for its stages: "
            "it needs one stage a rank, in order, and a number of ranks for each stage"
        )
    if not all(plan.uniform_jobs):
        raise PlanError("stages cut a batch differently; where stages have several ranks, all cut it in the same way")
    ends = [0, *accumulate(degrees)]
    replicas = tuple(tuple(range(a, b)) for a, b in pairwise(ends))
    seconds = seconds or [[1.0] * degree for degree in degrees]
    jobs = tuple(_replicate_cut(cut, seconds, least) for cut in plan.jobs)
    return replace(plan, ranks=tuple(ranks[0] for ranks in replicas), jobs=jobs, replicas=replicas)


def _replicate_cut(cut: Cut, seconds: Seconds, least: int) -> Cut:
    shared = [_share_spans(cut.forward[0], each, least) for each in seconds]
    forward = tuple(tuple(span for span, _ in shares) for shares in shared)
    owners = tuple(tuple(replica for _, replica in shares) for shares in shared)
    joint = [_refine(a, b) for a, b in pairwise(forward)]
    links = (*joint, forward[-1]), (forward[0], *joint)
    return Cut(cut.rows, forward, forward, *links, replicas=owners)


def _share_spans(spans: Spans, seconds: Sequence[float], least: int) -> list[tuple[Span, int]]:
    """Return the parts of micro-batches with the replica that computes each."""
    given = [0] * len(seconds)
    out = []
    for span in spans:
        shares = share_rows(span.rows, seconds, given, least)
        given = [a + b for a, b in zip(given, shares, strict=True)]
        ends = accumulate(shares, initial=span.start)
        out += [(Span(*ends_of), n) for n, ends_of in enumerate(pairwise(ends)) if ends_of[0] < ends_of[1]]
    return out


def _refine(a: Spans, b: Spans) -> Spans:
    """Return the largest spans that each lie within one span of `a` and one of `b`."""
    return tuple(Span(*ends) for ends in pairwise(sorted({0, *(span.stop for span in (*a, *b))})))


def replicate_program(program: Program, plan: Plan) -> Program:
    """Return the program, ordered for one rank a stage, for the ranks that `replicate_plan` has given the plan.

    Args:
        program: without transfers, which `lower` adds.
    """
    parts = {}
    for part in ("head", "cycle", "tail"):
        rows: Sequence[Row] = getattr(program, part)
        stages = zip(rows, plan.replicas, strict=False)  # without rows where the part is empty
        parts[part] = tuple(tuple(_own_part(row, plan, rank)) for row, ranks in stages for rank in ranks)
    return Program(**parts)


def _own_part(row: Row, plan: Plan, rank: int) -> Iterator[Instruction]:
    """Yield the part of a stage's instructions that falls to `rank`."""
    for i in row:
        replica = plan.replicas[i.stage].index(rank)
        if i.kind is Kind.STEP:
            yield i._replace(span=Span(replica, replica))
            continue
        for span in plan.overlapping_spans(i.kind, i.stage, i.job, i.span):
            part = i._replace(span=span)
            if plan.rank_of(part) == rank:
                yield part
