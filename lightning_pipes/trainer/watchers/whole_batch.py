"""Comparison of the values that a step stores, logs and returns for a whole batch and for its micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipes.engine.allocator import trimmed_heap
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.ir import Span
from lightning_pipes.trainer.cuts.layers.capture import named_step
from lightning_pipes.trainer.cuts.steps import HOST_DEVICE, StepResult, WholeBatch
from lightning_pipes.trainer.data.batches import copy_batch, move_batch
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watcher, is_batch_due
from lightning_pipes.trainer.results.logs import LogKey, number_calls
from lightning_pipes.trainer.results.loss_weights import SAMPLES_WEIGHT, candidates_differ, usual_weights
from lightning_pipes.trainer.user.unchanged import evaluation_mode, keep_unchanged
from lightning_pipes.trainer.watchers.logged_values import LoggedValues, Losses


class WholeBatchValues(Watcher):
    """Runs some batches a second time as one micro-batch, through all stages of a module that is cut by units.

    The values that the step stores in the module, logs and returns then determine how the values of micro-batches are
    merged: as means, sums, lists of samples, and others. Batches 0, 1, 2, 4, 8, ... and the first batches of epochs 0,
    1, 2, 4, 8, ... run again, forward only and without a trace.

    If no way of merging fits a logged or returned value, the batch and its micro-batches run again in evaluation mode,
    because dropout and batch statistics make the values of a whole batch differ. Collective.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._batches = 0
        self._copy: Any = None
        self._has_warned = False
        weights = run.loss_weights if len(run.last_stage_ranks) == 1 else None
        self._values = None if weights is None else LoggedValues(run.cut.module, weights)

    def around_batch(self, step: TrainingStep) -> None:
        """Keep a copy of the batch if it is due and has several micro-batches."""
        self._copy = None
        if self._run.count_microbatches(step.rows) < 2:
            return
        epoch = self._run.trainer.current_epoch  # it may be logged
        if is_batch_due(self._batches, epoch, step.batch_idx == 0):
            self._copy = move_batch(copy_batch(step.batch), HOST_DEVICE)
        self._batches += 1

    def before_optimizer_step(self, step: TrainingStep) -> None:
        """Run the batch again, with the weights with which it was computed."""
        run, batch, self._copy = self._run, self._copy, None
        if batch is None:
            return
        whole, wrong = self._run_again(step, batch), set[LogKey]()
        if self._values is not None and step.weights is not None and whole.results:
            losses = self._losses(whole.results[Span(0, step.rows)], step.results)
            wrong = self._values.weigh_values(step.weights, losses)
        if run.control.broadcast(bool(wrong), run.last_rank):
            self._evaluate_values(step, batch, wrong)
        if whole.failure:
            self._warn_of_failure(step, whole.failure)

    def _evaluate_values(self, step: TrainingStep, batch: Any, wrong: set[LogKey]) -> None:
        """Choose the weights of unmatched values from results in evaluation mode.

        Warn of values that still do not fit.
        """
        counts = (1, self._run.count_microbatches(step.rows), 1)
        once, parts, again = (self._run_again(step, batch, evaluate=True, parts=count) for count in counts)
        if self._values is None or step.weights is None:
            return
        whole, failure = Span(0, step.rows), once.failure or parts.failure or again.failure
        if failure:
            self._warn_of_failure(step, failure)
            return
        losses = self._losses(once.results[whole], parts.results)
        found = self._values.weigh_values(step.weights, losses, wrong)
        self._values.warn_of_values(found, losses, again.results[whole])

    def _run_again(self, step: TrainingStep, batch: Any, evaluate: bool = False, parts: int = 1) -> WholeBatch:
        """Run a batch again in the given number of parts, forward only and without a trace."""
        run = self._run
        module = run.cut.module

        @contextmanager
        def context() -> Iterator[None]:
            with run.user_steps.step_context(), step.in_initial_state:
                yield

        whole = WholeBatch(
            context,
            named_step(module, "training_step"),
            move_data_to_device(copy_batch(batch), run.device),
            step.arguments,
            rows=step.rows,
            samples=step.samples,
            leaves_values=not evaluate,
        )
        mode = evaluation_mode(module) if evaluate else nullcontext()
        with trimmed_heap(), keep_unchanged(module, weights=False, moves=run.engine.shares_rank), mode:
            run.engine.evaluate(Item(step.number, step.rows, whole, training=False), parts)
        return whole

    def _losses(self, whole: StepResult, parts: Mapping[Span, StepResult]) -> Losses:
        run = self._run
        kinds = {p.dtype for p in run.cut.module.parameters() if p.is_floating_point()}
        kinds |= run.user_steps.autocast_types()
        results: list[tuple[Span | None, StepResult]] = [(None, whole), *parts.items()]
        return Losses.from_results(dict(results), kinds)

    def _warn_of_failure(self, step: TrainingStep, failure: str) -> None:
        """Warn once that values are merged without a comparison, because the step does not run on a whole batch."""
        run, does = self._run, list[str]()
        if run.state.has_results:
            does.append("sets attributes of the module")
        if self._values is not None and step.results:
            first = step.results[min(step.results)]
            losses = first.logged_losses() if first.loss is not None else []
            names = [call.call_text for key, call in number_calls(first.log_calls) if key not in losses]
            does += [f"logs or returns {', '.join(dict.fromkeys(names))}"] if names else []
        if does and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{type(run.cut.module).__name__}.training_step {' and '.join(does)}, and does not run on a whole "
                f"batch without gradients ({failure}). These values are therefore not compared with one process: "
                "numbers that are equal in all micro-batches are assumed to be equal for the batch, and other numbers "
                "are assumed to be means. If they are sums, set PipelineStrategy(microbatches=1)"
            )


class UncomparedValues(Watcher):
    """Warns once of logged and returned values that may not be means over samples, if no batch runs a second time.

    This is the case for overlapping batches of a module that is cut by units.
    """

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._has_warned = False

    def before_optimizer_step(self, step: TrainingStep) -> None:
        """Name the values of a batch whose loss is weighted by another quantity than the number of samples."""
        weights = step.weights
        first = max(step.results.items(), key=lambda each: each[0].rows, default=(None, None))[1]
        if self._has_warned or weights is None or first is None or first.loss is None:
            return
        by_samples = next(each for each in weights.every if each.name == SAMPLES_WEIGHT)
        if not candidates_differ([by_samples, weights.chosen], weights.spans):
            return
        losses = first.logged_losses()
        names = {
            call.call_text: None
            for key, call in number_calls(first.log_calls)
            if key not in losses and usual_weights(call) in (SAMPLES_WEIGHT, "") and _is_number(call.value)
        }
        if names:
            self._has_warned = True
            rank_zero_warn(
                f"{type(self._run.cut.module).__name__}.training_step logs or returns {', '.join(names)}, which are "
                "averaged over micro-batches by their numbers of samples, although the loss is weighted by "
                f"{weights.chosen.name}. If they are means over something else than samples, they differ from one "
                "process. Schedules with overlapping batches do not compare the values of modules that are cut by "
                "units. Log sums with reduce_fx='sum', or use a schedule that flushes between batches, such as '1f1b'"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
