"""Replicated stages, on which several ranks share out the samples of each micro-batch.

    micro-batch     |     0:4     |     4:8     |
    stage 0, rank 0 | 0:2 |       | 4:6 |
             rank 1       | 2:4 |       | 6:8 |
    stage 1, rank 2 |     0:4     |     4:8     |

A schedule orders whole micro-batches with one rank per stage. Each rank of a replicated stage then runs this order for
its own samples. A message goes from one rank to one other rank and holds the samples that both of them compute.
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
"""For each stage, the seconds per sample on each of its ranks. Only the ratios between these values matter."""


def share_rows(rows: int, seconds: Sequence[float], given: Sequence[int] = (), least: int = 0) -> tuple[int, ...]:
    """Return the number of samples that each replica gets, chosen so that the last replica ends as early as possible.

    Shares are proportional to 1 / seconds, as closely as whole samples allow (DynPipe, S V-B1).

    Args:
        rows: the number of samples to share out.
        seconds: the seconds per sample on each replica.
        given: the number of samples that each replica has from earlier micro-batches of the same batch. The function
            balances the sums over the batch.
        least: the minimum number of samples per replica. It is ignored if `rows` is too small for it.

    Raises:
        InputError: if there are no replicas, or if a value in `seconds` is not positive and finite.
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
    """Return the number of samples of a batch that each rank computes, as one list per stage."""
    cut = plan.jobs[0]
    found = [[0] * len(ranks) for ranks in plan.ranks_of_stages]
    for stage, spans in enumerate(cut.forward):
        for n, span in enumerate(spans):
            found[stage][cut.replicas[stage][n] if cut.replicas else 0] += span.rows
    return found


def replicate_plan(plan: Plan, degrees: Sequence[int], seconds: Seconds = (), least: int = 0) -> Plan:
    """Return the plan with several ranks per stage, numbered consecutively from the first stage.

    Args:
        plan: a plan with one rank per stage in which all stages cut a batch in the same way.
        degrees: the number of ranks of each stage.
        seconds: the seconds per sample on each rank of each stage. By default, all ranks are equally fast.
        least: the minimum number of samples of each micro-batch per rank, if the micro-batch is large enough. Schedules
            that do not flush need at least one: the first forward of a batch determines the weight version that the
            batch reads, and all ranks of a stage must read the same version.

    Raises:
        PlanError: if the plan has another form, or if `degrees` does not have one entry per stage.
    """
    if plan.ranks != tuple(range(plan.n_stages)) or len(degrees) != plan.n_stages:
        raise PlanError(
            f"a plan of {plan.n_stages} stages on ranks {plan.ranks} can't get {tuple(degrees)} ranks for its stages: "
            "it needs one stage a rank, in order, and a number of ranks for each stage"
        )
    if not all(plan.uniform_jobs):
        raise PlanError(
            "stages cut a batch differently, but if stages have several ranks, all stages must cut it in the same way"
        )
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
    """Return the parts of each micro-batch with the replica that computes each part."""
    given = [0] * len(seconds)
    out = []
    for span in spans:
        shares = share_rows(span.rows, seconds, given, least)
        given = [a + b for a, b in zip(given, shares, strict=True)]
        ends = accumulate(shares, initial=span.start)
        out += [(Span(*ends_of), n) for n, ends_of in enumerate(pairwise(ends)) if ends_of[0] < ends_of[1]]
    return out


def _refine(a: Spans, b: Spans) -> Spans:
    """Return the largest spans that each lie within a single span of `a` and a single span of `b`."""
    return tuple(Span(*ends) for ends in pairwise(sorted({0, *(span.stop for span in (*a, *b))})))


def replicate_program(program: Program, plan: Plan) -> Program:
    """Return the program for a plan with replicated stages, given a program with one rank per stage.

    Args:
        program: a program without transfers, ordered for one rank per stage. `lower` adds the transfers later.
        plan: the plan that `replicate_plan` returned.
    """
    parts = {}
    for part in ("head", "cycle", "tail"):
        rows: Sequence[Row] = getattr(program, part)
        stages = zip(rows, plan.replicas, strict=False)  # an empty part has no rows
        parts[part] = tuple(tuple(_own_part(row, plan, rank)) for row, ranks in stages for rank in ranks)
    return Program(**parts)


def _own_part(row: Row, plan: Plan, rank: int) -> Iterator[Instruction]:
    """Yield the instructions of `row` for the samples that `rank` computes."""
    for i in row:
        replica = plan.replicas[i.stage].index(rank)
        if i.kind is Kind.STEP:
            yield i._replace(span=Span(replica, replica))
            continue
        for span in plan.overlapping_spans(i.kind, i.stage, i.job, i.span):
            part = i._replace(span=span)
            if plan.rank_of(part) == rank:
                yield part
