"""The plan that a schedule wants."""

from __future__ import annotations

from lightning_pipes.ir import Plan, Policy, Schedule, placement, prepared


def even_plan(schedule: Schedule | Policy, ranks: int, microbatches: int, rows: int, recompute: bool = False) -> Plan:
    """A batch of `rows` samples in equal micro-batches on the stages that the schedule puts on `ranks` ranks, with the
    backward and the weight versions that it asks for. With `recompute` all stages but the last keep only their input.

    Raises:
        PlanError: no samples or no micro-batches.
    """
    where = placement(schedule, ranks)
    again = tuple(s < len(where) - 1 for s in range(len(where))) if recompute else ()
    return prepared(Plan.even(len(where), microbatches, rows, ranks=where, recompute=again), schedule)
