"""The batch that runs, as the step and its watchers share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightning_pipes.engine.compute.item import Item
from lightning_pipes.ir import LayerUse, Policy, Program
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.relocation.late_steps import Settings
from lightning_pipes.trainer.reports.report import Window
from lightning_pipes.trainer.step.steps import EvaluationBatch, TrainingBatch

TRAINING = "training"
Mark = tuple[int, int] | None
"""Checksums of a batch, and of the layers that it uses."""


@dataclass
class TrainingStep(TrainingBatch):
    """A training batch on its way through the pipeline.

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
class StreamedStep(TrainingStep):
    """A training batch among others that are under way.

    Attributes:
        settings: of the optimizers when the batch came, for schedulers go on meanwhile.
        message: on the last stage, the result that the other stages get.
        stepped: the number of stages of this rank that have ended the batch.
    """

    settings: list[Settings] = field(default_factory=list)
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
