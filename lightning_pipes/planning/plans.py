"""The plan that a schedule wants."""

from __future__ import annotations

from dataclasses import replace

from lightning_pipes.ir import Plan, Policy, Schedule, placement


def even_plan(schedule: Schedule | Policy, ranks: int, microbatches: int, rows: int, recompute: bool = False) -> Plan:
    """A batch of `rows` samples in equal micro-batches on the stages that the schedule puts on `ranks` ranks, with the
    backward and the weight versions that it asks for. With `recompute` all stages but the last keep only their input.

    Raises:
        PlanError: no samples or no micro-batches.
    """
    where = placement(schedule, ranks)
    again = tuple(s < len(where) - 1 for s in range(len(where))) if recompute else ()
    plan = Plan.even(len(where), microbatches, rows, ranks=where, recompute=again)
    plan = replace(plan, split_backward=getattr(schedule, "splits_backward", False))
    versions = getattr(schedule, "versions", None)
    return plan if versions is None else replace(plan, versions=tuple(versions(plan)))
