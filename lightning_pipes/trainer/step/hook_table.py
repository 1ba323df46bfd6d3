"""The table of hooks: what a pipeline does around each hook of the user's.

A hook without a row runs on every rank, on this rank's part of the module, and nothing else happens around it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class HookRow:
    """The handling of one hook, or of another method of the user's that Lightning calls.

    Attributes:
        name: of the method.
        runs_on_rank_zero: the module's hook runs on global rank 0 only, not on every rank.
        reads_steps: it usually reads what steps have stored on the module, and stores what later steps read. All ranks
            have the module's state of the last stage before and after it.
        agrees_on_stops: it is the last hook of a batch or an epoch: afterwards all ranks stop, or none.
        starts_epoch: random numbers and the data of an epoch are set up after it.
        merges_logs: it sees the gradients of this rank's layers. What it logs is merged over the ranks.
        is_in_closure: it may run inside the module's `optimizer_step`.
        acts_on_weights: it works on weights, and is recognised although its name does not begin with `on_`.
        is_between_batches: it may change weights between two batches.
        is_before_step: it may change weights and gradients between backward and the optimizer's step.
        barrier: the name of Lightning's barrier that follows it.
    """

    name: str
    runs_on_rank_zero: bool = False
    reads_steps: bool = False
    agrees_on_stops: bool = False
    starts_epoch: bool = False
    merges_logs: bool = False
    is_in_closure: bool = False
    acts_on_weights: bool = False
    is_between_batches: bool = False
    is_before_step: bool = False
    barrier: str | None = None


HOOKS = (
    HookRow("prepare_data", barrier="pre_setup"),
    HookRow("setup", barrier="post_setup"),
    HookRow("on_fit_start", barrier="_CheckpointConnector.resume_end"),
    HookRow("train_dataloader", barrier="train_dataloader()"),
    HookRow("val_dataloader", barrier="val_dataloader()"),
    HookRow("on_save_checkpoint", runs_on_rank_zero=True),
    HookRow("on_train_epoch_start", starts_epoch=True),
    HookRow("on_before_batch_transfer", is_between_batches=True),
    HookRow("on_after_batch_transfer", is_between_batches=True),
    HookRow("on_train_batch_start", is_between_batches=True),
    HookRow("optimizer_step", acts_on_weights=True, is_between_batches=True),
    HookRow("on_before_zero_grad", is_in_closure=True, is_between_batches=True),
    HookRow("optimizer_zero_grad", acts_on_weights=True, is_between_batches=True),
    HookRow("on_before_backward", is_in_closure=True, is_between_batches=True),
    HookRow("on_after_backward", is_in_closure=True, merges_logs=True, is_before_step=True),
    HookRow("on_before_optimizer_step", is_in_closure=True, merges_logs=True, is_before_step=True),
    HookRow("configure_gradient_clipping", acts_on_weights=True, is_before_step=True),
    HookRow("lr_scheduler_step", acts_on_weights=True, is_between_batches=True),
    HookRow("on_train_batch_end", agrees_on_stops=True, is_between_batches=True),
    HookRow("on_train_epoch_end", reads_steps=True, agrees_on_stops=True),
    HookRow("on_validation_batch_end", reads_steps=True),
    HookRow("on_validation_epoch_end", reads_steps=True),
    HookRow("on_test_batch_end", reads_steps=True),
    HookRow("on_test_epoch_end", reads_steps=True),
    HookRow("on_predict_batch_end", reads_steps=True),
    HookRow("on_predict_epoch_end", reads_steps=True),
)
"""In the order in which Lightning calls them."""


def select_hooks(condition: Callable[[HookRow], object]) -> tuple[str, ...]:
    """Return the names of hooks by a condition on their rows."""
    return tuple(row.name for row in HOOKS if condition(row))
