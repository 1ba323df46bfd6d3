"""Limits that fill the memory there is."""

from __future__ import annotations

from lightning_pipes.cost import Costs
from lightning_pipes.ir import Kind, Plan, PlanError, check_one_stage_a_rank
from lightning_pipes.planning.memory import stage_peak
from lightning_pipes.sim.loops.memory import Limit, limits_of
from lightning_pipes.sim.units import bytes_text


def limits_for(plan: Plan, costs: Costs, memory_limit: Limit) -> tuple[int, ...]:
    """The most samples that each stage may hold between F and B in `memory_limit` bytes a rank: whole micro-batches, at
    most the batch.

    More of it never hurts where forward and backward alternate, so this is the limit to take. What a stage needs while
    it computes is left free.

    Raises:
        PlanError: a rank holds several stages, or has no room for one micro-batch; says what is missing.
    """
    check_one_stage_a_rank(plan, "limits")
    found = []
    for stage, may in enumerate(limits_of(memory_limit, plan.n_ranks)):
        rows = max(span.rows for span in plan.spans(Kind.F, stage))
        one = stage_peak(plan, costs, stage, held=1)
        if one > may:
            raise PlanError(
                f"stage {stage} has {bytes_text(may)} and needs {bytes_text(one)} for one micro-batch of {rows} "
                f"samples: {bytes_text(one - may)} are missing; use more micro-batches, or recompute"
            )
        each = one - stage_peak(plan, costs, stage, held=0)
        more = (may - one) // each if each else plan.jobs[0].rows
        found.append(min(plan.jobs[0].rows, (1 + more) * rows))
    return tuple(found)
