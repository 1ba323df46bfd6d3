"""Comparison of the loss of a batch with the losses of its micro-batches.

Training in a pipeline assumes that the loss of a batch is a weighted sum of the losses of its micro-batches. Otherwise
the gradients belong to another loss than in one process. Therefore, in the first batch of a run, the last stage keeps
the outputs of the layers, runs the code around the layers again with the whole batch, and compares the two losses. The
weights of the micro-batches are determined in a similar way, but earlier, when the first micro-batch has left the
layers. Distorted copies of this micro-batch then stand in for the micro-batches that have not arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_pipes.engine import trees
from lightning_pipes.engine.compute.rng import RngUse
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.private_torch import backward_hooks
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import Kind, Span
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut
from lightning_pipes.trainer.cuts.layers.steps import LayerSteps, run_stage
from lightning_pipes.trainer.cuts.steps import BatchCopy, StepResult, loss_of, why_no_room
from lightning_pipes.trainer.data.batches import copy_batch, join, take_samples
from lightning_pipes.trainer.data.layouts import Layout, guess_layouts, join_tensors
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watcher, is_batch_due
from lightning_pipes.trainer.ranks.replicas import has_shards
from lightning_pipes.trainer.results.logs import recorded
from lightning_pipes.trainer.results.loss_weights import (
    SUMS_WEIGHT,
    BatchWeights,
    LossWeights,
    WeighsMicrobatches,
    WeightAmounts,
    candidates_differ,
    find_candidates,
    first_entries,
    last_trained,
    most_different_pair,
    select_by_gradients,
)
from lightning_pipes.trainer.user.unchanged import evaluation_mode, keep_unchanged
from lightning_pipes.trainer.watchers.logged_values import LoggedValues, Losses, find_weights
from lightning_pipes.trainer.watchers.sample_check import SampleCheck

N_LABELLED_BATCHES = 20
"""The number of batches whose labels are examined if no loss is compared."""
MAX_COMPARED_BATCHES = 4
"""The largest number of batches that are compared to determine how the values that steps keep are merged."""
_MAX_DISTORTED_VALUE = 1e4
"""Larger values belong to masks, which are not distorted."""


class _NotComparableError(Exception):
    """The two losses can't be compared, for the given reason."""


class UncomparedLoss(Watcher):
    """Warns if no loss is compared and the loss of a batch may not be a mean over samples.

    Args:
        run: the run.
        why: the reason why no loss is compared, for the message.
    """

    def __init__(self, run: PipelineRun, why: str) -> None:
        self._run, self._why = run, why
        self._batches = 0

    def around_batch(self, step: TrainingStep) -> None:
        """Examine the labels and masks of one of the first batches."""
        run, plan = self._run, self._run.engine.plan
        module = run.cut.module
        if self._batches == N_LABELLED_BATCHES or not run.is_last_rank or isinstance(module, WeighsMicrobatches):
            return
        self._batches += 1
        spans = step.locate_spans(plan.spans(Kind.F, plan.n_stages - 1))
        ruled_out = {SUMS_WEIGHT} if run.loss_weights is None else {SUMS_WEIGHT, *run.loss_weights.ruled_out}
        found = [each for each in find_candidates(module, step.batch, step.rows, spans) if each.name not in ruled_out]
        if not found:  # the loss is a sum
            return
        other = next((each for each in found[1:] if candidates_differ([found[0], each], spans)), None)
        if other is None:
            return
        self._batches = N_LABELLED_BATCHES
        rank_zero_warn(
            f"The loss of {type(module).__name__}.training_step is not compared with the losses of its micro-batches: "
            f"{self._why}. Earlier batches do not distinguish {found[0].name} from {other.name}. Micro-batches are "
            f"weighted by their {found[0].name}; if the loss is a mean over the other, training differs from one "
            "process. Define microbatch_weight(batch) in the module, which returns the weight of a micro-batch, or set "
            "PipelineStrategy(microbatches=1)"
        )


class LossCheck(Watcher):
    """Compares the loss of a batch with the losses of its micro-batches, on the rank of the last stage.

    It checks the first batch that has several micro-batches, and later batches at growing distances until it has warned
    of a difference.

    Args:
        run: the run.
        weights: receives the candidates for the weights of micro-batches that reproduce the loss.
        samples: determines the sample axes of the tensors of the last stage; None without such a check.

    Attributes:
        has_warned: whether it has warned of a difference.
    """

    def __init__(self, run: PipelineRun, weights: LossWeights, samples: SampleCheck | None = None) -> None:
        self._run = run
        self._samples = samples
        self._weights = weights
        self._cut = cast(ContainerCut, run.cut)
        self._module = run.cut.module
        self._steps = cast(LayerSteps, run.user_steps)
        self._device = run.device
        self._waits = True
        self._compared = self._batches = 0
        self._again: set[int] = set()
        self.has_warned = False
        self._size = 0.0
        self._values = LoggedValues(self._module, weights)

    def around_batch(self, step: TrainingStep) -> None:
        """Keep a copy of the batch if it will be compared.

        A batch is compared if it is the first with several micro-batches, if candidates disagree on it, if a value that
        the step keeps needs a comparison, or if a later comparison is due.
        """
        step.compare_candidates, weights = self.find_candidates, step.weights
        if weights is None or len(weights.spans) < 2:
            return
        of_state = self._compared < MAX_COMPARED_BATCHES and self._steps.state.needs_whole_batch()
        again = self._is_compared_again(step)
        if self._waits or weights.undecided or of_state:
            step.keep_copy()
            self._compared += 1
        elif again:
            step.keep_copy()
            self._again.add(step.number)

    def _is_compared_again(self, step: TrainingStep) -> bool:
        """Return whether to compare a later batch.

        Losses can change, for example with class weights or epochs.
        """
        self._batches += 1
        epoch = self._run.trainer.current_epoch
        return not self.has_warned and is_batch_due(self._batches - 1, epoch, step.batch_idx == 0)

    def before_optimizer_step(self, step: TrainingStep) -> None:
        """Compare the loss of the whole batch with the losses of its micro-batches."""
        if step.kept is not None and step.item is not None:
            self.compare_losses(self._run.stages[self._run.engine.plan.n_stages - 1], step.item)

    def find_candidates(self, stage: Stage, item: Item) -> None:
        """Determine which candidates for the weights of a batch fit, after its first micro-batch has left the layers.

        Args:
            stage: the last stage.
            item: the batch in the engine.
        """
        data = item.data
        weights, kept = data.weights, data.kept
        assert weights is not None
        try:
            x, losses = self._distort_losses(stage, item, kept)
            if not math.isfinite(losses.whole):  # for example, the loss of a batch without labels
                raise _NotComparableError("it is not a finite number")
        except Exception as error:  # the comparison after the batch reports it
            self._weights.choose_candidate(weights, None)
            if not isinstance(error, _NotComparableError):
                self._log_failure(error, "does not show how to weigh the losses of")
            return
        found: Sequence[WeightAmounts] = [e for e in weights.found if not losses.are_different(e.loss_share)]
        if data.token_cut is not None:  # micro-batches of equal numbers of tokens have almost equal weights
            found = [each for each in found if losses.is_closest(each, found)]
        if kept is not None and len(found) > 1:
            found = self._compare_gradients(stage, item, kept, x, found)
        fitting = {each.name for each in found}
        self._weights.choose_candidate(weights, fitting)
        likely = [each for each in weights.found if each.name in fitting]
        if likely and candidates_differ(likely, weights.spans):
            rank_zero_warn(
                f"The loss of {type(self._module).__name__}.training_step in batch {item.number} does not show whether "
                f"micro-batches are weighted by {' or by '.join(each.name for each in likely[:3])}. The first is "
                "taken, until a later batch decides. Give the module microbatch_weight(batch) to set the weight"
            )
        self._weights.weigh_logs(weights, find_weights(losses, weights))

    def _distort_losses(self, stage: Stage, item: Item, kept: BatchCopy | None) -> tuple[Any, Losses]:
        """Return distorted copies of the first micro-batch, and their losses with the labels of all micro-batches."""
        if kept is None or kept.left_out or kept.inside:  # the labels entered the layers together with their samples
            raise _NotComparableError("the weights are known only after the comparison")
        ((span, part),) = kept.parts.items()
        copies = [Span(start, start + span.rows) for start in range(0, kept.rows, span.rows)]
        x = join([part] * len(copies), copies, "what the last stage has")
        x = take_samples(x, Span(0, kept.rows), copies[-1].stop)
        generator = torch.Generator().manual_seed(0)

        def distort(t: torch.Tensor) -> torch.Tensor:
            if not t.is_floating_point() or not t.ndim or t.size(0) != kept.rows:
                return t
            factors = 0.5 + torch.rand(t.shape, generator=generator, dtype=torch.float32)
            return torch.where(t.abs() < _MAX_DISTORTED_VALUE, t * factors.to(t.dtype), t)

        x = trees.map_tensors(distort, x)
        assert item.data.weights is not None
        entering = {s: take_samples(x, s, kept.rows) for s in item.data.weights.spans}
        left = dict.fromkeys(entering, kept.left[span])
        return x, self._losses(stage, item, replace(kept, left=left), x, entering, {})

    def _compare_gradients(
        self, stage: Stage, item: Item, kept: BatchCopy, x: Any, found: Sequence[WeightAmounts]
    ) -> Sequence[WeightAmounts]:
        """Return the candidates that reproduce the gradients of two micro-batches together, or `found` if none does.

        The gradients are those of the outputs of the layers, and of weights that the step uses around the layers. Two
        micro-batches are compared as a batch of their own.

        Args:
            stage: the last stage.
            item: the batch in the engine.
            kept: the copy of the batch.
            x: the outputs of the layers for the whole batch.
            found: the candidates that reproduce the loss.
        """
        assert item.data.weights is not None
        pair = most_different_pair(found, pairwise(sorted(item.data.weights.spans)))
        has_hooks = any(map(backward_hooks, self._module.modules()))  # they would see gradients of no training step
        if pair is None or has_hooks or any(kept.left.values()):
            return found
        both = Span(pair[0].start, pair[1].stop)
        try:
            whole, first, second = (self._output_gradients(stage, item, kept, x, span) for span in (both, *pair))
        except Exception:  # such as a step without gradients; the comparison after the batch reports errors
            return found
        outputs = range(len(whole) - len(self._weights_around_layers()))
        for n in outputs:
            a, b = first[n], second[n]
            first[n], second[n] = torch.cat([a, torch.zeros_like(b)]), torch.cat([torch.zeros_like(a), b])
        return select_by_gradients(found, pair, [whole, first, second], self._types(x))

    def _weights_around_layers(self) -> list[torch.nn.Parameter]:
        """Return some of the trained weights that are not in the layers. All ranks have them."""
        if has_shards(self._module):
            return []
        named, inside = self._module.named_parameters(), f"{self._cut.path}."
        return last_trained(weight for name, weight in named if not name.startswith(inside))

    def _output_gradients(self, stage: Stage, item: Item, kept: BatchCopy, x: Any, span: Span) -> list[torch.Tensor]:
        """Return the gradients of the loss of a span, of the outputs of the layers and of weights around them."""
        leaves: list[torch.Tensor] = []

        def enter(t: torch.Tensor) -> torch.Tensor:
            if not t.is_floating_point() or not t.ndim or t.size(0) != span.rows:
                return t
            leaves.append(t.detach().requires_grad_())
            return leaves[-1]

        batch = take_samples(kept.batch, span, kept.rows, samples=item.data.samples)
        given = trees.map_tensors(enter, kept.layer_outputs(take_samples(x, span, kept.rows)))
        of_part = replace(item, rows=span.rows, training=False)
        with (
            keep_unchanged(self._module, skip=self._cut.proxy),
            evaluation_mode(self._module, skip=self._cut.proxy),
            recorded(self._module),
            torch.enable_grad(),
        ):
            loss, _, drew = self._loss(stage, of_part, copy_batch(batch), given, item.data.arguments, False, {})
            if drew:
                raise _NotComparableError("training_step draws random numbers around the layers")
            wanted = [*leaves, *self._weights_around_layers()]
            found = torch.autograd.grad(loss, wanted, materialize_grads=True)
            return [*found[: len(leaves)], *first_entries(found[len(leaves) :])]

    def compare_losses(self, stage: Stage, item: Item) -> None:
        """Warn if the loss of the whole batch differs from the weighted losses of its micro-batches.

        Args:
            stage: the last stage, with the weights with which the batch was computed.
            item: the batch in the engine.
        """
        data = item.data
        kept, data.kept = data.kept, None
        if kept is None:
            return
        first, self._waits = self._waits, False
        try:
            parts = dict(data.results)
            if kept.left_out:
                raise _NotComparableError(kept.left_out)
            if kept.parts.keys() != parts.keys():
                raise _NotComparableError("not all micro-batches have run")
            share = partial(_by_rows, kept.rows) if data.weights is None else data.weights.loss_share
            kept, x, losses = self._compare_forms(stage, item, kept, parts, share)
        except Exception as error:  # a step that can't run on a whole batch or without gradients
            self._log_failure(error, "was not compared with the losses of")
            return
        again = item.number in self._again
        self._again.discard(item.number)
        if data.weights is not None and not again:
            wrong = self._values.weigh_values(data.weights, losses)
            if wrong:
                second = self._losses(stage, item, kept, x, kept.parts, parts)
                self._values.warn_of_values(wrong, losses, second.results[None])
        # A small loss may have the rounding errors of an earlier, larger loss.
        self._size = max(self._size, abs(losses.whole))
        if losses.are_different(share, self._size):
            self.has_warned = True
            mean = sum(loss * share(span) for span, loss in losses.parts.items() if share(span))
            later = "" if again else self._later(losses, data.weights)
            batch = "the first batch" if first else f"batch {item.number}"
            rank_zero_warn(
                f"{type(self._module).__name__}.training_step returns a loss that is not a mean over samples. It is "
                f"{losses.whole:.6g} for {batch} as a whole, and {mean:.6g} as the mean of its {len(losses.parts)} "
                f"micro-batches, so training differs from one process{later}. Possible solutions: "
                "PipelineStrategy(microbatches=1); a loss that is a mean over samples, a mean over labels that are not "
                "-100, or a sum; or, for another mean, a method microbatch_weight(batch) of the module, which returns "
                "the weight of a micro-batch. Losses that compare samples with each other need microbatches=1. If "
                "samples meet only in the loss, loss='batch' without module=... also works. check_loss=False turns "
                "this comparison off"
            )

    def _compare_forms(
        self,
        stage: Stage,
        item: Item,
        kept: BatchCopy,
        parts: Mapping[Span, StepResult],
        share: Callable[[Span], float],
    ) -> tuple[BatchCopy, Any, Losses]:
        """Return the losses of a batch, from layer outputs that are joined in a form that reproduces its loss.

        If no form reproduces it, the first form with which the step can run is used.

        Returns:
            The values of the micro-batches in that form, their joined value, and the losses.
        """
        order, first, failure = sorted(kept.parts), None, None
        for form, layouts in self._list_forms(kept, order, stage.number, item.number):
            values = [form.parts[span] for span in order]
            try:
                if layouts is None:
                    x = join(values, order, "what the last stage has", average=True)
                else:
                    x = join_tensors(values, order, layouts)
                losses = self._losses(stage, item, form, x, form.parts, parts)
            except Exception as error:  # the step can't run with tensors of another form
                failure = failure or error
                continue
            if not losses.are_different(share, max(self._size, abs(losses.whole))):
                return form, x, losses
            first = first or (form, x, losses)
        if first is None:
            assert failure is not None, "there is a form"
            raise failure
        return first

    def _list_forms(
        self, kept: BatchCopy, order: list[Span], stage: int, number: int
    ) -> list[tuple[BatchCopy, list[Layout] | None]]:
        """Return the forms in which the values of the micro-batches may be joined.

        This is the known form, or all forms that the sizes of the values allow.
        """
        plain = replace(kept, parts={span: kept.layer_outputs(kept.parts[span]) for span in order}, axis=0)
        values = [plain.parts[span] for span in order]
        if self._samples is not None and self._samples.compared == number:
            entering, leaving = self._samples.layouts.get(stage, (None, None))
            known = entering if kept.inside else leaving
            if known is not None and len(known) == len(tensors_in(values[0])):
                return [(plain, known)]
        return [(kept, None), *((plain, layouts) for layouts in guess_layouts(values, order))]

    def _later(self, losses: Losses, weights: BatchWeights | None) -> str:
        """Return, as text, the weights of later batches if the training loss of the first batch determines them."""
        fitting = (
            set() if weights is None else {e.name for e in weights.found if not losses.are_different(e.loss_share)}
        )
        if weights is None or not fitting or not self._weights.has_no_replicas:
            self._weights.give_up()
            return ""
        self._weights.choose_candidate(weights, fitting)
        return f" in this batch; from the next one on they are weighted by {weights.chosen.name}"

    @staticmethod
    def _log_failure(error: Exception, what: str) -> None:
        reason = str(error) if isinstance(error, _NotComparableError) else f"{type(error).__name__}: {error}"
        rank_zero_info(f"The loss of a batch {what} its micro-batches: {reason}")

    def _losses(
        self,
        stage: Stage,
        item: Item,
        kept: BatchCopy,
        x: Any,
        entering: Mapping[Span, Any],
        parts: Mapping[Span, StepResult],
    ) -> Losses:
        """Compute the losses of a whole batch and its parts from the outputs of the layers.

        Args:
            stage: the last stage.
            item: the batch in the engine.
            kept: the copy of the batch.
            x: the outputs of the layers for the whole batch.
            entering: the outputs of the layers for each part.
            parts: the parts whose results are already known.

        Raises:
            _NotComparableError: the losses can't be compared.
        """
        needed = self._run.saved_bytes.of_a_sample(stage.number)
        crowded = why_no_room(int(needed * kept.rows)) if needed is not None and self._device.type == "cpu" else ""
        if crowded:
            raise _NotComparableError(crowded)
        with keep_unchanged(self._module, skip=None if kept.inside else self._cut.proxy):
            results: dict[Span | None, StepResult] = {}
            drew = False

            def run(span: Span | None) -> None:
                nonlocal drew
                if span is None:
                    batch, given, rows = kept.batch, x, kept.rows
                else:
                    batch = take_samples(kept.batch, span, kept.rows, samples=item.data.samples)
                    given, rows = entering[span], span.rows
                left = self._steps.left.merge_values(kept.left) if span is None else kept.left.get(span, {})
                of_part = replace(item, rows=rows, training=False)
                with torch.no_grad(), recorded(self._module) as logged:
                    value, extras, drew_too = self._loss(
                        stage,
                        of_part,
                        copy_batch(batch),
                        kept.layer_outputs(given),
                        item.data.arguments,
                        kept.inside,
                        left,
                    )
                results[span] = StepResult(value.detach(), extras, logged)
                drew = drew or drew_too

            if not kept.inside:
                run(None)
                if parts and not drew:
                    self._steps.state.note_whole_batch()
                for span in sorted(entering):
                    if span in parts:
                        results[span] = parts[span]
                    else:
                        run(span)
                if not drew:
                    return Losses.from_results(results, self._types(x))
            drew = False
            # A whole batch draws other random numbers than its parts. Without dropout it may draw none.
            with evaluation_mode(self._module, skip=None if kept.inside else self._cut.proxy):
                for each in (None, *sorted(entering)):
                    run(each)
            if drew:
                raise _NotComparableError(
                    "training_step draws random numbers around the layers, which differ for a whole batch"
                )
            return Losses.from_results(results, self._types(x))

    def _loss(
        self,
        stage: Stage,
        item: Item,
        batch: Any,
        x: Any,
        arguments: tuple[Any, ...],
        inside: bool,
        left: Mapping[Any, Any],
    ) -> tuple[torch.Tensor, dict[str, Any], bool]:
        """Return the loss, the other results, and whether the step drew random numbers outside of the layers."""
        x, batch = move_data_to_device((copy_batch(x), batch), self._device)
        step = self._module.training_step

        def layers() -> Any:
            if left:
                self._steps.left.put_values(left)
            return run_stage(stage, item, Span(0, item.rows), x) if inside else x

        with self._steps.step_context(), item.data.in_initial_state:
            draws = RngUse(self._device)
            out = self._steps.run_around_layers(step, item, batch, arguments, layers, draws)
            self._steps.left.take_back()
            value, extras = loss_of(out)
            return value, extras, draws.was_used

    def _types(self, x: Any) -> set[torch.dtype]:
        return {t.dtype for t in tensors_in(x) if t.is_floating_point()} | self._steps.autocast_types()


def _by_rows(rows: int, span: Span) -> float:
    return span.rows / rows
