"""Watchers, which are checks, statistics and safeguards around the step, and the step objects that they receive.

Each watcher is a class in `trainer/watchers/` with up to four methods, which are called at four moments of a batch. All
ranks call `before_batch` and `around_batch` for the same batches in the same order. With schedules that flush, this
also holds for the other two methods. Watchers are called in the order in which `trainer/watchers/default.py` lists
them:

    before_batch            No plan has been chosen yet. Collective calls are allowed.
    around_batch            The batch has a plan and is about to run, in the context that the method returns, if
                            any. Collective calls are allowed.
    before_optimizer_step   Gradients are complete, and no optimizer has used them yet. If batches overlap, the method
                            is called for each stage of this rank, and other ranks may be at other batches.
    after_batch             This rank has the result and is about to log it. If batches overlap, this is an earlier
                            batch than the current one.

A collective call must be made by all ranks, in the same order. A method that a class does not override has no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.ir import LayerUse, Policy, Program
from lightning_pipes.trainer.cuts.steps import EvaluationBatch, TrainingBatch
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.relocation.transfer import GroupSettings
from lightning_pipes.trainer.reports.report import Window

TRAINING = "training"
Mark = tuple[int, int] | None
"""Checksums of a batch and of the layers that it uses, or None."""


@dataclass
class TrainingStep(TrainingBatch):
    """A training batch in the pipeline, as the training loop and watchers see it.

    It extends `TrainingBatch` by the position of the batch in the training: its number, its plan, and the values that
    ranks compare.

    Attributes:
        number: the number of the batch since the beginning of training.
        batch_idx: Lightning's index of the batch in its epoch.
        first: whether the batch is the first one of an accumulation window.
        plans: the plans for the batch, or None for the plans of the run.
        order: the order of the batch, as its schedule returns it.
        sorted_from: the batch as it was loaded, if the samples of `batch` have another order; otherwise None.
        share: broadcasts the message of the last stage, and returns it on every rank.
        use: the layers that the batch uses, or None for all layers.
        item: the batch in the form of the engine, after its plan has been chosen.
        window: the events of the batch, if all stages finish it before the next batch begins.
        mark: checksums of this rank's batch, which ranks compare, or None if they do not compare them.
        last_mark: checksums of the last stage's batch.
    """

    name: ClassVar[str] = TRAINING
    training: ClassVar[bool] = True
    number: int = -1
    batch_idx: int = 0
    first: bool = True
    plans: Plans | None = None
    order: Program | Policy | None = None
    sorted_from: Any = None
    share: Callable[[Any], Any] = field(default=lambda message: message)
    use: LayerUse | None = None
    item: Item | None = None
    window: Window | None = None
    mark: Mark = None
    last_mark: Mark = None

    @property
    def loaded_batch(self) -> Any:
        """The batch, with its samples in the order in which they were loaded."""
        return self.batch if self.sorted_from is None else self.sorted_from


@dataclass
class AsynchronousStep(TrainingStep):
    """A training batch that overlaps with other batches.

    Attributes:
        settings: the settings of the optimizers when the batch began, because schedulers may change them before its
            step.
        message: the result that the last stage sends to the other stages.
        stepped: the number of stages of this rank that have finished the batch.
    """

    settings: list[GroupSettings] = field(default_factory=list)
    message: Any = None
    stepped: int = 0


@dataclass
class EvaluationStep(EvaluationBatch):
    """A batch that is evaluated.

    Attributes:
        batch: the batch on this rank.
        rows: number of samples in the batch.
        name: the name of the user's step.
        batch_idx: Lightning's index of the batch.
        first: whether it is the first evaluated batch since a training batch.
        use: the layers that the batch uses, or None for all layers.
        mark: checksums of this rank's batch, which ranks compare, or None if they do not compare them.
        last_mark: checksums of the last stage's batch.
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
    """Base class of watchers of the training batches of a run. Override the methods that you need."""

    def before_batch(self, step: TrainingStep) -> None:
        """Handle a batch before its plan is chosen."""

    def around_batch(self, step: TrainingStep) -> Around:
        """Handle a batch before it runs, and return a context in which it runs, or None."""

    def before_optimizer_step(self, step: TrainingStep) -> None:
        """Handle a batch with complete gradients, before an optimizer uses them."""

    def after_batch(self, step: TrainingStep) -> None:
        """Handle a batch with an available result, before the result is logged."""


class EvaluationWatcher(Watcher):
    """Base class of watchers that also watch evaluated batches.

    For these, `before_batch`, `around_batch` and `after_batch` are called.
    """

    def before_batch(self, step: Step) -> None:
        """Handle a batch before its plan is chosen."""

    def around_batch(self, step: Step) -> Around:
        """Handle a batch before it runs, and return a context in which it runs, or None."""

    def after_batch(self, step: Step) -> None:
        """Handle a batch with an available result, before the result is logged."""


class Watchers:
    """The watchers of a run, in their order.

    Args:
        watchers: the watchers.
        evaluation: whether these watchers are only used for evaluated batches.

    Attributes:
        of_evaluation: the watchers that also watch evaluated batches.
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
        """Call `around_batch` of each watcher, and return a single context that combines the returned contexts."""
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
    """Return the bound methods of the watchers that override this method in their class."""
    own = {vars(base)[moment] for base in (Watcher, EvaluationWatcher) if moment in vars(base)}
    return [getattr(each, moment) for each in watchers if getattr(type(each), moment) not in own]


def is_batch_due(number: int, epoch: int, begins_epoch: bool) -> bool:
    """Return whether a repeated check is due for a batch.

    Args:
        number: the number of the batch among those that can be checked.
        epoch: the number of its epoch.
        begins_epoch: whether it is the first batch of its epoch.
    """
    return is_due(number) or (begins_epoch and is_due(epoch))


def is_due(number: int) -> bool:
    """Return whether a repeated check is due for the batch with this number: 0, 1, 2, 4, 8, ..."""
    return number & (number - 1) == 0
