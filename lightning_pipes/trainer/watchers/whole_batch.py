"""Comparison of the values that a step leaves in the module for a whole batch and for its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipes.engine.allocator import trimmed_heap
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.ir import Kind
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watcher, is_due
from lightning_pipes.trainer.module.batches import copy_batch, move_batch
from lightning_pipes.trainer.module.capture import named_step
from lightning_pipes.trainer.module.unchanged import keep_unchanged
from lightning_pipes.trainer.step.steps import HOST, WholeBatch


class WholeBatchState(Watcher):
    """Runs a batch once more as one micro-batch through all stages of a module that is cut by units.

    What the step leaves in the module then decides how the values of micro-batches are merged: as means, sums, lists of
    samples and others. Batches 0, 1, 2, 4, 8, ... run again, forward only and without a trace. Collective.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._batches = 0
        self._copy: Any = None
        self._has_warned = False

    def around_batch(self, step: TrainingStep) -> None:
        """Keep a copy of the batch if it is due and if it is cut."""
        self._copy = None
        spans = self._run.engine.plan.spans(Kind.F, 0)
        if len(spans) < 2 or spans[1].start >= step.rows:
            return
        if is_due(self._batches):
            self._copy = move_batch(copy_batch(step.batch), HOST)
        self._batches += 1

    def before_optimizer_step(self, step: TrainingStep) -> None:
        """Run the batch again, with the weights that it had."""
        run, batch, self._copy = self._run, self._copy, None
        if batch is None:
            return
        module = run.cut.module

        @contextmanager
        def context() -> Iterator[None]:
            with run.user_steps.step_context(), step.in_initial_state:
                yield

        whole = WholeBatch(
            context, named_step(module, "training_step"), move_data_to_device(batch, run.device), step.arguments
        )
        with trimmed_heap(), keep_unchanged(module, weights=False):
            run.engine.evaluate(Item(step.number, step.rows, whole, training=False), 1)
        if whole.failure and run.state.has_results and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{type(module).__name__}.training_step sets attributes of the module, and does not run on a whole "
                f"batch without gradients ({whole.failure}). So their values are not compared with those of one "
                "process: numbers that are equal in all micro-batches are assumed to be equal for the batch, and other "
                "numbers to be means. If they are sums, set PipelineStrategy(microbatches=1)"
            )
