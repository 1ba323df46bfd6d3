"""Runs the user's steps, divided into the parts that each stage runs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins import Precision
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipes.engine import trees
from lightning_pipes.engine.compute.rng import (
    AFTER_LAYERS,
    BEFORE_LAYERS,
    RngUse,
    forked_rng,
    seed_for_layer,
    stream_seed,
)
from lightning_pipes.engine.compute.spans import Item, mark_unsampled
from lightning_pipes.engine.compute.stage import Body, Stage
from lightning_pipes.engine.compute.weights import WeightVersion
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import PipelineError, Plan, Span
from lightning_pipes.trainer.cuts.layers.capture import ChangedInput, Interceptor, NoCallError, named_step
from lightning_pipes.trainer.cuts.layers.left_values import (
    LeftValues,
    Place,
    check_unchanged,
    join_values,
    pack_message,
    unpack_message,
)
from lightning_pipes.trainer.data.batches import Path, copy_batch, join, make_cutter, move_batch, take_samples
from lightning_pipes.trainer.results.generators import States
from lightning_pipes.trainer.results.logs import (
    LogCall,
    LogKey,
    merge,
    merge_returned,
    number_calls,
    recorded,
    returned_calls,
)
from lightning_pipes.trainer.results.loss_weights import BatchWeights, sample_tensors
from lightning_pipes.trainer.results.module_entries import find_kept_tensors
from lightning_pipes.trainer.results.module_state import BatchState, ModuleState
from lightning_pipes.trainer.results.weight_changes import WeightChangeCheck, explain_repetition
from lightning_pipes.trainer.user.unchanged import keep_unchanged

Context = Callable[[], AbstractContextManager[Any]]
Outputs = Sequence[tuple[Span, Any]]
"""The outputs of the layers, by micro-batch."""
_NOTHING = nullcontext()
_log = logging.getLogger(__name__)
GENERATORS: Place = ("generators",)
"""The key under which a message contains the states of the module's generators."""
_INPUT_LOOKS = 16
"""The number of runs of the first layers in which inputs that were made in inference mode are copied."""
HOST = torch.device("cpu")


@dataclass
class BatchCopy:
    """A copy of a batch on the host, with values of the last stage for each micro-batch.

    Attributes:
        batch: the copy of the batch.
        rows: the number of samples of the batch.
        parts: for each micro-batch, the output of the layers of the last stage, or their input if `inside`.
        left: for each micro-batch, the values that layers have left for the code after them.
        inside: whether `parts` holds inputs, because the output, such as a loss, has no axis of samples.
        axis: the axis of samples in the output of the layers. In `parts`, it is moved to the front.
        left_out: the reason why nothing is kept. Empty if values are kept.
    """

    batch: Any
    rows: int
    parts: dict[Span, Any] = field(default_factory=dict)
    left: dict[Span, dict[Any, Any]] = field(default_factory=dict)
    inside: bool = False
    axis: int = 0
    left_out: str = ""

    def keep_microbatch(self, span: Span, received: Any, output: Any) -> None:
        """Copy the received values or the output of one micro-batch."""
        if self.left_out:
            return
        trained = [t for t in tensors_in(output) if t.requires_grad]  # a mask without samples is not a loss
        axes = range(self.axis, min((t.ndim for t in trained), default=1))
        axis = next((a for a in axes if all(t.size(a) == span.rows for t in trained)), None)
        if self.parts and axis != self.axis and not self.inside:
            self.left_out = "micro-batches leave the layers in other forms"
            return
        self.inside, self.axis = axis is None, axis or 0
        part = received if self.inside else output
        needed = sum(t.nbytes for t in tensors_in(part)) * self.rows // span.rows
        self.left_out = why_no_room(needed)
        if self.left_out:
            self.parts.clear()
            return
        self.parts[span] = trees.map_tensors(lambda t: self._with_samples_first(t.detach()), part)

    def layer_outputs(self, part: Any) -> Any:
        """Return an entry of `parts` in the form in which it left the layers."""
        if not self.axis:
            return part
        return trees.map_tensors(
            lambda t: t.movedim(0, self.axis) if t.is_floating_point() and t.ndim > self.axis else t, part
        )

    def _with_samples_first(self, tensor: torch.Tensor) -> torch.Tensor:
        moved = self.axis and tensor.is_floating_point() and tensor.ndim > self.axis
        return (tensor.movedim(self.axis, 0) if moved else tensor).to(HOST, copy=True)


def why_no_room(needed: int, device: torch.device = HOST) -> str:
    """Return the reason why a device, or the host, has no room for `needed` bytes, or an empty text if it has."""
    available = psutil.virtual_memory().available
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        available = torch.cuda.mem_get_info(device)[0] + unused
    if needed <= available // 4:
        return ""
    return f"the whole batch takes about {needed / 2**30:.1f} GiB at once, and {available / 2**30:.1f} GiB are free"


@dataclass
class StepResult:
    """The result of the user's training step for one micro-batch. The loss is None if the step skips the batch."""

    loss: torch.Tensor | None
    extras: dict[str, Any]
    logged: Sequence[LogCall]

    @property
    def log_calls(self) -> list[LogCall]:
        """The log calls of the step, and of the values that it returned in addition to the loss."""
        return [*self.logged, *returned_calls(self.extras)] if self.extras else [*self.logged]

    def logged_losses(self) -> list[LogKey]:
        """Return the keys of the logged values that are the loss itself."""
        assert self.loss is not None, "a batch that is skipped has no weights"
        own = self.loss.untyped_storage().data_ptr()
        tensors = [(key, call.value) for key, call in number_calls(self.logged) if isinstance(call.value, torch.Tensor)]
        return [key for key, value in tensors if value.untyped_storage().data_ptr() == own]


@dataclass
class TrainingBatch:
    """The samples of a training batch, with the inputs and results of the user's step for each micro-batch.

    The steps of the stages only use this class. The training loop uses its subclass `TrainingStep`.

    Attributes:
        batch: the batch.
        rows: the number of samples of the batch.
        arguments: the arguments of training_step after the batch.
        divisor: the number of batches of one optimizer step, by which the loss is divided.
        results: the result of each micro-batch, on the ranks of the last stage.
        kept: a copy of the batch and of the last stage's values for checks, or None.
        samples: the paths of lists for which an earlier batch has shown that they have an entry for each sample.
        complete: whether an optimizer step may follow. False in the middle of gradient accumulation.
        initial_state: the state of the module at the start of the batch, if hooks may change it before the steps.
        stage_inputs: the inputs of the layers by stage and micro-batch, on the host. None if no check needs them.
        loaded_copy: the batch as it was loaded, for the check of `stage_inputs`.
        weights: the weight of each micro-batch on the last stage, or None to weight by the number of samples.
        compare_candidates: called after the first micro-batch, to find the weights among the candidates.
    """

    batch: Any
    rows: int
    arguments: tuple[Any, ...]
    divisor: int
    results: dict[Span, StepResult] = field(default_factory=dict)
    kept: BatchCopy | None = None
    samples: frozenset[Path] = frozenset()
    complete: bool = True
    initial_state: BatchState | None = None
    stage_inputs: dict[int, dict[Span, Any]] | None = None
    loaded_copy: Any = None
    weights: BatchWeights | None = None
    compare_candidates: Callable[[Stage, Item], None] | None = None
    _parts: dict[Span, Any] = field(default_factory=dict)  # each part is used once, because a step may change it

    @property
    def in_initial_state(self) -> AbstractContextManager[None]:
        """The context in which the steps find the state from the start of the batch."""
        return _NOTHING if self.initial_state is None else self.initial_state.restore_entries()

    def cut(self, spans: Iterable[Span]) -> None:
        """Select the samples of the spans in advance, for `select_samples`."""
        self._parts.update({span: self._cutter(span) for span in spans})

    def keep_copy(self) -> None:
        """Keep a copy of the batch for a check of the whole batch."""
        self.kept = BatchCopy(move_batch(copy_batch(self.batch), HOST), self.rows)

    def select_samples(self, span: Span) -> Any:
        """Return the samples `span` of the batch."""
        return self._parts.pop(span) if span in self._parts else self._cutter(span)

    def keep_stage_input(self, stage: int, span: Span, x: Any) -> None:
        """Keep a copy of the input of a stage's layers if a check needs it."""
        if self.stage_inputs is not None and span not in self.stage_inputs.setdefault(stage, {}):
            copy = trees.map_tensors(lambda t: t.detach().to("cpu", copy=True), x)
            self.stage_inputs[stage][span] = copy

    @cached_property
    def _cutter(self) -> Callable[[Span], Any]:
        return make_cutter(self.batch, self.rows, samples=self.samples)

    def result(self) -> tuple[Any, list[LogCall]]:
        """Return the loss of the whole batch, in a dict if the user's step returns a dict, and its log calls.

        Raises:
            PipelineError: the step skips some of the micro-batches.
        """
        spans = sorted(self.results)
        results = [self.results[s] for s in spans]
        losses = [o.loss for o in results if o.loss is not None]
        if not losses:
            return None, merge([o.logged for o in results], [s.rows for s in spans])
        if len(losses) < len(results):
            raise PipelineError(
                "training_step returned None for some micro-batches of a batch, and a loss for others; one process "
                "skips a whole batch or none. Set PipelineStrategy(microbatches=1)"
            )
        shares, of_logs = [s.rows / self.rows for s in spans], dict[LogKey, list[float]]()
        if self.weights is not None:
            shares = [self.weights.loss_share(s) for s in spans]
            of_logs = self.weights.shares_of_logs(spans, [o.log_calls for o in results], results[0].logged_losses())
        # The loss of a micro-batch without tokens may be NaN.
        parts = [loss * share for share, loss in zip(shares, losses, strict=True) if share]
        loss = sum(parts[1:], start=parts[0]) if len(spans) > 1 else losses[0]
        logged = merge([o.logged for o in results], [s.rows for s in spans], of_logs)
        if not results[0].extras:
            return loss, logged
        joined_lists = () if self.weights is None else self.weights.joined_lists
        return {"loss": loss, **merge_returned([o.extras for o in results], spans, of_logs, joined_lists)}, logged


@dataclass
class EvaluationBatch:
    """The input of the layers that the first stage captured from the user's step, for the whole batch.

    Attributes:
        context: returns the context of the step.
        step: the user's step, which takes `batch` and `arguments`.
        batch: the batch.
        arguments: the arguments of the step after the batch.
        x: the captured input.
        shared_ids: the ids of the tensors of `x` that belong to all samples, regardless of their number of entries.
        has_other_axis: whether a tensor of `x` has its samples on an axis other than 0, so that `x` cannot be cut.
        is_repeated: whether this is a further call of the layers by a running step.
        left: on the last stage, the values that layers have left for the code after them, by micro-batch.
        generators: the states of the module's generators after the code before the layers. On the last stage, the
            states after the layers.
    """

    context: Context
    step: Callable[..., Any] | None = None
    batch: Any = None
    arguments: tuple[Any, ...] = ()
    x: Any = None
    shared_ids: frozenset[int] = frozenset()
    has_other_axis: bool = False
    is_repeated: bool = False
    left: dict[Span, dict[Any, Any]] = field(default_factory=dict)
    generators: States = field(default_factory=dict)


@dataclass
class WholeBatch(EvaluationBatch):
    """A second run of a training batch, to compare the values that its step leaves in the module, logs and returns.

    Attributes:
        rows: the number of samples of the batch.
        samples: the paths of lists that have an entry for each sample.
        leaves_values: whether the values that this run leaves in the module count as the values of the whole batch.
            False if it runs in evaluation mode.
        failure: the reason why the step could not finish, on the last stage. Empty if it did.
        results: the results of the step, on the last stage.
    """

    rows: int = 0
    samples: frozenset[Path] = frozenset()
    leaves_values: bool = True
    failure: str = ""
    results: dict[Span, StepResult] = field(default_factory=dict)

    def select_samples(self, span: Span) -> Any:
        """Return the samples `span` of the batch."""
        return self.batch if span.rows == self.rows else take_samples(self.batch, span, self.rows, samples=self.samples)


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


class UserSteps(ABC):
    """Runs the user's `*_step` methods on the stages of this rank.

    Subclasses differ in how the module is cut. If this rank runs a step several times with the same samples, all runs
    except for the last one get copies of them. A step may modify its batch in place, and each run must find the batch
    as it was loaded.

    Args:
        module: the user's module.
        precision: the precision plugin.
        plan: specifies the stages of this rank, and whether they recompute.
        seed: the seed of the random numbers of the steps.
        device: the device of this rank.
        state: the state of the module around its layers.
        weight_changes: detects changes of weights by the steps.
    """

    runs_whole_evaluation: ClassVar[bool]
    """Whether each stage runs its part of a whole evaluation step. Otherwise, the step runs around the layers."""
    ends_whole = False
    """Whether the loss is computed once for all samples of a batch."""
    may_skip_batches = False
    """Whether a training step may return None, so that Lightning skips the batch."""
    stream_units: Any = None
    """The `StreamUnits` whose random streams the step uses, or None if random streams belong to layers."""
    joint: Any = None
    """Runs steps with manual optimization on all stages together; see `JointStep`."""
    show_version: Callable[[WeightVersion], AbstractContextManager[None]] | None = None
    """See `Stage`."""

    def __init__(
        self,
        module: pl.LightningModule,
        precision: Precision,
        plan: Plan,
        seed: int,
        device: torch.device,
        state: ModuleState,
        weight_changes: WeightChangeCheck,
    ) -> None:
        self._module = module
        self.state = state
        self._precision = precision
        self._stages = plan.n_stages
        self._weight_changes = weight_changes
        self._train = _NOTHING if _surrounds_nothing(precision) else None
        self._seed = seed
        self._device = device

    @abstractmethod
    def stage_body(self, number: int) -> Body:
        """Return the function that stage `number` runs for each micro-batch."""

    @abstractmethod
    def expect_overlap(self, schedule: str) -> None:
        """Prepare for batches that overlap.

        Args:
            schedule: the name of the schedule, for warnings.
        """

    def around_batch(self) -> AbstractContextManager[Any]:
        """Return the context in which the stages of this rank run the micro-batches of a batch."""
        return _NOTHING

    def step_context(self) -> AbstractContextManager[Any]:
        """Return the context of training steps."""
        return self._train or self._precision.train_step_context()

    def autocast_types(self) -> set[torch.dtype]:
        """Return the type to which autocast converts values in training steps, or an empty set without autocast."""
        kind = self._device.type
        with self.step_context():
            return {torch.get_autocast_dtype(kind)} if torch.is_autocast_enabled(kind) else set()

    def begin_batch(self, training: bool = True) -> None:
        """Record the current state of the module as the state with which each micro-batch begins."""
        self.state.begin_batch()

    def discard_batch(self) -> None:
        """End a batch without the changes of its state, which the caller reverts."""
        self.state.discard_batch()

    def collect_changes(self) -> tuple[Any, ...]:
        """Merge the changes of the state in the batch on the last stage, and return them for `apply_changes`."""
        return self.state.merge_microbatches(), self.state.generators.end_batch()

    def apply_changes(self, changes: tuple[Any, ...] | None) -> None:
        """End the batch with the state changes of the last stage, or with None if this rank has the last stage."""
        if changes is None:
            self.state.apply_changes()
            return
        of_state, of_generators, *_ = changes
        self.state.apply_changes(of_state)
        self.state.generators.set_states(of_generators)

    def prepare_last_stage(self, stage: Stage, item: Item, spans: Collection[Span]) -> None:
        """Prepare the micro-batches of the last stage before the first one arrives.

        The same work takes ten times as long between layers, whose data fills the caches.
        """
        stage.prepare_user_seeds(item, spans)
        item.data.cut(spans)

    def scale_loss(
        self,
        item: Item,
        span: Span,
        out: Any,
        logged: list[LogCall],
        leaving: Iterable[torch.Tensor],
        compare_candidates: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Keep the result of a training step, and return its loss with the weight that it has in the loss of the batch.

        Args:
            item: the batch.
            span: the samples of the micro-batch.
            out: the return value of the step.
            logged: the log calls of the step.
            leaving: tensors from which a loss of zero is computed if the micro-batch does not count.
            compare_candidates: called before the weight of the micro-batch is used.
        """
        data = item.data
        if out is None and self.may_skip_batches:  # backward then has no graph to run, on any stage
            data.results[span] = StepResult(None, {}, logged)
            return torch.zeros((), device=self._device)
        loss, extras = loss_of(out)
        data.results[span] = StepResult(loss.detach(), extras, logged)
        factor = span.rows / item.rows
        if data.weights is not None:
            compare_candidates()
            factor = data.weights.gradient_factor(span)
        scaled = loss * (factor / data.divisor) if factor else _no_loss(leaving)
        scaler = getattr(self._precision, "scaler", None)
        return scaled if scaler is None else scaler.scale(scaled)

    def _blame_states(self, error: Exception, item: Item, span: Span) -> None:
        """Raise PipelineError if a training step has failed with a part of a batch because of states that are not cut.

        Such states are tensors in attributes of modules that have an axis as long as the batch, such as recurrent
        states.
        """
        names = find_kept_tensors(self._module, item.rows)
        if isinstance(error, PipelineError) or span.rows == item.rows or not (item.training and names):
            return
        raise PipelineError(
            f"training_step failed with {span.rows} of the {item.rows} samples of a batch ({type(error).__name__}: "
            f"{error}). {', '.join(names)}, which an earlier step has set, has an axis of {item.rows} entries, and "
            "every micro-batch reads all of them. States that belong to samples, such as the states of recurrent "
            "layers, need PipelineStrategy(microbatches=1)"
        ) from error

    def _seed_user_code(self, item: Item, layer: int) -> None:
        seed = stream_seed(self._seed, item.job, layer, item.number, Span(0, item.rows))
        seed_for_layer(layer, seed, self._device)


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
        last_run = stage.recomputing if stage.recompute else not self._both_ends
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
        if stage.recompute or self._both_ends:
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
            with recorded(self._module) as logged, self.state.watch_step(cut=span.rows < item.rows):
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
        self.state.generators.set_states(earlier.pop(GENERATORS, {}))
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
        known = self._changes_input or self._input_looks <= _INPUT_LOOKS
        tensors = tensors_in(x)
        return _InputWatch(tensors) if known or not any(t.is_inference() for t in tensors) else None

    def _run_and_pack(self, stage: Stage, item: Item, span: Span, entering: Any) -> Any:
        """Return the message that a stage before the last one sends to the next stage."""
        out, left = self._run_layers(stage, item, span, entering)
        states = self.state.generators.read_changes()
        sent = pack_message(out, {**left, GENERATORS: states} if states else left)
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


def _surrounds_nothing(precision: Precision) -> bool:
    """Return whether training steps need no context. The empty contexts of Lightning's base class take time."""
    own = (
        getattr(precision.train_step_context, "__func__", None),
        getattr(precision.forward_context, "__func__", None),
    )
    return own == (Precision.train_step_context, Precision.forward_context)


def loss_of(out: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the loss, and the other values, from the return value of a training step.

    Raises:
        PipelineError: there is no loss, it is not a scalar, or it cannot be differentiated.
        MisconfigurationException: the return value is neither a tensor nor contains a loss, as in Lightning.
    """
    extras = {key: value for key, value in out.items() if key != "loss"} if isinstance(out, Mapping) else {}
    loss = out.get("loss") if isinstance(out, Mapping) else out
    if out is not None and not isinstance(loss, torch.Tensor):
        ClosureResult.from_training_step_output(out)
    if loss is None:
        raise PipelineError(
            "training_step returned no loss: every stage waits for the gradient of every batch, so a batch can't be "
            "skipped. Return the loss, or zero times it to leave the weights as they are. A module that is cut by "
            "units can skip batches: PipelineStrategy(module='') with one pipeline, and a schedule that flushes"
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"type {type(loss).__name__}"
        raise PipelineError(
            f"training_step returned a loss of {what}; it must be a tensor with one element (grad can be implicitly "
            "created only for scalar outputs)"
        )
    if loss.is_meta:
        raise PipelineError(
            "the loss depends on weights of layers that live on another rank; only the call of the pipelined module "
            "may use them"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise PipelineError(
            "training_step returned a loss that nothing can be trained by: it has no gradient (requires_grad is "
            "False). Compute it outside of torch.no_grad(), do not detach() it, and leave some parameters unfrozen "
            "(element 0 of tensors does not require grad and does not have a grad_fn)"
        )
    if extras:
        extras = apply_to_collection(extras, torch.Tensor, lambda t: t.detach())
    return loss.reshape(()) if loss.ndim else loss, extras


def _no_loss(leaving: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a loss of zero, computed from the outputs of the layers.

    The loss of a micro-batch without tokens cannot be used, because it may be NaN with NaN gradients.
    """
    trained = [t for t in leaving if t.requires_grad]
    return torch.stack([t.reshape(-1)[:0].sum() for t in trained]).sum()


def _samples(data: EvaluationBatch, span: Span, rows: int) -> Any:
    part = trees.close_objects(take_samples(trees.open_objects(data.x), span, rows, data.shared_ids))
    shapes = [tuple(t.shape) for t in tensors_in(data.x)]
    if span.rows != rows and shapes and shapes == [tuple(t.shape) for t in tensors_in(part)]:
        raise PipelineError(
            f"the pipelined module gets shapes {', '.join(map(str, shapes))} for {rows} samples; axis 0 of a tensor "
            "must count samples, or the batch can't be cut into micro-batches"
        )
    return part
