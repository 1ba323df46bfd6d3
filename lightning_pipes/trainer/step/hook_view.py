"""While a hook of the user's runs, it sees the parameters of all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pipes.engine.private_torch import step_hooks
from lightning_pipes.trainer.module.elsewhere import HookScope

_OURS = ("lightning", "pytorch_lightning", "lightning_pipes")
"""Packages whose callbacks know what a strategy is."""

_OF_STEPS = ("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step")
"""Methods of a LightningModule that work on weights and are no hooks by name."""

_IN_CLOSURE = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that run while an optimizer_step of the user's may."""

_SET_DATA = "variable.set_data(tensor)"
"""In torch's error for `here.data = elsewhere`, which asks no subclass."""


class HookView:
    """Tells `scope` which hook runs; hooks of the module, and of callbacks that are not Lightning's own.

    Args:
        module: cut, with no other wrapper around its hooks yet.
    """

    def __init__(self, module: pl.LightningModule, callbacks: Iterable[pl.Callback], scope: HookScope) -> None:
        self._scope = scope
        self._undo: list[Callable[[], None]] = []
        for name in _hooks(pl.LightningModule):
            if is_overridden(name, module):
                self._wrap(module, name, name != "on_save_checkpoint")
        for callback in callbacks:
            if _is_ours(callback):
                for name in _IN_CLOSURE:
                    if is_overridden(name, callback, pl.Callback):
                        self._wrap(callback, name, everywhere=True, suspended=True)
                continue
            for name in _hooks(pl.Callback):
                if is_overridden(name, callback, pl.Callback):
                    self._wrap(callback, name, everywhere=True)

    def remove(self) -> None:
        """The hooks are as before."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _wrap(self, owner: object, name: str, everywhere: bool, suspended: bool = False) -> None:
        hook, before = getattr(owner, name), vars(owner).get(name)

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            running = self._scope.running(f"{type(owner).__name__}.{name}", everywhere)
            with self._scope.suspended() if suspended else running:
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

        def undo() -> None:
            if vars(owner).get(name) is run:
                vars(owner).pop(name)
                if before is not None:
                    vars(owner)[name] = before

        vars(owner)[name] = run
        self._undo.append(undo)


def has_hooks(module: pl.LightningModule, callbacks: Iterable[pl.Callback], names: Iterable[str]) -> bool:
    """Return whether the module, or a callback that is not Lightning's own, overrides one of these hooks."""
    theirs = [callback for callback in callbacks if not _is_ours(callback)]
    return any(
        is_overridden(name, module)
        or any(hasattr(pl.Callback, name) and is_overridden(name, each, pl.Callback) for each in theirs)
        for name in names
    )


def _is_ours(callback: pl.Callback) -> bool:
    return type(callback).__module__.partition(".")[0] in _OURS and not isinstance(callback, LambdaCallback)


def _hooks(kind: type) -> list[str]:
    hooks = [name for name in dir(kind) if name.startswith("on_") and callable(getattr(kind, name))]
    return [*hooks, *_OF_STEPS] if kind is pl.LightningModule else hooks


class StepView:
    """Tells `scope` when an optimizer steps: what its code takes a norm of by torch's functions is all weights.

    Its step hooks see the parameters of all ranks.

    Args:
        optimizers: of this rank; each gets a `step` of its own until `remove`.
    """

    def __init__(self, optimizers: Iterable[Optimizer], scope: HookScope) -> None:
        self._scope = scope
        self._undo = [self._wrap(optimizer) for optimizer in optimizers]

    def remove(self) -> None:
        """Optimizers step as before."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _wrap(self, optimizer: Optimizer) -> Callable[[], None]:
        before, original = vars(optimizer).get("step"), optimizer.step
        name = f"{type(optimizer).__name__}.step"
        wrapped: list[tuple[dict[int, Any], int, Any, Any]] = []

        @functools.wraps(original)
        def step(_: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
            for hooks in step_hooks(optimizer):
                for key, hook in hooks.items():
                    if all(hook is not ours for *_, ours in wrapped):
                        hooks[key] = self._seeing(hook, f"a step hook of {type(optimizer).__name__}")
                        wrapped.append((hooks, key, hook, hooks[key]))
            given = closure if closure is None else self._scope.as_now(closure)
            with self._scope.running(name, everywhere=True, whole=False):
                return original(given, *args, **kwargs)

        def undo() -> None:
            for hooks, key, hook, ours in wrapped:
                if hooks.get(key) is ours:
                    hooks[key] = hook
            vars(optimizer).pop("step", None)
            if before is not None:
                vars(optimizer)["step"] = before

        vars(optimizer)["step"] = MethodType(step, optimizer)  # schedulers look for the function of a method
        return undo

    def _seeing(self, hook: Callable[..., Any], name: str) -> Any:
        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._scope.running(name, everywhere=True):
                return hook(*args, **kwargs)

        return run
