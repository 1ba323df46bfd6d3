"""Limits that fill the memory there is."""

from __future__ import annotations

from lightning_pipes.cost import Costs
from lightning_pipes.ir import F, Kind, Plan, PlanError, check_one_stage_a_rank
from lightning_pipes.sim.memory import Limit, limits_of
from lightning_pipes.sim.units import bytes_text


def limits_for(plan: Plan, costs: Costs, memory_limit: Limit) -> tuple[int, ...]:
    """The most samples that each stage may hold between F and B in `memory_limit` bytes a rank, at most the batch.

    More of it never hurts where forward and backward alternate, so this is the limit to take. A micro-batch counts with
    what it takes until its backward has ended; what a stage needs while it computes is left free.

    Raises:
        PlanError: a rank holds several stages, or has no room for one micro-batch; says what is missing.
    """
    check_one_stage_a_rank(plan, "limits")
    found = []
    for stage, may in enumerate(limits_of(memory_limit, plan.n_ranks)):
        rows = plan.jobs[0].rows
        span = max(plan.spans(Kind.F, stage), key=lambda s: s.rows)
        taken, freed = costs.held(F(stage, span), plan)
        again, _ = costs.held(F(stage, span)._replace(kind=Kind.B), plan)
        rest = may - costs.resident(plan.ranks[stage], plan) - max(freed, again)
        kept = taken - freed
        most = rows if kept <= 0 else min(rows, rest // kept * span.rows)
        if rest < kept:
            raise PlanError(
                f"stage {stage} has {bytes_text(may)} and needs {bytes_text(may + kept - rest)} for one micro-batch of "
                f"{span.rows} samples: {bytes_text(kept - rest)} are missing; use more micro-batches, or recompute"
            )
        found.append(most)
    return tuple(found)
