"""While a hook of the user's runs, it sees the parameters of all layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipes.trainer.module.elsewhere import HookScope
from lightning_pipes.trainer.step.hooks import LAST_STAGE_HOOKS

_OURS = ("lightning", "pytorch_lightning", "lightning_pipes")
"""Packages whose callbacks know what a strategy is."""

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
                everywhere = name not in (*LAST_STAGE_HOOKS, "on_save_checkpoint")
                marked = getattr(getattr(module, name), "on_every_stage", False)
                self._wrap(module, name, everywhere or marked)
        for callback in callbacks:
            if _is_ours(callback):
                continue
            for name in _hooks(pl.Callback):
                if is_overridden(name, callback, pl.Callback):
                    self._wrap(callback, name, everywhere=True)

    def remove(self) -> None:
        """The hooks are as before."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _wrap(self, owner: object, name: str, everywhere: bool) -> None:
        hook, before = getattr(owner, name), vars(owner).get(name)

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._scope.running(f"{type(owner).__name__}.{name}", everywhere):
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
    return [*hooks, "configure_gradient_clipping"] if kind is pl.LightningModule else hooks
