"""Hooks of the user's see the parameters of all layers while they run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks as cb
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pipes.engine.private_torch import step_hooks
from lightning_pipes.trainer.module.remote_tensors import HookScope
from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.step.hook_table import select_hooks

_OURS = ("lightning", "pytorch_lightning", "lightning_pipes")
"""Packages whose callbacks know what a strategy is."""
_OF_WHOLE_MODULES = (cb.LambdaCallback, cb.WeightAveraging, cb.StochasticWeightAveraging)
"""Callbacks among them that need the parameters of all layers, as the user's do."""

_OF_STEPS = select_hooks(lambda hook: hook.acts_on_weights)
_IN_CLOSURE = select_hooks(lambda hook: hook.is_in_closure)
_ON_RANK_ZERO = select_hooks(lambda hook: hook.runs_on_rank_zero)

_SET_DATA = "variable.set_data(tensor)"
"""In torch's error for `here.data = elsewhere`, which asks no subclass."""


def track_hooks(
    module: pl.LightningModule, callbacks: Iterable[pl.Callback], scope: HookScope, patches: Patches
) -> None:
    """Have `scope` know which hook runs until `patches` are closed: the module's, and the user's callbacks'.

    Args:
        module: cut, with no other wrapper around its hooks yet.
    """
    for name in _hooks(pl.LightningModule):
        if is_overridden(name, module):
            _track(module, name, scope, patches, everywhere=name not in _ON_RANK_ZERO)
    for callback in callbacks:
        ours = _is_ours(callback)
        for name in _IN_CLOSURE if ours else _hooks(pl.Callback):
            if is_overridden(name, callback, pl.Callback):
                _track(callback, name, scope, patches, suspended=ours)


def _track(
    owner: object, name: str, scope: HookScope, patches: Patches, everywhere: bool = True, suspended: bool = False
) -> None:
    hook = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        running = scope.running(f"{type(owner).__name__}.{name}", everywhere)
        with scope.suspended() if suspended else running:
            try:
                return hook(*args, **kwargs)
            except RuntimeError as error:
                if _SET_DATA in str(error):
                    error.add_note(
                        f"{type(owner).__name__}.{name} gives a tensor of this rank what it has of a layer on "
                        "another rank, as `target.data = 0.9 * target.data + 0.1 * p.data` does with a copy of "
                        "the whole module; every process has the layers of its stages only"
                    )
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
    return type(callback).__module__.partition(".")[0] in _OURS and not isinstance(callback, _OF_WHOLE_MODULES)


def _hooks(kind: type) -> list[str]:
    hooks = [name for name in dir(kind) if name.startswith("on_") and callable(getattr(kind, name))]
    return [*hooks, *_OF_STEPS] if kind is pl.LightningModule else hooks


def track_optimizer_steps(
    optimizers: Iterable[Optimizer], scope: HookScope, patches: Patches, whole: bool = True
) -> None:
    """Have `scope` know when an optimizer steps, until `patches` are closed.

    Norms that its code takes by torch's functions are those of all weights.

    Args:
        optimizers: of this rank; each gets a `step` of its own.
        whole: whether step hooks see the parameters of all ranks. Where batches step some of the layers each, they see
            those of the batch: others are in use.
    """
    for optimizer in optimizers:
        _track_steps(optimizer, scope, patches, whole)


def _track_steps(optimizer: Optimizer, scope: HookScope, patches: Patches, whole: bool) -> None:
    original, name = optimizer.step, type(optimizer).__name__
    wrapped: list[tuple[dict[int, Any], int, Any, Any]] = []

    def wrap_hook(hook: Callable[..., Any]) -> Any:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with scope.running(f"a step hook of {name}", everywhere=True, whole=whole):
                return hook(*args, **kwargs)

        return run

    @functools.wraps(original)
    def step(_: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        for hooks in step_hooks(optimizer):
            for key, hook in hooks.items():
                if all(hook is not ours for *_, ours in wrapped):
                    hooks[key] = wrap_hook(hook)
                    wrapped.append((hooks, key, hook, hooks[key]))
        given = closure if closure is None else scope.as_now(closure)
        with scope.running(f"{name}.step", everywhere=True, whole=False):
            return original(given, *args, **kwargs)

    def unwrap_hooks() -> None:
        for hooks, key, hook, ours in wrapped:
            if hooks.get(key) is ours:
                hooks[key] = hook

    patches.replace(optimizer, "step", MethodType(step, optimizer))  # schedulers look for the function of a method
    patches.callback(unwrap_hooks)
