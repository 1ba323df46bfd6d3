"""Limits of the samples that stages may hold, as people give them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipes.ir import Kind, Plan, PlanError


def largest_rows(plan: Plan) -> tuple[int, ...]:
    """The samples of each stage's largest micro-batch."""
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
