"""The table of the user's hooks, and the wrappers around them.

A hook without a row in the table runs on every rank and sees the whole module, with placeholders for layers of other
ranks (`track_hooks`). To treat another hook differently, add a row at the position in which Lightning calls it.
`wrap_module_hooks` wraps the hooks of the module according to the table, most of them only if the module overrides
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks as cb
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pipes.engine.private_torch import step_hooks
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.user.patches import Patches
from lightning_pipes.trainer.user.remote_tensors import HookScope


@dataclass(frozen=True)
class HookRow:
    """Specifies how one hook, or another method of the user that Lightning calls, is handled.

    Attributes:
        name: the name of the method.
        runs_on_rank_zero: whether the module's hook runs on global rank 0 only.
        reads_steps: whether the hook usually reads values that steps have stored on the module, and stores values for
            later steps. All ranks get the module's state of the last stage before the hook, and again after it.
        agrees_on_stops: whether it is the last hook of a batch or an epoch, after which all ranks stop or none.
        starts_epoch: whether the random numbers and the data of an epoch are set up after the hook.
        merges_logs: whether the hook sees the gradients of this rank's layers. Its logs are merged over the ranks.
        is_in_closure: whether the hook may run inside the module's `optimizer_step`.
        acts_on_weights: whether the method works on weights. It is then tracked although its name does not begin with
            `on_`.
        is_between_batches: whether the hook may change weights between two batches.
        is_before_step: whether the hook may change weights and gradients between backward and the optimizer step.
        barrier: the name of the Lightning barrier that follows the hook.
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
    HookRow("on_validation_end", reads_steps=True),
    HookRow("on_test_batch_end", reads_steps=True),
    HookRow("on_test_epoch_end", reads_steps=True),
    HookRow("on_test_end", reads_steps=True),
    HookRow("on_predict_batch_end", reads_steps=True),
    HookRow("on_predict_epoch_end", reads_steps=True),
    HookRow("on_predict_end", reads_steps=True),
)
"""The rows, in the order in which Lightning calls the hooks."""


def select_hooks(condition: Callable[[HookRow], object]) -> tuple[str, ...]:
    """Return the names of the hooks whose rows fulfill a condition."""
    return tuple(row.name for row in HOOKS if condition(row))


Hook = Callable[..., Any]


def wrap_module_hooks(
    module: pl.LightningModule,
    patches: Patches,
    synchronise: Callable[[Hook], Hook],
    is_last: bool,
    is_asynchronous: bool,
    agree: Callable[[], None],
    start_epoch: Callable[[], None],
) -> None:
    """Wrap the hooks of the module according to the table, until `patches` is closed.

    Args:
        module: the user's module.
        patches: the changes to the module.
        synchronise: wraps a hook so that all ranks have the module's state of the last stage around it.
        is_last: whether the last stage is on this rank.
        is_asynchronous: whether batches overlap.
        agree: called after the last hooks of a batch or an epoch. Lightning calls the module's hook after those of all
            callbacks.
        start_epoch: called after the hook that starts an epoch.
    """
    for row in HOOKS:
        if not hasattr(module, row.name):
            continue
        hook, overridden = getattr(module, row.name), is_overridden(row.name, module)
        wrapped = hook
        if overridden and row.reads_steps:
            wrapped = synchronise(_explain_missing(wrapped, is_last, is_asynchronous))
        if overridden and row.runs_on_rank_zero:
            wrapped = _run_on_rank_zero(wrapped, module)
        if row.agrees_on_stops:
            wrapped = _call_after(_explain_missing(wrapped, is_last, is_asynchronous), agree)
        if row.starts_epoch:
            wrapped = _call_after(wrapped, start_epoch)
        if wrapped is not hook:
            patches.replace_method(module, row.name, wrapped)


def _explain_missing(hook: Hook, is_last: bool, is_asynchronous: bool) -> Hook:
    """Add to an AttributeError the reason why the attribute may be missing if the last stage is on another rank."""
    arrival = (
        "after a flush, such as before validation, because batches overlap"
        if is_asynchronous
        else "after the batch, if it can be sent"
    )

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except AttributeError as error:
            if not is_last and not hasattr(error, "__notes__"):
                error.add_note(
                    f"{hook.__name__} runs on every rank, but training_step runs to its end on the last stage only. "
                    f"Attributes that it sets reach other ranks {arrival}. Create the attribute in __init__, and store "
                    "only numbers, tensors, and lists and dicts of them, or read the output of the step from `outputs`"
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


_DISTRIBUTED_PACKAGES = ("lightning", "pytorch_lightning", "lightning_pipes")
"""Packages whose callbacks are written for distributed strategies."""
_WHOLE_MODULE_CALLBACKS = (cb.LambdaCallback, cb.WeightAveraging, cb.StochasticWeightAveraging, cb.BaseFinetuning)
"""Callbacks of these packages that need the parameters of all layers, as the user's callbacks do."""

_WEIGHT_HOOKS = select_hooks(lambda hook: hook.acts_on_weights)
_CLOSURE_HOOKS = select_hooks(lambda hook: hook.is_in_closure)
_RANK_ZERO_HOOKS = select_hooks(lambda hook: hook.runs_on_rank_zero)

_NO_DATA_ERROR = "its data is not allocated yet"
"""A part of torch's error message for reading the values of a DTensor."""
_SET_DATA_ERROR = "variable.set_data(tensor)"
"""A part of torch's error message for `local.data = remote`, which does not call methods of tensor subclasses."""


def track_hooks(
    module: pl.LightningModule, callbacks: Iterable[pl.Callback], scope: HookScope, patches: Patches
) -> None:
    """Make `scope` record which hook of the module or of the user's callbacks is running, until `patches` is closed.

    Args:
        module: the module after it was cut, whose hooks have no other wrapper yet.
        callbacks: the callbacks of the Trainer.
        scope: records which hook is running.
        patches: the changes to the module and the callbacks.
    """
    for name in _hooks(pl.LightningModule):
        if is_overridden(name, module):
            _track(module, name, scope, patches, on_all_ranks=name not in _RANK_ZERO_HOOKS)
    for callback in callbacks:
        ours = _is_ours(callback)
        for name in _CLOSURE_HOOKS if ours else _hooks(pl.Callback):
            if is_overridden(name, callback, pl.Callback):
                _track(callback, name, scope, patches, suspended=ours)


def _track(
    owner: object, name: str, scope: HookScope, patches: Patches, on_all_ranks: bool = True, suspended: bool = False
) -> None:
    hook = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        running = scope.running(f"{type(owner).__name__}.{name}", on_all_ranks)
        with scope.suspend_hooks() if suspended else running:
            try:
                return hook(*args, **kwargs)
            except RuntimeError as error:
                if _SET_DATA_ERROR in str(error):
                    error.add_note(
                        f"{type(owner).__name__}.{name} gives a tensor of this rank what it has of a layer on "
                        "another rank, as `target.data = 0.9 * target.data + 0.1 * p.data` does with a copy of "
                        "the whole module; every process has the layers of its stages only"
                    )
                if _NO_DATA_ERROR in str(error):
                    raise PipelineError(
                        f"{type(owner).__name__}.{name} takes the value of a DTensor, as "
                        "lightning.pytorch.utilities.grad_norm does of sharded gradients. The norm of all of them "
                        "comes from torch.nn.utils.get_total_norm, and whole values from full_tensor()"
                    ) from error
                raise

    patches.replace_method(owner, name, run)


def has_hooks(module: pl.LightningModule, callbacks: Iterable[pl.Callback], names: Iterable[str]) -> bool:
    """Return whether the module, or a callback that is not Lightning's own, overrides one of these hooks."""
    theirs = [callback for callback in callbacks if not _is_ours(callback)]
    return any(
        is_overridden(name, module)
        or any(hasattr(pl.Callback, name) and is_overridden(name, each, pl.Callback) for each in theirs)
        for name in names
    )


def _is_ours(callback: pl.Callback) -> bool:
    return type(callback).__module__.partition(".")[0] in _DISTRIBUTED_PACKAGES and not isinstance(
        callback, _WHOLE_MODULE_CALLBACKS
    )


def _hooks(kind: type) -> list[str]:
    hooks = [name for name in dir(kind) if name.startswith("on_") and callable(getattr(kind, name))]
    return [*hooks, *_WEIGHT_HOOKS] if kind is pl.LightningModule else hooks


def track_optimizer_steps(
    optimizers: Iterable[Optimizer], scope: HookScope, patches: Patches, whole: bool = True
) -> None:
    """Make `scope` record when an optimizer steps, until `patches` is closed.

    Norms that the optimizer computes with torch's functions are then the norms of all weights.

    Args:
        optimizers: the optimizers of this rank. Each gets its own wrapped `step`.
        scope: records which code is running.
        patches: the changes to the optimizers.
        whole: whether step hooks see the parameters of all ranks. If each batch steps only some of the layers, hooks
            see the parameters of the batch, because other parameters are in use.
    """
    for optimizer in optimizers:
        _track_steps(optimizer, scope, patches, whole)


def _track_steps(optimizer: Optimizer, scope: HookScope, patches: Patches, whole: bool) -> None:
    original, name = optimizer.step, type(optimizer).__name__
    wrapped: list[tuple[dict[int, Any], int, Any, Any]] = []

    def wrap_hook(hook: Callable[..., Any]) -> Any:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with scope.running(f"a step hook of {name}", on_all_ranks=True, whole=whole):
                return hook(*args, **kwargs)

        return run

    @functools.wraps(original)
    def step(_: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        for hooks in step_hooks(optimizer):
            for key, hook in hooks.items():
                if all(hook is not ours for *_, ours in wrapped):
                    hooks[key] = wrap_hook(hook)
                    wrapped.append((hooks, key, hook, hooks[key]))
        given = closure if closure is None else scope.bind(closure)
        with scope.running(f"{name}.step", on_all_ranks=True, whole=False):
            return original(given, *args, **kwargs)

    def unwrap_hooks() -> None:
        for hooks, key, hook, ours in wrapped:
            if hooks.get(key) is ours:
                hooks[key] = hook

    patches.replace(optimizer, "step", MethodType(step, optimizer))  # schedulers expect a bound method
    patches.callback(unwrap_hooks)
