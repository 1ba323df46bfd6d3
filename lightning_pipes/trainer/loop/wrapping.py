"""Wrappers around the user's hooks and callbacks while a run lasts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl

from lightning_pipes.ir import Schedule
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.module.optimizers import OptimizersView
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.step.between_steps import check_clearing
from lightning_pipes.trainer.step.clipping import HookClipping
from lightning_pipes.trainer.step.gradient_logs import GradientLogs
from lightning_pipes.trainer.step.hook_view import HookView, StepView
from lightning_pipes.trainer.step.hooks import HookWrappers


def wrap_hooks(
    trainer: pl.Trainer,
    run: PipelineRun,
    pipeline: Control,
    agree: Callable[[], None],
    start_epoch: Callable[[], None],
) -> list[Callable[[], None]]:
    """Functions that undo it all, in this order.

    Args:
        agree: has ranks agree on stopping, after the hooks at which they do.
        start_epoch: called when an epoch has begun.
    """
    module, callbacks = run.cut.module, private.callbacks(trainer)
    clipping = HookClipping(
        lambda: run.part.parameters, run.cut.scope, run.part.holdings, None if run.streams else pipeline
    )
    view = HookView(module, callbacks, run.cut.scope)  # next to the hooks: all else goes around it
    synchronise = partial(run.state.synchronise, pipeline, run.last_rank, run.last)
    followed = partial(run.state.follow_hook, synchronise=synchronise)
    hooks = HookWrappers(module, followed, run.last, agree, start_epoch)
    steps = StepView(run.part.optimizers, run.cut.scope)
    undo = [view.remove, clipping.remove]
    if not run.streams or isinstance(run.plans.schedule, Schedule):  # else batches step some of the layers each
        undo.insert(0, OptimizersView(run.part.layouts, run.cut.scope).remove)
    if run.streams:  # where stages step apart, each logs for itself
        clears = check_clearing(module, run.plans.schedule.name)
        return [clears, hooks.remove, steps.remove, *undo]
    logs = GradientLogs(module, callbacks, pipeline, run.replay, run.last_rank)
    return [logs.remove, hooks.remove, steps.remove, *undo]
