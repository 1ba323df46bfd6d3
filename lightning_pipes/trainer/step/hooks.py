"""Wrappers around hooks of the user's module, by the table of hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.step.hook_table import HOOKS

Hook = Callable[..., Any]


def wrap_module_hooks(
    module: pl.LightningModule,
    patches: Patches,
    synchronise: Callable[[Hook], Hook],
    is_last: bool,
    overlaps: bool,
    agree: Callable[[], None],
    start_epoch: Callable[[], None],
) -> None:
    """Wrap hooks of the module by their rows of the table, until `patches` are closed.

    Args:
        synchronise: returns a hook after which all ranks have the state of the module that the last stage has.
        is_last: whether the last stage is on this rank.
        overlaps: whether batches overlap.
        agree: called after the last hooks of a batch or an epoch; Lightning calls the module's after all callbacks'.
        start_epoch: called after the hook that starts an epoch.
    """
    for row in HOOKS:
        if not hasattr(module, row.name):
            continue
        hook, overridden = getattr(module, row.name), is_overridden(row.name, module)
        wrapped = hook
        if overridden and row.reads_steps:
            wrapped = synchronise(_explain_missing(wrapped, is_last, overlaps))
        if overridden and row.runs_on_rank_zero:
            wrapped = _run_on_rank_zero(wrapped, module)
        if row.agrees_on_stops:
            wrapped = _call_after(_explain_missing(wrapped, is_last, overlaps), agree)
        if row.starts_epoch:
            wrapped = _call_after(wrapped, start_epoch)
        if wrapped is not hook:
            patches.replace_method(module, row.name, wrapped)


def _explain_missing(hook: Hook, is_last: bool, overlaps: bool) -> Hook:
    """Add to an AttributeError why an attribute is missing where the last stage is on another rank."""
    comes = (
        "after a flush, as before validation, for batches overlap" if overlaps else "after the batch, if it can be sent"
    )

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except AttributeError as error:
            if not is_last and not hasattr(error, "__notes__"):
                error.add_note(
                    f"{hook.__name__} runs on every rank, and training_step to its end on that of the last stage: what "
                    f"it sets comes to other ranks {comes}. Make the attribute in __init__, and keep numbers, "
                    "tensors, and lists and dicts of them, or read what the step returns from `outputs`"
                )
            raise

    return run


def _run_on_rank_zero(hook: Hook, module: pl.LightningModule) -> Hook:
    def run(*args: Any, **kwargs: Any) -> None:
        if module.trainer.is_global_zero:
            hook(*args, **kwargs)

    return run


def _call_after(hook: Hook, after: Callable[[], None]) -> Hook:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        after()
        return result

    return run
