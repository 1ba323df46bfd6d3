"""Orders of backwards in two parts that a run may change to, where it is known what the parts take."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pipes.cost import CostModel, Costs
from lightning_pipes.ir import Kind, Plan, PlanError, adapt_plan
from lightning_pipes.planning.candidates import Candidate, make_candidate
from lightning_pipes.sim.loops.memory import Limit
from lightning_pipes.strategies.deep import tapered
from lightning_pipes.strategies.per_link import extra_for, forwards_ahead
from lightning_pipes.strategies.ready import Ready, largest_rows, limits_for
from lightning_pipes.strategies.zero_bubble import ZeroBubble

TIMES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
"""Multiples of the extra that hides steady links: less of it leaves more room for W to stay behind."""
SLACKS = (1, 4)
"""Micro-batches more for each link."""


def split_candidates(plan: Plan, costs: Costs, memory_limit: Limit) -> Iterator[Candidate | None]:
    """`zero_bubble` with several extras, by what these costs ask for, and `ready` that splits; None for what does not
    fit. Each holds as much as its first stage has ahead, or fills the memory."""
    p = plan.n_stages
    if p == 1 or not prices_split(costs, p):
        return
    plan = adapt_plan(plan, ZeroBubble())
    rows, m = largest_rows(plan), len(plan.spans(Kind.F, 0))
    try:
        fits = limits_for(plan, costs, memory_limit)
    except PlanError:
        return
    may = [limit // size for limit, size in zip(fits, rows, strict=True)]
    limited = min(may) < m
    for times in TIMES:
        extra = extra_for(plan, costs, times)
        ahead = forwards_ahead(plan, "extra", extra)[0]
        yield make_candidate(ZeroBubble(extra), plan, costs, memory_limit, (ahead,) * p)
        if limited:
            yield make_candidate(ZeroBubble(extra, fits), plan, costs, memory_limit, may)
    for slack in SLACKS:
        held = [min(tapered(p, slack * (p - 1))[0], most) for most in may]
        limits = tuple(most * size for most, size in zip(held, rows, strict=True))
        yield make_candidate(Ready(limits=limits, split=True), plan, costs, memory_limit, held)


def prices_split(costs: Costs, stages: int) -> bool:
    """Whether it is known what I and W take on all stages."""
    parts = [(kind, s) for kind in (Kind.I, Kind.W) for s in range(stages)]
    return isinstance(costs, CostModel) and all(part in costs.seconds for part in parts)
