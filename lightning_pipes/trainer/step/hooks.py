"""Hooks of the user's module that must not run everywhere, or that must be the last word."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

READING_HOOKS = (
    "on_train_epoch_end",
    "on_validation_epoch_end",
    "on_test_epoch_end",
    "on_predict_epoch_end",
    "on_validation_batch_end",
    "on_test_batch_end",
    "on_predict_batch_end",
)
"""Hooks that usually read what the steps have stored on `self`, and set what the next steps read."""

AGREEING_HOOKS = ("on_train_batch_end", "on_train_epoch_end")
"""Lightning calls them after those of all callbacks."""

Hook = Callable[..., Any]


class HookWrappers:
    """Wraps hooks on the instance; `remove` undoes it.

    Args:
        followed: gives a hook after which all ranks have the state of the module that the last stage has.
        here: whether the last stage is on this rank.
        agree: called after the last of the hooks at which ranks agree on stopping.
        epoch_start: called after on_train_epoch_start.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        followed: Callable[[Hook], Hook],
        here: bool,
        agree: Callable[[], None],
        epoch_start: Callable[[], None],
    ) -> None:
        self._module = module
        self._here = here
        self._wrapped: list[str] = []
        for name in READING_HOOKS:
            if is_overridden(name, module):
                self._wrap(name, lambda hook: followed(self._explained(hook)))
        if is_overridden("on_save_checkpoint", module):
            self._wrap("on_save_checkpoint", self._on_rank_zero)
        for name in AGREEING_HOOKS:
            self._wrap(name, lambda hook: _then(self._explained(hook), agree))
        self._wrap("on_train_epoch_start", lambda hook: _then(hook, epoch_start))

    def remove(self) -> None:
        """The module's own hooks are back."""
        for name in self._wrapped:
            self._module.__dict__.pop(name, None)
        self._wrapped = []

    def _wrap(self, name: str, around: Callable[[Hook], Hook]) -> None:
        hook = getattr(self._module, name)
        self._module.__dict__[name] = functools.wraps(hook)(around(hook))
        self._wrapped.append(name)

    def _explained(self, hook: Hook) -> Hook:
        """The hook; what it misses on this rank because steps end elsewhere is explained in the error."""

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except AttributeError as error:
                if not self._here and not hasattr(error, "__notes__"):
                    error.add_note(
                        f"{hook.__name__} runs on every stage, but only the last one runs training_step to its end; "
                        "read what it returns from `outputs`, or make the attribute in __init__"
                    )
                raise

        return run

    def _on_rank_zero(self, hook: Hook) -> Hook:
        def run(*args: Any, **kwargs: Any) -> None:
            if self._module.trainer.is_global_zero:
                hook(*args, **kwargs)

        return run


def _then(hook: Hook, after: Callable[[], None]) -> Hook:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        after()
        return result

    return run
