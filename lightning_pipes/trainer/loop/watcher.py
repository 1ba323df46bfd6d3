"""Watchers: checks, statistics and safety nets beside the step; and the step that they see.

A watcher is a class of its own in `trainer/watchers/`, with up to four moments. Ranks call `before_batch` and
`around_batch` for the same batches in the same order; where schedules flush, the other two as well. Watchers are called
in the order of `trainer/watchers/default.py`:

    before_batch            No plan is chosen yet. Collective calls are allowed.
    around_batch            The batch has a plan and is about to run. It runs in the context that is returned, if any.
                            Collective calls are allowed.
    before_optimizer_step   Gradients are complete, and no optimizer has stepped by them. Where batches overlap, it is
                            called for each stage of this rank, and other ranks may be at other batches.
    after_batch             This rank knows the result and logs it next. Where batches overlap, the batch is an earlier
                            one.

A collective call must be made by all ranks, in the same order. A moment that a class does not override costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.ir import LayerUse, Policy, Program
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.relocation.transfer import GroupSettings
from lightning_pipes.trainer.reports.report import Window
from lightning_pipes.trainer.step.steps import EvaluationBatch, TrainingBatch

TRAINING = "training"
Mark = tuple[int, int] | None
"""Checksums of a batch, and of the layers that it uses."""


@dataclass
class TrainingStep(TrainingBatch):
    """A training batch on its way through the pipeline, as the training loop and watchers see it.

    It adds to `TrainingBatch` where the batch is in training: its number, its plan, and what ranks compare.

    Attributes:
        number: counts batches since training began.
        batch_idx: the one that Lightning counts in an epoch.
        first: whether gradients begin to add up with this batch.
        plans: of the batch; None for those of the run.
        order: of the batch, as its schedule gives it.
        share: takes the message of the last stage, and returns it on every rank.
        use: the layers that the batch uses; None for all.
        item: the batch as the engine has it, once it has a plan.
        window: the events of the batch, where stages end it before the next one begins.
        mark: checksums of this rank's batch, which ranks compare; None where they do not.
        last_mark: those of the last stage.
    """

    name: ClassVar[str] = TRAINING
    training: ClassVar[bool] = True
    number: int = -1
    batch_idx: int = 0
    first: bool = True
    plans: Plans | None = None
    order: Program | Policy | None = None
    share: Callable[[Any], Any] = field(default=lambda message: message)
    use: LayerUse | None = None
    item: Item | None = None
    window: Window | None = None
    mark: Mark = None
    last_mark: Mark = None


@dataclass
class AsynchronousStep(TrainingStep):
    """A training batch among others that are under way.

    Attributes:
        settings: of the optimizers when the batch began, for schedulers go on meanwhile.
        message: on the last stage, the result that the other stages get.
        stepped: the number of stages of this rank that have ended the batch.
    """

    settings: list[GroupSettings] = field(default_factory=list)
    message: Any = None
    stepped: int = 0


@dataclass
class EvaluationStep(EvaluationBatch):
    """A batch that is evaluated.

    Attributes:
        batch: on this rank.
        name: of the user's step.
        first: whether it is the first one since a training batch.
    """

    training: ClassVar[bool] = False
    batch: Any = None
    rows: int = 0
    name: str = ""
    batch_idx: int = 0
    first: bool = True
    use: LayerUse | None = None
    mark: Mark = None
    last_mark: Mark = None


Step = TrainingStep | EvaluationStep


Around = AbstractContextManager[None] | None
_NOTHING = nullcontext()


class Watcher:
    """Watches the training batches of a run. Override the moments that you need."""

    def before_batch(self, step: TrainingStep) -> None:
        """Watch a batch before its plan is chosen."""

    def around_batch(self, step: TrainingStep) -> Around:
        """Watch a batch before it runs; return a context to run it in, or None."""

    def before_optimizer_step(self, step: TrainingStep) -> None:
        """Watch a batch with complete gradients, before an optimizer steps by them."""

    def after_batch(self, step: TrainingStep) -> None:
        """Watch a batch with a known result, before it is logged."""


class EvaluationWatcher(Watcher):
    """Watches batches that are evaluated, too: `before_batch`, `around_batch` and `after_batch`."""

    def before_batch(self, step: Step) -> None:
        """Watch a batch before its plan is chosen."""

    def around_batch(self, step: Step) -> Around:
        """Watch a batch before it runs; return a context to run it in, or None."""

    def after_batch(self, step: Step) -> None:
        """Watch a batch with a known result, before it is logged."""


class Watchers:
    """The watchers of a run, in their order.

    Attributes:
        of_evaluation: those that watch batches that are evaluated, too.
    """

    def __init__(self, watchers: Sequence[Watcher] = (), evaluation: bool = False) -> None:
        self._before_batch = _overridden(watchers, "before_batch")
        self._around_batch = _overridden(watchers, "around_batch")
        self._before_optimizer_step = _overridden(watchers, "before_optimizer_step")
        self._after_batch = _overridden(watchers, "after_batch")
        both = [each for each in watchers if isinstance(each, EvaluationWatcher)]
        self.of_evaluation: Watchers = self if evaluation else Watchers(both, evaluation=True)

    def before_batch(self, step: Any) -> None:
        """Call `before_batch` of each watcher."""
        for watch in self._before_batch:
            watch(step)

    def around_batch(self, step: Any) -> AbstractContextManager[Any]:
        """Call `around_batch` of each watcher, and return one context made of theirs."""
        contexts: list[AbstractContextManager[None]] = []
        for watch in self._around_batch:
            context = watch(step)
            if context is not None:
                contexts.append(context)
        if len(contexts) < 2:
            return contexts[0] if contexts else _NOTHING
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return stack.pop_all()

    def before_optimizer_step(self, step: Any) -> None:
        """Call `before_optimizer_step` of each watcher."""
        for watch in self._before_optimizer_step:
            watch(step)

    def after_batch(self, step: Any) -> None:
        """Call `after_batch` of each watcher."""
        for watch in self._after_batch:
            watch(step)


def _overridden(watchers: Sequence[Watcher], moment: str) -> list[Callable[[Any], Any]]:
    """Return the bound methods of watchers with an override of this moment."""
    own = {vars(base)[moment] for base in (Watcher, EvaluationWatcher) if moment in vars(base)}
    return [getattr(each, moment) for each in watchers if getattr(type(each), moment) not in own]


def is_due(number: int) -> bool:
    """Return whether the batch with this number is looked at by checks that go on: 0, 1, 2, 4, 8, ..."""
    return number & (number - 1) == 0
