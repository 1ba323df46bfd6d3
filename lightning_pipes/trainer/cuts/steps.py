"""Runs the user's steps, divided into the parts that each stage runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins import Precision
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipes.engine import trees
from lightning_pipes.engine.compute.rng import (
    seed_for_layer,
    stream_seed,
)
from lightning_pipes.engine.compute.spans import Item, locate_span
from lightning_pipes.engine.compute.stage import Body, Stage
from lightning_pipes.engine.compute.weights import WeightVersion
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import PipelineError, Plan, Span
from lightning_pipes.trainer.data.batches import Path, copy_batch, make_cutter, move_batch, take_samples
from lightning_pipes.trainer.data.token_cut import TokenCut
from lightning_pipes.trainer.results.batch_state import BatchState
from lightning_pipes.trainer.results.generators import States
from lightning_pipes.trainer.results.logs import (
    LogCall,
    LogKey,
    merge,
    merge_returned,
    number_calls,
    returned_calls,
)
from lightning_pipes.trainer.results.loss_weights import BatchWeights
from lightning_pipes.trainer.results.module_entries import find_kept_tensors
from lightning_pipes.trainer.results.module_state import ModuleState
from lightning_pipes.trainer.results.weight_changes import WeightChangeCheck

Context = Callable[[], AbstractContextManager[Any]]
_NOTHING = nullcontext()
HOST_DEVICE = torch.device("cpu")


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
        token_cut: the micro-batches of sequences that are sorted by length. In `parts`, they have their padding again.
    """

    batch: Any
    rows: int
    parts: dict[Span, Any] = field(default_factory=dict)
    left: dict[Span, dict[Any, Any]] = field(default_factory=dict)
    inside: bool = False
    axis: int = 0
    left_out: str = ""
    token_cut: TokenCut | None = None

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
        if self.token_cut is not None:
            if self.inside or self.axis:
                self.left_out = "its micro-batches have sequences of different lengths, and enter the loss otherwise"
                return
            part = self.token_cut.pad(part, span)
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
        return (tensor.movedim(self.axis, 0) if moved else tensor).to(HOST_DEVICE, copy=True)


def why_no_room(needed: int, device: torch.device = HOST_DEVICE) -> str:
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
        token_cut: the micro-batches, if sequences are sorted into them by length. `batch` then has the samples in the
            order of the micro-batches.
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
    token_cut: TokenCut | None = None
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
        copy = move_batch(copy_batch(self.batch), HOST_DEVICE)
        self.kept = BatchCopy(copy, self.rows, token_cut=self.token_cut)

    @property
    def own_spans(self) -> Mapping[Span, Span]:
        """The samples of each span of the plan, if they differ from the micro-batches of the plan; see `Item`."""
        return {} if self.token_cut is None else self.token_cut.spans

    def locate_spans(self, spans: Iterable[Span]) -> list[Span]:
        """Return the samples of this batch in spans of its plan, without spans that have no samples."""
        found = [locate_span(span, self.rows, self.own_spans) for span in spans]
        return [span for span in found if span.rows]

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
        if self.token_cut is not None:
            return self.token_cut.make_cutter(self.batch, self.samples)
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
        merged = merge_returned([o.extras for o in results], spans, of_logs, joined_lists)
        return {"loss": loss, **(merged if self.token_cut is None else self.token_cut.restore_order(merged))}, logged


@dataclass
class EvaluationBatch:
    """A batch of evaluation, with the captured input of the layers if the module is cut in layers.

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
        if data.token_cut is not None:
            extras = data.token_cut.pad(extras, span)
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
            "training_step returned no loss. A batch can't be skipped in this way, because every stage waits for the "
            "gradient of every batch. Return the loss, or 0 * loss, whose gradients are zero. A module that is cut by "
            "units can skip batches, with PipelineStrategy(module=''), one pipeline, and a schedule that flushes"
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
