"""The user's steps on the stages of a module that is cut in the layers of a container."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision

from lightning_pipes.engine import trees
from lightning_pipes.engine.compute.rng import (
    AFTER_LAYERS,
    BEFORE_LAYERS,
    RngUse,
    forked_rng,
)
from lightning_pipes.engine.compute.spans import Item, mark_unsampled
from lightning_pipes.engine.compute.stage import Body, Stage
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import PipelineError, Plan, Span
from lightning_pipes.trainer.cuts.layers.capture import ChangedInput, Interceptor, NoCallError, named_step
from lightning_pipes.trainer.cuts.layers.left_messages import Place, check_unchanged, pack_message, unpack_message
from lightning_pipes.trainer.cuts.layers.left_values import LeftValues, join_values
from lightning_pipes.trainer.cuts.steps import (
    EvaluationBatch,
    TrainingBatch,
    UserSteps,
)
from lightning_pipes.trainer.data.batches import Path, copy_batch, join, sample_tensors, take_samples
from lightning_pipes.trainer.results.generators import States
from lightning_pipes.trainer.results.logs import (
    recorded,
)
from lightning_pipes.trainer.results.module_state import ModuleState
from lightning_pipes.trainer.results.weight_changes import WeightChangeCheck, explain_repetition
from lightning_pipes.trainer.user.unchanged import keep_unchanged

Outputs = Sequence[tuple[Span, Any]]
"""The outputs of the layers, by micro-batch."""
_NOTHING = nullcontext()
_log = logging.getLogger(__name__)
GENERATORS_KEY: Place = ("generators",)
"""The key under which a message contains the states of the module's generators."""
_N_COPIED_INPUTS = 16
"""The number of runs of the first layers in which inputs that were made in inference mode are copied."""


class _Shapes(NamedTuple):
    """Describes how the shape of a tensor depends on the number of samples.

    Attributes:
        is_constant: whether its shape is the same for one sample.
        has_other_axis: whether its samples are on an axis other than 0.
    """

    is_constant: bool = False
    has_other_axis: bool = False


class _InputWatch:
    """The input of the first layers before they run, for the detection of in-place changes.

    Torch does not count the changes of tensors that were made in inference mode, so these are copied.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._before = [t.clone() if t.is_inference() else t._version for t in tensors]

    def find_changes(self, x: Any) -> dict[int, torch.Tensor]:
        """Return the tensors of the input that have changed, by their numbers."""
        return {
            number: t
            for number, (t, before) in enumerate(zip(tensors_in(x), self._before, strict=True))
            if (not torch.equal(t, before) if isinstance(before, torch.Tensor) else t._version != before)
        }


def input_of_layers(received: Any) -> Any:
    """Return the input of a stage's layers, taken from the output of the previous stage."""
    return received.out if isinstance(received, ChangedInput) else received


def run_stage(stage: Stage, item: Item, span: Span, received: Any) -> Any:
    """Return the output of a stage's layers, together with the in-place changes of the input by the first stage."""
    is_captured = stage.number == 0  # the user's step makes it again in each run
    out = stage.run_layers(item, span, input_of_layers(received), is_made_again=is_captured)
    return received._replace(out=out) if isinstance(received, ChangedInput) else out


class LayerSteps(UserSteps):
    """Runs the user's steps around the pipelined module, for which `interceptor` is a placeholder.

    Args:
        module: the user's module.
        precision: the precision plugin.
        interceptor: the placeholder of the pipelined module.
        plan: specifies the stages of this rank, and whether they recompute.
        rank: the position of this rank in the pipeline.
        seed: the seed of the random numbers of the steps.
        device: the device of this rank.
        state: the state of the module around its layers.
        left: the values that layers leave for the code after them.
    """

    runs_whole_evaluation = False

    def __init__(
        self,
        module: pl.LightningModule,
        precision: Precision,
        interceptor: Interceptor,
        plan: Plan,
        rank: int,
        seed: int,
        device: torch.device,
        state: ModuleState,
        left: LeftValues,
    ) -> None:
        changes = WeightChangeCheck(module, left.container, left.layers)
        super().__init__(module, precision, plan, seed, device, state, changes)
        self.left = left
        self._interceptor = interceptor
        self._both_ends = {0, plan.n_stages - 1} <= set(plan.stages[rank])
        self._has_others = len(set(plan.ranks)) > 2
        runs_again = [again[0] for again in (plan.recompute, plan.whole_forward) if again]
        self._recomputes_first = self._both_ends and any(runs_again)
        self._unsampled: dict[tuple[int, bool, tuple[int, ...]], list[int]] = {}
        self._shapes: dict[tuple[str, str], list[_Shapes]] = {}
        self._changes_input, self._input_looks = False, 0

    def stage_body(self, number: int) -> Body:
        """Return the function that stage `number` runs for each micro-batch."""
        if number == self._stages - 1:
            return self._run_last_stage
        return self._run_middle_stage if number else self._run_first_stage

    def expect_overlap(self, schedule: str) -> None:
        """Prepare a warning of layers that count micro-batches, because batches overlap."""
        self.left.expect_overlap(schedule)

    def begin_batch(self, training: bool = True) -> None:
        """Record the current state of the module and its layers as the state with which each micro-batch begins."""
        super().begin_batch(training)
        self.left.begin_batch(training)

    def discard_batch(self) -> None:
        super().discard_batch()
        self.left.discard_batch()

    def collect_changes(self) -> tuple[Any, ...]:
        """Merge the changes of the module and its layers in the batch, and return them for `apply_changes`."""
        self.left.end_batch()
        return (*super().collect_changes(), self.left.collect_changes())

    def apply_changes(self, changes: tuple[Any, ...] | None) -> None:
        """End the batch with the changes of the last stage, or with None if this rank has the last stage."""
        super().apply_changes(changes)
        if changes is not None:
            self._apply_layer_changes(changes[-1])

    def _run_first_stage(self, stage: Stage, item: Item, span: Span, received: Any) -> Any:
        """Run the user's step for one micro-batch until it calls the layers, then run the layers of this stage."""
        data = item.data
        if isinstance(data, EvaluationBatch):
            with data.context(), self.state.generators.microbatch(item.number, span):
                self._continue_capture(data, span)
                try:
                    return self._run_and_pack(stage, item, span, _samples(data, span, item.rows))
                except Exception as error:
                    self._blame_cut(error, item, span, lambda x, rows: stage.run_layers(item, Span(0, rows), x))
                    raise
        last_run = not (stage.runs_again or self._both_ends)  # the last stage may run after the second run
        self.state.restore_state()
        generators, watch = self.state.generators, self._weight_changes.watch(stage)
        with self.step_context(), data.in_initial_state, generators.microbatch(item.number, span), watch:
            stage.seed_user_code(item, span, BEFORE_LAYERS)
            part = data.select_samples(span)
            step = named_step(self._module, "training_step")
            with recorded(self._module):  # the last stage logs
                try:
                    x = self._interceptor.capture(step, part if last_run else copy_batch(part), *data.arguments)
                except Exception as error:
                    run = partial(self._interceptor.capture, step)
                    self._blame_cut(error, item, span, lambda batch, rows: run(batch, *data.arguments))
                    raise
            self._weight_changes.check_step(span, item.rows, self._why_once(stage))
            if data.stage_inputs is not None:
                data.keep_stage_input(stage.number, span, x)
            try:
                return self._run_and_pack(stage, item, span, x)
            except Exception as error:
                self._blame_cut(error, item, span, partial(self._run_layers_again, stage, item, step))
                raise

    def _why_once(self, stage: Stage) -> str:
        """Return the reason why a change of weights before the layers would differ from one process, if it would."""
        if stage.runs_again or stage.recomputing or self._both_ends:
            return "" if self._stages == 1 else "One process makes this change once, and this rank would make it twice"
        return "Processes between the first stage and the last do not run this code" if self._has_others else ""

    def _run_middle_stage(self, stage: Stage, item: Item, span: Span, received: Any) -> Any:
        """Run the layers of this stage for one micro-batch."""
        data = item.data
        is_evaluation = isinstance(data, EvaluationBatch)
        context = data.context if is_evaluation else self.step_context
        watch: AbstractContextManager[Any] = _NOTHING if is_evaluation else self._weight_changes.watch(stage)
        if isinstance(data, TrainingBatch) and data.stage_inputs is not None:
            data.keep_stage_input(stage.number, span, input_of_layers(unpack_message(received)[0]))
        self.state.restore_state()
        with context(), self.state.generators.microbatch(item.number, span), watch:
            return self._run_and_pack(stage, item, span, received)

    def _run_last_stage(self, stage: Stage, item: Item, span: Span, received: Any) -> Any:
        """Run the user's whole step for one micro-batch. Its call of the layers returns the output of this stage."""
        data = item.data
        if isinstance(data, EvaluationBatch):
            x = _samples(data, span, item.rows) if stage.number == 0 else received
            if not data.is_repeated:
                self.state.restore_state()
            with data.context(), self.state.generators.microbatch(item.number, span):
                if stage.number == 0:
                    self._continue_capture(data, span)
                out, data.left[span] = self._run_layers(stage, item, span, x)
                if not span.start:
                    data.generators = self.state.generators.read_changes()
                self.left.forget_lists(data.left[span])
                self.left.take_back()
                return out

        if data.weights is not None:
            data.weights.join_replicas()
            if data.weights.undecided and data.kept is None:
                data.keep_copy()
        y: Any = None
        failed_inside = False

        def answer(x: Any) -> Any:
            nonlocal y, failed_inside
            self._weight_changes.check_step(span, item.rows, self._why_once(stage))
            entering = x if stage.number == 0 else received
            if data.stage_inputs is not None:
                data.keep_stage_input(stage.number, span, input_of_layers(unpack_message(entering)[0]))
            failed_inside = True
            y, left = self._run_layers(stage, item, span, entering)
            if left and span.rows < item.rows:
                self.left.warn_of_overlap(left)
            failed_inside = False
            if data.kept is not None:
                data.kept.keep_microbatch(span, unpack_message(entering)[0], y)
                data.kept.left[span] = left
            stage.seed_user_code(item, span, AFTER_LAYERS)
            return y

        self.state.restore_state()
        generators, watch = self.state.generators, self._weight_changes.watch(stage)
        with self.step_context(), data.in_initial_state, generators.microbatch(item.number, span), watch:
            stage.seed_user_code(item, span, BEFORE_LAYERS)
            part = data.select_samples(span)
            if self._recomputes_first:
                part = copy_batch(part)
            with recorded(self._module) as logged, self.state.watch.watch_step(cut=span.rows < item.rows):
                step, apart = named_step(self._module, "training_step"), stage.number > 0
                try:
                    out = self._interceptor.run_with_answer(step, answer, part, *data.arguments, apart=apart)
                except Exception as error:
                    if not failed_inside:
                        self._blame_cut(error, item, span, partial(self._run_again, step, item, span, y))
                    raise
            alone = "" if self._stages == 1 else "Only the last stage runs the code after the layers"
            self._weight_changes.check_step(span, item.rows, alone)
        self.left.end_step(span)
        self.state.note_microbatch(span)
        return self.scale_loss(item, span, out, logged, tensors_in(y), partial(self._compare_candidates, stage, item))

    def begin_call(self, changes: Any = None) -> None:
        """Begin a further call of the layers by an evaluation step.

        The layers start with the values that the last call left.

        Args:
            changes: the changes of these values on the last stage, or None if this rank has the last stage.
        """
        if changes is not None:
            self._apply_layer_changes(changes)
        self.left.begin_batch(training=False)

    def _apply_layer_changes(self, changes: Any) -> None:
        self.left.end_batch()
        self.left.apply_changes(changes, self._device)

    def _run_layers(self, stage: Stage, item: Item, span: Span, entering: Any) -> tuple[Any, dict[Any, Any]]:
        """Return the output of the layers of a stage, and the values that these and earlier layers have left."""
        x, earlier, sharing = unpack_message(entering)
        self.state.generators.set_states(earlier.pop(GENERATORS_KEY, {}))
        if earlier:
            self.left.put_values(earlier)
        versions = [tensor._version for tensor in sharing]
        values = self.left.watch_layers(stage.layers, stage.recomputing)
        watch = self._watch_input(x) if stage.number == 0 and self._stages > 1 else None
        out = run_stage(stage, item, span, x)
        overlaps = stage.weights.max_versions > 1
        self._weight_changes.check(
            f"The forward of a layer on stage {stage.number}",
            lambda *_: explain_repetition(stage, item, span, overlaps),
        )
        if watch is not None:
            changed = watch.find_changes(x)
            self._changes_input = self._changes_input or bool(changed)
            out = ChangedInput(out, changed) if changed else out
        left = self.left.collect_values(values, span, stage.written_buffers)
        if sharing:
            check_unchanged(stage.number, sharing, versions)
        return out, join_values(earlier, left) if earlier else left

    def _watch_input(self, x: Any) -> _InputWatch | None:
        """Record the input of the first layers before they run.

        The result is None if previous runs have shown that the layers do not change it.
        """
        self._input_looks += 1
        known = self._changes_input or self._input_looks <= _N_COPIED_INPUTS
        tensors = tensors_in(x)
        return _InputWatch(tensors) if known or not any(t.is_inference() for t in tensors) else None

    def _run_and_pack(self, stage: Stage, item: Item, span: Span, entering: Any) -> Any:
        """Return the message that a stage before the last one sends to the next stage."""
        out, left = self._run_layers(stage, item, span, entering)
        states = self.state.generators.read_changes()
        sent = pack_message(out, {**left, GENERATORS_KEY: states} if states else left)
        self.left.forget_lists(left)
        self.left.take_back()
        return sent if stage.recomputing else self._mark_unsampled(stage, item, span, entering, out, sent)

    def _mark_unsampled(self, stage: Stage, item: Item, span: Span, entering: Any, out: Any, sent: Any) -> Any:
        """Mark the tensors of a message that have no axis of samples, if a link may cut the message.

        A mask or a rotary table may by chance have as many entries as the micro-batch has samples. If several tensors
        have this length, the stage runs again with one sample less. Tensors that keep their shape have no axis of
        samples.
        """
        if not stage.cuts_differ:
            return sent
        tensors = tensors_in(input_of_layers(out))
        key = stage.number, item.training, tuple(t.ndim for t in tensors)
        if key not in self._unsampled:
            if span.rows == 1 or sum(t.shape[:1] == (span.rows,) for t in tensors) < 2:
                return sent
            others = self._run_with_fewer(stage, item, span, entering)
            if len(others) != len(tensors):
                others = []
            self._unsampled[key] = [
                at for at, (t, other) in enumerate(zip(tensors, others, strict=False)) if t.shape == other.shape
            ]
        return mark_unsampled(sent, {id(tensors[at]) for at in self._unsampled[key]})

    def _run_with_fewer(self, stage: Stage, item: Item, span: Span, entering: Any) -> list[torch.Tensor]:
        """Return the output tensors of a stage for a micro-batch without its last sample, or [] if this fails."""
        data, fewer = item.data, Span(span.start, span.stop - 1)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            holds_samples = tensor.shape[:1] == (span.rows,) and id(tensor) not in stage.unsampled_ids
            return (tensor[: fewer.rows] if holds_samples else tensor).clone()

        with torch.no_grad(), forked_rng(self._device), keep_unchanged(self._module, weights=False):
            for part in self._module.modules():  # an existing graph may need the values of buffers
                part._buffers.update({name: b if b is None else b.clone() for name, b in part._buffers.items()})
            try:
                if stage.number:
                    x = trees.map_tensors(cut, input_of_layers(unpack_message(entering)[0]))
                elif isinstance(data, EvaluationBatch):
                    x = trees.map_tensors(torch.clone, _samples(data, fewer, item.rows))
                else:
                    step = named_step(self._module, "training_step")
                    with recorded(self._module):
                        x = self._interceptor.capture(step, copy_batch(data.select_samples(fewer)), *data.arguments)
                for layer in stage.layers.values():
                    x = layer(x)
            except Exception as error:  # the code needs more samples, so the number of entries decides
                _log.debug("Stage %d can't run %d samples: %s", stage.number, fewer.rows, error)
                return []
        return tensors_in(x)

    def _continue_capture(self, data: EvaluationBatch, span: Span) -> None:
        """Set the generators to their states after the code before the layers, which has run for the whole batch."""
        if not span.start:
            self.state.generators.set_states(data.generators)

    def keep_input(self, step: Callable[..., Any], item: Item, batch: Any, arguments: tuple[Any, ...]) -> None:
        """Keep the input that `step` passes to the pipelined module for a whole batch, and how it can be cut.

        An axis of a tensor, in particular of a mask, may by chance have as many entries as the batch has samples. If
        this is possible, the step also runs with one sample. Tensors that keep their shape belong to all samples.
        Tensors that only keep the length of axis 0 have their samples on another axis.
        """
        data: EvaluationBatch = item.data
        data.x = self._capture_whole_input(step, item, copy_batch(batch) if self._both_ends else batch, arguments)
        data.generators = self.state.generators.last
        leaves, spec = trees.flatten(data.x)
        lengths = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor) and item.rows in leaf.shape]
        if item.rows == 1 or (len(lengths) < 2 and all(shape[0] == item.rows for shape in lengths)):
            return
        key = step.__name__, str(spec)
        if key not in self._shapes:
            one = copy_batch(take_samples(batch, Span(0, 1), item.rows))
            try:
                others, other_spec = trees.flatten(self._capture_whole_input(step, item, one, arguments))
            except Exception:  # the step needs more samples, so the number of entries decides
                others, other_spec = [], None
            same = other_spec == spec
            self._shapes[key] = [
                _Shapes(a.shape == b.shape, a.shape != b.shape and a.shape[:1] == b.shape[:1])
                if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
                else _Shapes()
                for a, b in zip(leaves, others if same else [None] * len(leaves), strict=True)
            ]
        data.shared_ids = frozenset(
            id(t) for t, found in zip(leaves, self._shapes[key], strict=True) if found.is_constant
        )
        data.has_other_axis = any(found.has_other_axis for found in self._shapes[key])

    def _capture_whole_input(self, step: Callable[..., Any], item: Item, batch: Any, arguments: tuple[Any, ...]) -> Any:
        self.state.restore_state()
        with (
            forked_rng(self._device),
            recorded(self._module) as calls,  # the last stage logs
            self.state.generators.microbatch(item.number, Span(0, item.rows)),
        ):
            self._seed_user_code(item, BEFORE_LAYERS)
            try:
                return self._interceptor.capture(step, batch, *arguments)
            except NoCallError as end:
                end.calls = calls
                raise

    def run_without_layers(self, step: Callable[..., Any], item: Item, batch: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the result of a `step` that does not call the pipelined module."""
        self.state.restore_state()
        with forked_rng(self._device), self.state.generators.microbatch(item.number, Span(0, item.rows)):
            self._seed_user_code(item, BEFORE_LAYERS)
            return self._interceptor.run_without(step, batch, *arguments)

    def capture_input(
        self, step: Callable[..., Any], item: Item, batch: Any, arguments: tuple[Any, ...], draws: RngUse
    ) -> Any:
        """Return the input that `step` passes to the pipelined module.

        `draws` records whether the step draws random numbers.
        """
        self.state.restore_state()
        with (
            forked_rng(self._device),
            recorded(self._module),
            item.data.in_initial_state,
            self.state.generators.microbatch(item.number, Span(0, item.rows)),
        ):
            self._seed_user_code(item, BEFORE_LAYERS)
            draws.start()
            x = self._interceptor.capture(step, batch, *arguments)
            self._end_draws(draws)
            return x

    def finish(
        self,
        step: Callable[..., Any],
        item: Item,
        batch: Any,
        arguments: tuple[Any, ...],
        outputs: Outputs,
        call_again: Callable[[Any, Any, States], tuple[Item, Outputs]],
    ) -> Any:
        """Return the result of `step` for a whole batch, for which the layers have returned `outputs`.

        Args:
            step: the user's step.
            item: the batch.
            batch: the samples of the batch.
            arguments: the arguments of the step after the batch.
            outputs: the outputs of the layers, by micro-batch.
            call_again: runs the layers of all stages for a further call of the pipelined module. Its arguments are the
                input, the changes of left values for the other stages, and the states of the module's generators.
        """

        def join_outputs(item: Item, outputs: Outputs) -> Any:
            y = join([y for _, y in outputs], [span for span, _ in outputs], "the output of the pipelined module")
            self.left.put_values(self.left.merge_values(item.data.left))
            self.state.generators.set_states(item.data.generators)
            return y

        def answer_later(x: Any) -> Any:
            self.left.end_step(Span(0, item.rows), whole=True)
            self.left.end_batch()
            return join_outputs(*call_again(x, self.left.collect_changes(), self.state.generators.read_changes()))

        layers = partial(join_outputs, item, outputs)
        out = self.run_around_layers(step, item, batch, arguments, layers, answer_later=answer_later)
        self.left.end_step(Span(0, item.rows), whole=True)
        self.state.note_microbatch(Span(0, item.rows))
        return out

    def run_around_layers(
        self,
        step: Callable[..., Any],
        item: Item,
        batch: Any,
        arguments: tuple[Any, ...],
        layers: Callable[[], Any],
        draws: RngUse | None = None,
        answer_later: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return the result of `step` for a whole batch, in which the pipelined module returns `layers()`.

        Args:
            step: the user's step.
            item: the batch.
            batch: the samples of the batch.
            arguments: the arguments of the step after the batch.
            layers: returns the output of the pipelined module.
            draws: records whether the code around the layers draws random numbers.
            answer_later: returns the result of each further call of the pipelined module. None rejects such calls.
        """

        def seed(layer: int) -> None:
            self._seed_user_code(item, layer)
            if draws is not None:
                draws.start()

        def answer(x: Any) -> Any:
            if draws is not None:
                draws.stop()
            y = layers()
            seed(AFTER_LAYERS)
            return y

        self.state.restore_state()
        with forked_rng(self._device), self.state.generators.microbatch(item.number, Span(0, item.rows)):
            seed(BEFORE_LAYERS)
            out = self._interceptor.run_with_answer(
                step, answer, batch, *arguments, apart=True, answer_later=answer_later
            )
            if draws is not None:
                self._end_draws(draws)
        return out

    def _end_draws(self, draws: RngUse) -> None:
        """Record in `draws` whether a step has drawn random numbers, also from the module's own generators."""
        draws.stop()
        draws.was_used = draws.was_used or bool(self.state.generators.read_changes())

    @staticmethod
    def _compare_candidates(stage: Stage, item: Item) -> None:
        """Compare the candidates for the weights of micro-batches once a micro-batch has run."""
        if item.data.weights.undecided and item.data.compare_candidates is not None:
            item.data.compare_candidates(stage, item)

    def _run_again(self, step: Callable[..., Any], item: Item, span: Span, y: Any, batch: Any, rows: int) -> None:
        """Run a step with copies of one micro-batch's layer output, as many as the samples require."""
        copies = [Span(start, start + span.rows) for start in range(0, rows, span.rows)]
        given = take_samples(join([y] * len(copies), copies, "what layers return"), Span(0, rows), copies[-1].stop)
        self._interceptor.run_with_answer(step, lambda x: given, batch, *item.data.arguments)

    def _run_layers_again(self, stage: Stage, item: Item, step: Callable[..., Any], batch: Any, rows: int) -> None:
        """Run a step up to the layers, and the layers of the first stage."""
        stage.run_layers(item, Span(0, rows), self._interceptor.capture(step, batch, *item.data.arguments))

    def _blame_cut(self, error: Exception, item: Item, span: Span, run: Callable[[Any, int], object]) -> None:
        """Raise PipelineError if a step has failed because its batch is cut.

        Args:
            error: the error of the step.
            item: the batch.
            span: the samples of the micro-batch.
            run: runs the step with the given batch and number of samples. The cut is the cause if this fails with the
                samples of the micro-batch, and does not fail with all samples.
        """
        data = item.data
        if isinstance(error, PipelineError) or span.rows == item.rows:
            return
        self._blame_states(error, item, span)
        if isinstance(data, EvaluationBatch):
            name, batch, samples = getattr(data.step, "__name__", "a step"), data.x, frozenset[Path]()
            part = _samples(data, span, item.rows)
        else:
            name, batch, samples = "training_step", data.batch, data.samples
            part = take_samples(batch, span, item.rows, samples=samples)
        try:
            run(copy_batch(batch), item.rows)
        except Exception:
            return
        with suppress(Exception):
            run(copy_batch(part), span.rows)
            return
        cut = "" if name != "training_step" else ", ".join(where for where, _ in sample_tensors(batch, item.rows))
        of = "the batch" if name == "training_step" else "the inputs of the layers"
        raise PipelineError(
            f"{name} runs with all {item.rows} samples of a batch, but not with {span.rows} of them, as in a "
            f"micro-batch ({type(error).__name__}: {error}). Tensors and lists of {of} with {item.rows} entries are "
            f"cut{cut and f': {cut}'}. A table that has this length by chance, such as the weights of classes, should "
            "be a buffer of the module or have an additional leading axis. A step that needs all samples, for example "
            "because graphs are merged into one graph whose edges refer to nodes by number, needs "
            "PipelineStrategy(microbatches=1)"
        ) from error


def _samples(data: EvaluationBatch, span: Span, rows: int) -> Any:
    part = trees.close_objects(take_samples(trees.open_objects(data.x), span, rows, data.shared_ids))
    shapes = [tuple(t.shape) for t in tensors_in(data.x)]
    if span.rows != rows and shapes and shapes == [tuple(t.shape) for t in tensors_in(part)]:
        raise PipelineError(
            f"the pipelined module gets shapes {', '.join(map(str, shapes))} for {rows} samples; axis 0 of a tensor "
            "must count samples, or the batch can't be cut into micro-batches"
        )
    return part
