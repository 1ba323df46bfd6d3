"""Comparison of the loss and the gradients of a whole batch with those of its micro-batches.

The other watchers compare forwards. This one also finds code whose backward uses several samples of a batch, and code
whose state grows from micro-batch to micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_pipes.engine.compute.reducer import is_distributed
from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.ir import Span
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.trainer.cuts.steps import HOST_DEVICE, why_no_room
from lightning_pipes.trainer.data.batches import copy_batch, move_batch
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watcher
from lightning_pipes.trainer.private_lightning import is_compiled
from lightning_pipes.trainer.results.generators import States
from lightning_pipes.trainer.results.loss_weights import losses_differ
from lightning_pipes.trainer.verify.comparison import (
    NEGLIGIBLE_EPS,
    Comparison,
    Difference,
    RepetitionSpread,
    Rounding,
    describe_mixing,
)
from lightning_pipes.trainer.verify.record import OUTSIDE, ModuleParts, Phase, ValueKey
from lightning_pipes.trainer.verify.verifier import parts_of_run
from lightning_pipes.trainer.watchers.due_batches import DueBatches
from lightning_pipes.trainer.watchers.repeated_batch import RepeatedBatch, RepeatedValues

N_WHOLE_BATCH_REPETITIONS = 8
"""The number of times that a whole batch runs again with weights that are rounded differently, if it differs."""
BACKWARD_MEMORY_RATIO = 8
"""The quotient of the memory of a whole batch with a backward and without one, as an assumption."""
LOSS_KEY = ValueKey(Phase.LOSS, OUTSIDE, "loss")


class ReportsDifferences(Protocol):
    """A watcher that warns of differences between a batch and its micro-batches."""

    @property
    def has_warned(self) -> bool:
        """Whether it has warned of a difference, on global rank 0."""


class BatchComparison(Watcher):
    """Runs some batches again, in micro-batches and as one micro-batch, and compares losses and gradients.

    Both runs go through the stages of the training, forward and backward, and leave no trace. If the memory for a
    whole batch is short, they run without a backward, and only losses are compared. The comparison does not depend on
    how the module is cut. It warns of the first difference of a run of the Trainer. Collective.

    Args:
        run: the run.
        others: watchers that compare the forwards. A difference that they have reported is not reported again.
    """

    def __init__(self, run: PipelineRun, others: Sequence[ReportsDifferences]) -> None:
        self._run, self._others = run, others
        self._due = DueBatches(0, lambda answer: run.control.broadcast(answer, run.last_rank))
        self._copy: Any = None
        self._generators: States = {}
        self._why_not = next(filter(None, run.control.all_gather(_find_obstacle(run))), "")
        own = {p.dtype for p in run.cut.module.parameters() if p.is_floating_point()}
        self._types = set[torch.dtype]().union(*run.control.all_gather(own | run.user_steps.autocast_types()))
        self._eps = max((torch.finfo(kind).eps for kind in self._types), default=0.0)
        self._has_ended = False
        self._logged: set[str] = set()

    def around_batch(self, step: TrainingStep) -> None:
        """Keep a copy of the batch if it is due and has several micro-batches. Collective for some batches."""
        self._copy = None
        if self._has_ended or self._run.count_microbatches(step.rows) < 2:
            return
        if self._why_not:
            self._log(step, self._why_not)
        elif self._due.is_due(self._run.trainer.current_epoch, step.batch_idx == 0):
            self._copy = move_batch(copy_batch(step.batch), HOST_DEVICE)
            self._generators = self._run.state.generators.read_states()

    def after_batch(self, step: TrainingStep) -> None:
        """Compare the batch, with the weights with which it was computed."""
        batch, self._copy = self._copy, None
        if batch is None:
            return
        begun = read_seconds()
        self._compare_batch(step, batch)
        self._due.note_seconds(read_seconds() - begun)

    def _compare_batch(self, step: TrainingStep, batch: Any) -> None:
        backward = self._includes_backward(step)
        if backward is None:
            return
        parts_of_rank = parts_of_run(self._run)  # layers may have moved since the last comparison
        again = RepeatedBatch(self._run, parts_of_rank, step, batch, backward)
        parts, whole = again.repeat(whole=False), again.repeat(whole=True)
        self._why_not = self._find_failure(parts, whole)
        if self._why_not:
            self._log(step, self._why_not)
            return
        found = self._find_differences(step, parts, whole)
        if not any(found):
            return
        if any(self._find_differences(step, parts, again.repeat(whole=False))):
            self._why_not = "the same micro-batches give other gradients in a second run"
            self._log(step, self._why_not)
            return
        found = self._repeat_comparison(step, again, parts, whole, found)
        first = min((each for each in found if each is not None), key=lambda each: each.order, default=None)
        if first is None:
            self._log(step, "it differs by no more than one process does from itself if its weights are rounded")
            return
        known = self._run.control.broadcast(any(each.has_warned for each in self._others), self._run.last_rank)
        self._has_ended = True
        if not known:
            rank_zero_warn(self._describe(first, parts_of_rank))

    def _repeat_comparison(
        self,
        step: TrainingStep,
        again: RepeatedBatch,
        parts: RepeatedValues,
        whole: RepeatedValues,
        found: Sequence[Difference | None],
    ) -> Sequence[Difference | None]:
        """Compare with the spread of several runs of the whole batch, with weights that are rounded differently.

        Rounding decides on which side of a jump a value is, such as the jump of the slope of ReLU at 0. Returns the
        first difference on each rank.
        """
        if self._eps < NEGLIGIBLE_EPS:
            return found
        spread = RepetitionSpread()
        spread.add(self._values(step, whole))
        for attempt in range(N_WHOLE_BATCH_REPETITIONS):
            spread.add(self._values(step, again.repeat(whole=True, attempt=attempt)))
        return self._find_differences(step, parts, whole, spread)

    def _find_differences(
        self, step: TrainingStep, parts: RepeatedValues, whole: RepeatedValues, spread: RepetitionSpread | None = None
    ) -> Sequence[Difference | None]:
        """Return the first difference on each rank. Collective."""
        run = self._run
        ours, theirs = self._values(step, parts), self._values(step, whole)
        for one, other in ((ours, theirs), (theirs, ours)):
            one.update({key: torch.zeros_like(other[key]) for key in other.keys() - one.keys()})
        if LOSS_KEY in ours:
            kind = next(result.loss.dtype for result in parts.results.values() if result.loss is not None)
            sizes = [*_losses(parts).values(), *_losses(whole).values()]  # losses of parts may cancel
            if not losses_differ(ours[LOSS_KEY].item(), theirs[LOSS_KEY].item(), sizes, kind, {kind, *self._types}):
                del ours[LOSS_KEY]
        largest = run.control.all_gather(
            max((_largest(t) for key, t in theirs.items() if key != LOSS_KEY), default=0.0)
        )
        rounding = Rounding(self._eps, dict.fromkeys(Phase, max(largest)))
        comparison = Comparison(run.global_ranks[run.engine.rank])
        found = comparison.compare_values(step.number, ours, theirs, rounding, spread)
        return run.control.all_gather(min(found, key=lambda each: each.order, default=None))

    def _values(self, step: TrainingStep, made: RepeatedValues) -> dict[ValueKey, Any]:
        """Return the gradients of a run on this rank, and its loss on the last rank."""
        values: dict[ValueKey, Any] = dict(made.gradients)
        if made.results and self._run.is_last_rank:
            shares = self._shares(step, made)
            loss = sum(loss * shares[span] for span, loss in _losses(made).items() if shares[span])
            values[LOSS_KEY] = torch.tensor(loss, dtype=torch.float64)
        return values

    def _shares(self, step: TrainingStep, made: RepeatedValues) -> dict[Span, float]:
        weights = step.weights
        if weights is None or len(made.results) == 1:
            return {span: span.rows / step.rows for span in made.results}
        return {span: weights.loss_share(span) for span in made.results}

    def _find_failure(self, parts: RepeatedValues, whole: RepeatedValues) -> str:
        """Return the reason why two runs are not comparable, on any rank. Collective."""
        values: list[torch.Tensor | float] = [
            *parts.gradients.values(),
            *whole.gradients.values(),
            *_losses(parts).values(),
        ]
        values += _losses(whole).values()
        failure = whole.failure and f"the step does not run on a whole batch ({whole.failure})"
        failure = failure or (parts.failure and f"the step does not run a second time ({parts.failure})")
        failure = failure or (
            (parts.other_draws or whole.other_draws) and f"it draws {parts.other_draws or whole.other_draws}"
        )
        if not failure and whole.by_sample and self._run.user_steps.ends_whole:
            failure = "its loss is computed once for all samples, and it draws random numbers"
        if not failure and not all(map(_is_finite, values)):
            failure = "its loss or a gradient is not a finite number"
        return next(filter(None, self._run.control.all_gather(failure)), "")

    def _includes_backward(self, step: TrainingStep) -> bool | None:
        """Return whether the batch is compared with its gradients, or None if it is not compared at all. Collective."""
        run = self._run
        needed = sum((run.saved_bytes.of_a_sample(number) or 0.0) * step.rows for number in run.stages)
        gradients = 2 * sum(p.nbytes for p in run.local_layers.parameters if p.requires_grad and not p.is_meta)
        crowded = [why_no_room(int(needed / BACKWARD_MEMORY_RATIO), run.device), why_no_room(int(needed), run.device)]
        crowded[1] = crowded[1] or why_no_room(gradients if run.device != HOST_DEVICE else int(needed) + gradients)
        drawn = bool(run.state.generators.read_changes(self._generators))
        why_not = "it draws random numbers from the module's own generators" if drawn else crowded[0]
        not_at_all, no_backward = (
            next(filter(None, each), "") for each in zip(*run.control.all_gather((why_not, crowded[1])), strict=True)
        )
        if not_at_all:
            self._log(step, not_at_all)
            return None
        if no_backward:
            self._log(step, no_backward, "The gradients of batch")
        return not no_backward

    def _log(self, step: TrainingStep, why: str, what: str = "Batch") -> None:
        """Log once that a batch, or its gradients, are not compared."""
        if why not in self._logged:
            self._logged.add(why)
            does = "is" if what == "Batch" else "are"
            rank_zero_info(f"{what} {step.number} {does} not compared with its micro-batches: {why}")

    def _describe(self, difference: Difference, parts: ModuleParts) -> str:
        names = [parts.layer_name(number) for number in range(len(parts.names))]
        return (
            f"{type(self._run.cut.module).__name__}.training_step trains differently in micro-batches than in one "
            f"process. {describe_mixing(difference, names)}. PipelineStrategy(check_loss=False) turns this comparison "
            "off"
        )


def _find_obstacle(run: PipelineRun) -> str:
    """Return the reason why no batch of a run can be compared. Empty if batches can be compared."""
    module = run.cut.module
    if run.is_asynchronous:
        return "batches overlap, and read weights of different versions"
    if any(map(is_distributed, run.local_layers.parameters)) or run.engine.plan.replicas:
        return "the weights or the samples of a stage are divided among several ranks"
    if any(map(is_compiled, module.modules())):
        return "compiled modules would be compiled again for a whole batch"
    if any(isinstance(m, BatchNorm) and m.training and getattr(m, "running_mean", m) is None for m in module.modules()):
        return "a batch norm without running statistics uses all samples of a micro-batch"
    return ""


def _losses(made: RepeatedValues) -> Mapping[Span, float]:
    return {span: result.loss.item() for span, result in made.results.items() if result.loss is not None}


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _is_finite(value: torch.Tensor | float) -> bool:
    return math.isfinite(value) if isinstance(value, float) else bool(torch.isfinite(value).all())
