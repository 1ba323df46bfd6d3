"""Limits of the samples that stages may hold, as people give them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipes.cost import Costs
from lightning_pipes.cost.units import bytes_text
from lightning_pipes.ir import Kind, Plan, PlanError, check_one_stage_a_rank
from lightning_pipes.planning.memory import stage_peak
from lightning_pipes.sim.loops.memory import Limit, limits_of


def largest_rows(plan: Plan) -> tuple[int, ...]:
    """Return the samples of each stage's largest micro-batch."""
    return tuple(max(x.rows for cut in plan.jobs for x in cut.spans(Kind.F, s)) for s in range(plan.n_stages))


def check_limits(plan: Plan, name: str, limits: Sequence[int]) -> None:
    """Refuse limits under which `plan` can't run; says so of the schedule of that name.

    Raises:
        PlanError: they are not one for each stage, or too small for one micro-batch.
    """
    if len(limits) != plan.n_stages:
        raise PlanError(f"{name}: limits {tuple(limits)} are for {len(limits)} stages, the plan has {plan.n_stages}")
    for stage, (limit, rows) in enumerate(zip(limits, largest_rows(plan), strict=True)):
        if limit < rows:
            raise PlanError(
                f"{name}: stage {stage} may hold {limit} samples and has a micro-batch of {rows}; raise its limit or "
                "use more micro-batches"
            )


def limits_for(plan: Plan, costs: Costs, memory_limit: Limit) -> tuple[int, ...]:
    """Return the most samples that each stage may hold between F and B in `memory_limit` bytes a rank: whole
    micro-batches, at most the batch.

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
