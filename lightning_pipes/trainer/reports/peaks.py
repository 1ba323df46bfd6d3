"""The peak of each rank in a run's log: predicted, measured, and beside what other ways of training would need."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Program
from lightning_pipes.planning.memory import peak_bytes
from lightning_pipes.sim.shown.memory_use import describe_peaks, estimate_alternatives
from lightning_pipes.trainer.reports.report import About, Window
from lightning_pipes.trainer.reports.stage_bytes import with_bytes


def describe_memory(windows: Sequence[Sequence[Window]], about: About) -> str:
    """Return sentences on the peak of each rank in the largest of the last batches; empty where nothing is known.

    Nothing is simulated: where batches overlap, or a policy orders them, what was measured is told alone.

    Args:
        windows: of every rank, as a report takes them.
    """
    if about.siblings > 1:  # they share the ranks' memory
        return ""
    last = windows[0][-1].plan
    window = max((w for w in windows[0] if w.plan.layers == last.layers), key=lambda w: w.plan.jobs[0].rows)
    plan, order = window.plan, window.order
    costs = with_bytes(CostModel.uniform(plan.n_stages, 1.0, 1.0), about.stages)
    simple = isinstance(order, Program) and not order.is_endless and bool(costs.weight_bytes)
    predicted = peak_bytes(order, plan, costs) if simple else ()  # type: ignore[arg-type]
    return describe_peaks(predicted, about.peaks, estimate_alternatives(plan, costs))
