"""Memory limits of a run: whether they are known, and warnings if they can't be checked."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_pipes.planning.planner import UNDECIDED, planner_of
from lightning_pipes.planning.stage_recompute import undecided_reason
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.profile_planner import has_memory_limit
from lightning_pipes.trainer.setup.module_setup import SetupContext


def settle_recomputation(context: SetupContext) -> SetupContext:
    """Return the context without recomputation if recompute="auto" has no memory limit to decide by.

    `schedule="auto"` chooses recomputation anyway. This function is collective.
    """
    request = context.request
    if request.recompute != UNDECIDED:
        return context
    without = replace(context, request=replace(request, recompute=False))
    stages = len(request.schedule.place_stages(context.ranks.grid.n_planned))
    if request.chooses or not context.is_fitting or stages == 1:
        return without
    if context.shares_ranks:
        rank_zero_warn(
            "recompute='auto' is not decided, and no stage recomputes: siblings of a job array share the memory of the "
            "devices, and their needs are not known in advance. Set recompute=True if memory is short, and otherwise "
            "recompute=False"
        )
    elif context.is_manual:
        rank_zero_info("recompute='auto': no stage recomputes, because the module optimizes manually")
    elif not has_memory_limit(request, context.ranks):
        rank_zero_info(
            "recompute='auto': no stage recomputes, because no memory limit is known. The limit is the memory of a "
            "CUDA device, or memory_limit of a schedule such as 'v'"
        )
    else:
        return context
    return without


def warn_about_memory_limit(decision: Decision) -> None:
    """Warn if a memory limit is to be kept, and nothing was planned from measured layers, whose bytes are known."""
    planned = decision.deployment is not None or len(decision.layers) == 1
    if decision.recompute == UNDECIDED:
        reason = undecided_reason(decision.problem()) if decision.deployment is not None else decision.why
        why = f": {reason}" if reason else ""
        rank_zero_warn(
            f"recompute='auto' is not decided, and no stage recomputes, because the memory of the stages is not known"
            f"{why}. The run may need more memory than the devices have. Set recompute=True if it does, and otherwise "
            "recompute=False"
        )
    if planner_of(decision.schedule).has_memory_limit and not planned:
        why = decision.why or "the training step was not recorded"
        rank_zero_warn(
            f"memory_limit of schedule {decision.schedule.name!r} is not checked, because the layers are not measured: "
            f"{why}. The run may need more memory than the limit"
        )
