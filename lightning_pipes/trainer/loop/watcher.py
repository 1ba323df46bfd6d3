"""Watchers: checks, statistics and safety nets beside the step, which runs the same without them.

A watcher is a class of its own in `trainer/watchers/`, with up to four moments. All ranks call them for the same batch,
in the order of `trainer/watchers/default.py`:

    before     the batch has come; no plan is chosen yet. All ranks are here.
    around     the batch has a plan and is about to run. What is returned, if anything, is entered then, and left when
               the batch has run. All ranks are here.
    checked    gradients are complete; nothing has stepped by them. Where batches overlap: once for each stage of this
               rank, and other ranks are elsewhere.
    after      the result is known on this rank, and is logged next. Where batches overlap, that of an earlier batch.

"All are here" means that a collective call is allowed: every rank makes it, in the same order. A moment that a class
does not override costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from lightning_pipes.trainer.loop.step_data import Step, TrainingStep

Around = AbstractContextManager[None] | None
_NOTHING = nullcontext()


class Watcher:
    """Watches the training batches of a run. Override the moments that you need."""

    def before(self, step: TrainingStep) -> None:
        """Watch a batch before its plan is chosen."""

    def around(self, step: TrainingStep) -> Around:
        """Watch a batch before it runs; return a context to run it in, or None."""

    def checked(self, step: TrainingStep) -> None:
        """Watch a batch whose gradients are complete, before an optimizer steps by them."""

    def after(self, step: TrainingStep) -> None:
        """Watch a batch whose result is known, before it is logged."""


class EvaluationWatcher(Watcher):
    """Watches batches that are evaluated, too: `before`, `around` and `after`."""

    def before(self, step: Step) -> None:
        """Watch a batch before its plan is chosen."""

    def around(self, step: Step) -> Around:
        """Watch a batch before it runs; return a context to run it in, or None."""

    def after(self, step: Step) -> None:
        """Watch a batch whose result is known, before it is logged."""


class Watchers:
    """The watchers of a run, in their order.

    Attributes:
        of_evaluation: those that watch batches that are evaluated, too.
    """

    def __init__(self, watchers: Sequence[Watcher] = (), evaluation: bool = False) -> None:
        self._before = _overridden(watchers, "before")
        self._around = _overridden(watchers, "around")
        self._checked = _overridden(watchers, "checked")
        self._after = _overridden(watchers, "after")
        both = [each for each in watchers if isinstance(each, EvaluationWatcher)]
        self.of_evaluation: Watchers = self if evaluation else Watchers(both, evaluation=True)

    def before(self, step: Any) -> None:
        """Call `before` of each watcher."""
        for watch in self._before:
            watch(step)

    def around(self, step: Any) -> AbstractContextManager[Any]:
        """Call `around` of each watcher, and return one context made of theirs."""
        contexts: list[AbstractContextManager[None]] = []
        for watch in self._around:
            context = watch(step)
            if context is not None:
                contexts.append(context)
        if len(contexts) < 2:
            return contexts[0] if contexts else _NOTHING
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return stack.pop_all()

    def checked(self, step: Any) -> None:
        """Call `checked` of each watcher."""
        for watch in self._checked:
            watch(step)

    def after(self, step: Any) -> None:
        """Call `after` of each watcher."""
        for watch in self._after:
            watch(step)


def _overridden(watchers: Sequence[Watcher], moment: str) -> list[Callable[[Any], Any]]:
    """Return the bound methods of watchers whose class overrides this moment."""
    own = {vars(base)[moment] for base in (Watcher, EvaluationWatcher) if moment in vars(base)}
    return [getattr(each, moment) for each in watchers if getattr(type(each), moment) not in own]
