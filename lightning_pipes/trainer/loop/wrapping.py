"""Wrappers around the user's hooks and callbacks while a run lasts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl

from lightning_pipes.ir import Schedule
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.module.optimizers import OptimizersView
from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.step.between_steps import check_clearing
from lightning_pipes.trainer.step.clipping import HookClipping
from lightning_pipes.trainer.step.gradient_logs import GradientLogs
from lightning_pipes.trainer.step.hook_view import track_hooks, track_optimizer_steps
from lightning_pipes.trainer.step.hooks import wrap_module_hooks


def wrap_hooks(
    trainer: pl.Trainer,
    run: PipelineRun,
    pipeline: Control,
    holders: Control,
    agree: Callable[[], None],
    start_epoch: Callable[[], None],
    patches: Patches,
) -> None:
    """Wrap the hooks of the user's module and callbacks from the inside out, until `patches` are closed.

    Args:
        holders: of all ranks that have parts of gradients, which are those of the pipeline, and of its shards.
        agree: has ranks agree on stopping, after the hooks at which they do.
        start_epoch: called when an epoch has begun.
    """
    module, callbacks, scope = run.cut.module, private.callbacks(trainer), run.cut.scope
    HookClipping(
        lambda: run.part.parameters, scope, run.part.holdings, None if run.is_asynchronous else holders, patches
    )
    track_hooks(module, callbacks, scope, patches)
    OptimizersView(run.part.layouts, scope, patches, run.training.why_no_state)
    step_whole = not run.is_asynchronous or isinstance(run.plans.schedule, Schedule)
    track_optimizer_steps(run.part.optimizers, scope, patches, step_whole)
    synchronise = partial(run.state.synchronise_ranks, pipeline, run.last_rank, run.last)
    followed = partial(run.state.follow_hook, synchronise=synchronise)
    wrap_module_hooks(module, patches, followed, run.last, run.is_asynchronous, agree, start_epoch)
    if run.is_asynchronous:  # where stages step apart, each logs for itself
        check_clearing(module, run.plans.schedule.name, patches)
    else:
        GradientLogs(module, callbacks, pipeline, run.replay, run.last_rank, patches)
