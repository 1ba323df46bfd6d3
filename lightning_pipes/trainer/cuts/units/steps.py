"""The user's steps on the stages of a module that is cut by units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_pipes.engine.compute.rng import BEFORE_LAYERS, forked_rng
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Body, Stage
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import PipelineError, Plan, Span
from lightning_pipes.trainer.cuts.layers.capture import named_step
from lightning_pipes.trainer.cuts.steps import EvaluationBatch, StepResult, UserSteps, WholeBatch, loss_of
from lightning_pipes.trainer.cuts.units.batch_end import BatchEnd, DeferredLoss
from lightning_pipes.trainer.cuts.units.cut import UnitCut
from lightning_pipes.trainer.cuts.units.joint_step import JointStep
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from lightning_pipes.trainer.cuts.units.lazy_step import Crossing, EarlierStageError, LazyStep, explain_change
from lightning_pipes.trainer.cuts.units.rows import CrossingRows
from lightning_pipes.trainer.cuts.units.trace import Trace
from lightning_pipes.trainer.cuts.units.whole_step import StreamUnits
from lightning_pipes.trainer.data.batches import copy_batch
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.results.logs import LogCall, recorded
from lightning_pipes.trainer.results.metric_states import MetricStates
from lightning_pipes.trainer.results.module_state import ModuleState
from lightning_pipes.trainer.results.weight_changes import WeightChangeCheck, explain_repetition


class UnitSteps(UserSteps):
    """Runs the user's steps on every stage. Each stage skips the units of the other stages.

    Random numbers do not depend on the borders, because a stage continues with the random state of the previous one.

    Args:
        module: the user's module.
        precision: the precision plugin of the Trainer.
        plan: the plan of the run.
        rank: the rank of this process in the plan.
        seed: the seed of the random streams.
        device: the device of this rank.
        state: the state that the step leaves in the module.
        cut: the module, cut by units.
        layout: the parts of the step.
        end: the end of the step that runs once on the whole batch, on the last stage; None if each micro-batch has a
            loss.
        crossing_rows: cuts and joins the values between stages; None if all stages and links cut a batch alike.
        make_joint: creates an object that runs a step on all stages together, with the present placement of weights.
        holdings: specifies the parts of the layout that each stage has.
    """

    runs_whole_evaluation = True
    joint: JointStep | None = None

    def __init__(
        self,
        module: pl.LightningModule,
        precision: Precision,
        plan: Plan,
        rank: int,
        seed: int,
        device: torch.device,
        state: ModuleState,
        cut: UnitCut,
        layout: UnitLayout,
        end: BatchEnd | None,
        crossing_rows: CrossingRows | None,
        make_joint: Callable[[], JointStep],
        holdings: Holdings,
    ) -> None:
        super().__init__(module, precision, plan, seed, device, state, WeightChangeCheck(module))
        self._overlaps = False
        """Whether other batches are in flight while a batch runs."""
        self._cut = cut
        own = plan.stages[rank]
        self._final = max(own)
        self._metric_states = MetricStates(module)
        run_again = any(each[s] for each in (plan.recompute, plan.whole_forward) if each for s in own)
        self._is_last_run_known = len(own) == 1 or not run_again
        """Whether a schedule can't change which run of the step is the last one of this rank on a micro-batch."""
        self.show_version = cut.show_version
        self._layout, self._holdings = layout, holdings
        self._end, self.ends_whole = end, end is not None
        starts = tuple(layout.starts[parts.start] for parts in holdings.layers) if crossing_rows is not None else (0,)
        self.stream_units = StreamUnits.from_layout(layout, starts, None if end is None else end.border)
        self._lazy: dict[tuple[int, int, bool], LazyStep] = {}
        self._crossing_rows = crossing_rows
        self._make_joint = make_joint
        self._waiting: dict[Item, dict[Span, tuple[Crossing, list[torch.Tensor | None]]]] = {}

    def around_batch(self) -> AbstractContextManager[Any]:
        return self._cut.show_weights()

    def expect_overlap(self, schedule: str) -> None:
        self._overlaps = True

    def discard_batch(self) -> None:
        super().discard_batch()
        self._waiting.clear()
        self._metric_states.discard_runs()

    def stage_body(self, number: int) -> Body:
        return self._run_stage

    def _run_stage(self, stage: Stage, item: Item, span: Span, received: Any) -> Any:
        data = item.data
        if isinstance(data, EvaluationBatch):
            return self._evaluate_stage(stage, item, span, received)
        last = stage.number == self._stages - 1
        if last and data.weights is not None:
            data.weights.join_replicas()
        if received is not None and self._crossing_rows is not None:
            received = self._crossing_rows.enter(received, span.rows, stage.number - 1)
        elif received is not None and received[1].rows != span.rows:
            raise PipelineError(
                f"Stage {stage.number} has micro-batches of {span.rows} samples, and the stage before it of "
                f"{received[1].rows}. When training began, all stages cut a batch equally, so the axes of samples in "
                f"the values between the stages of {type(self._module).__name__} are unknown. Begin training with "
                "the plan that cuts a batch differently, or adopt a plan that cuts it equally everywhere"
            )
        self.state.restore_state()
        with self.step_context(), data.in_initial_state:
            stage.seed_user_code(item, span, BEFORE_LAYERS)
            part, step = data.select_samples(span), named_step(self._module, "training_step")
            if not self._is_last_run(stage) or (last and self._end is not None):
                part = copy_batch(part)  # this rank runs the step again, and the step may change its batch in place
            with (
                recorded(self._module) as logged,
                self._cut.show_weights(),
                self._cut.show_read_only(stage.read_only_ids),
                self._repeat_buffers(stage, item, span),
                self._metric_states.run(stage, item, span, stage.number == self._final and not (last and self._end)),
                self.state.generators.microbatch(item.number, span),
                self.state.watch.watch_step(cut=span.rows < item.rows),
                self._weight_changes.watch(stage),
            ):
                stage.check_layers(partial(self._called_modules, stage.number))
                try:
                    out = self._run_lazily(stage.number, stage, item, span, step, part, received)
                except Exception as error:
                    self._blame_states(error, item, span)
                    note_cut_tensors(error, data.batch, item.rows, span)
                    raise
                code = f"{type(self._module).__name__}.training_step, or the forward of a module in it,"
                self._weight_changes.check(code, partial(self._explain_change, self._explain_once(stage, item, span)))
            if last and self._end is not None:
                return self._defer_loss(self._end, stage, item, span, out)
        if not last:
            return out if self._crossing_rows is None else self._crossing_rows.leave(out, stage.number)
        self.state.note_microbatch(span)
        entered = () if received is None else received[0]
        weights = (p for layer in stage.layers.values() for p in layer.parameters())  # used only if no sample counts
        return self.scale_loss(item, span, out, logged, chain(entered, weights))

    def _is_last_run(self, stage: Stage) -> bool:
        """Return whether this rank certainly does not run the step again on the running micro-batch."""
        return self._is_last_run_known and stage.number == self._final and not stage.runs_again

    def _called_modules(self, number: int) -> dict[str, nn.Module]:
        """Return the modules that are units of a stage, by path."""
        layers, layout = self._holdings.layers[number], self._layout
        stop = layout.border_of(layers.stop - 1) if layout.names else 0
        units = {*layout.names[layout.starts[layers.start] : stop]}
        if layout.slices is not None:
            of_units = layout.slices.units.items()
            units |= {layout.slices.layers[n] for name, numbers in of_units if name in units for n in numbers}
        return {path: self._module.get_submodule(path) for path in layout.atomic if path in units}

    @contextmanager
    def _repeat_buffers(self, stage: Stage, item: Item, span: Span) -> Iterator[None]:
        """Make a recomputed forward read the buffers that the first forward read, and discard its changes to them.

        As a result, running statistics count each micro-batch once.
        """
        kept, with_keys = stage.buffers_before, [((item.number, span, n), n, part) for n, part in stage.layers.items()]
        with ExitStack() as stack:
            if stage.recomputing:
                for key, _, part in with_keys:
                    before = kept.take_kept(key)
                    copies = {name: before.get(name, buffer).clone() for name, buffer in part.named_buffers()}
                    stack.enter_context(self._cut.show_buffers(copies))
            elif stage.runs_again:
                for key, number, part in with_keys:
                    stack.enter_context(stage.keep_buffers(key, number, part))
            yield

    def _defer_loss(self, end: BatchEnd, stage: Stage, item: Item, span: Span, crossing: Crossing) -> torch.Tensor:
        """Return a placeholder for the loss of a micro-batch.

        After the last micro-batch, the end of the step runs.
        """
        waiting, gradients = self._waiting.setdefault(item, {}), list[torch.Tensor | None]()
        waiting[span] = crossing, gradients
        loss: torch.Tensor = DeferredLoss.apply(gradients, *crossing[0])  # type: ignore[no-untyped-call]
        if sum(each.rows for each in waiting) < item.rows:
            return loss
        del self._waiting[item]
        parts, whole = [waiting[each] for each in sorted(waiting)], Span(0, item.rows)
        crossings = [each for each, _ in parts]
        joined = end.join(crossings)
        self.state.restore_state()
        stage.seed_user_code(item, whole, BEFORE_LAYERS)
        batch, step = item.data.select_samples(whole), named_step(self._module, "training_step")
        generators = self.state.generators
        with (
            recorded(self._module) as logged,
            self._cut.show_weights(),
            self._metric_states.run(stage, item, whole, is_last=True),
            generators.microbatch(item.number, whole),
        ):
            out = self._run_lazily(stage.number + 1, stage, item, whole, step, batch, joined)
        self.state.note_microbatch(whole)
        scaled = self.scale_loss(item, whole, out, logged, joined[0])
        if scaled.requires_grad:
            torch.autograd.backward(scaled)
        for (_, of_part), found in zip(parts, end.split_gradients(joined, crossings), strict=True):
            of_part.extend(found)
        return loss

    def _evaluate_stage(self, stage: Stage, item: Item, span: Span, received: Any) -> Any:
        data, is_last = item.data, stage.number == self._stages - 1
        assert data.step is not None, "Evaluation has it"
        if isinstance(data, WholeBatch):
            return self._compare_stage(stage, item, span, received)
        if received is not None and received[1].failure:
            return (EarlierStageError(received[1].failure), []) if is_last else received
        self.state.restore_state()
        try:
            with recorded(self._module) as calls:
                out = self._evaluate_step(stage, item, span, received)
        except EarlierStageError as error:
            return (error, []) if is_last else ((), Trace(failure=str(error)))
        if not is_last:
            return out
        self.state.note_microbatch(span)
        return out, calls

    def _evaluate_step(self, stage: Stage, item: Item, span: Span, received: Any) -> Any:
        data = item.data
        with (
            data.context(),
            self._cut.show_weights(),
            self._metric_states.run(stage, item, span, stage.number == self._final),
            self.state.generators.microbatch(item.number, span),
        ):
            stage.seed_user_code(item, span, BEFORE_LAYERS)
            batch = data.select_samples(span) if isinstance(data, WholeBatch) else data.batch
            batch = copy_batch(batch) if stage.number < self._final or isinstance(data, WholeBatch) else batch
            return self._run_lazily(stage.number, stage, item, span, data.step, batch, received)

    def _compare_stage(self, stage: Stage, item: Item, span: Span, received: Any) -> Any:
        """Run a training batch again, and record the values that the step stores in the module, logs and returns.

        A failure is sent to the next stage and does not end the training.
        """
        data: WholeBatch = item.data
        failure, last = "" if received is None else received[1].failure, stage.number == self._stages - 1
        out = None
        if not failure:
            self.state.restore_state(everything=True)
            try:
                with recorded(self._module) as logged:
                    out = self._evaluate_step(stage, item, span, received)
                if last and out is not None:
                    data.results[span] = StepResult(*loss_of(out), logged)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        if not last:
            return ((), Trace(failure=failure)) if failure else out
        data.failure = data.failure or failure
        if not failure and data.leaves_values:
            draws = self._lazy[self._key(stage.number, item)].n_draws or self.state.generators.last
            self.state.note_whole_batch(is_exact=not draws)
        return None

    def evaluate_jointly(self, item: Item, calls: list[LogCall]) -> tuple[Any, Any]:
        """Run a step on all stages together.

        Args:
            item: the batch in the engine.
            calls: a list that the step fills with its log calls.

        Returns:
            The result of the step on every rank, and the mark of the last stage.
        """
        data = item.data
        if self.joint is not None:
            return self.joint.run_together(data.step, data.batch, data.arguments, calls, data.mark)
        with forked_rng(self._device):
            self._seed_user_code(item, BEFORE_LAYERS)
            return self._make_joint().run_together(data.step, data.batch, data.arguments, calls, data.mark)

    def _run_lazily(
        self, number: int, stage: Stage, item: Item, span: Span, step: Callable[..., Any], batch: Any, received: Any
    ) -> Any:
        key = self._key(number, item)
        if key not in self._lazy:
            layout = self._end.layout(self._layout) if self._end is not None and key[2] else self._layout
            is_cut_alike, is_end = self._crossing_rows is None, number == self._stages
            self._lazy[key] = LazyStep(
                self._module,
                layout,
                number,
                self._device,
                key[1],
                self.state.generators,
                sends_states=is_cut_alike and not (key[2] and number >= self._stages - 1),
                continues=is_cut_alike and not is_end,
            )
        seed = partial(stage.seed_user_code, item, span)
        why_once = self._explain_once(stage, item, span)
        return self._lazy[key].run(step, batch, item.data.arguments, received, seed, span.rows, why_once, stage)

    def _key(self, number: int, item: Item) -> tuple[int, int, bool]:
        """Return the key of a stage's step.

        It consists of the number of the stage, its last part, and whether the step ends with the whole batch.
        """
        layers = self._holdings.layers
        last = layers[number].stop - 1 if number < self._stages else layers[-1].stop
        return number, last, self._end is not None and item.training

    def _explain_once(self, stage: Stage, item: Item, span: Span) -> str:
        """Return why a change of weights by the step would differ from one process; empty if it would not."""
        return explain_repetition(stage, item, span, self._overlaps, self.ends_whole)

    def _explain_change(self, why_once: str, name: str, is_replaced: bool) -> str:
        """Return the reason why a change of this weight by the step differs from one process; empty if it does not."""
        if is_replaced:
            return "Other stages and checkpoints would keep the parameter that was there before"
        return explain_change(self._layout, name, why_once)


def note_cut_tensors(error: Exception, batch: Any, rows: int, span: Span) -> None:
    """Add to an error of a training step the tensors of its batch that were cut, which may be its cause.

    Args:
        error: the error.
        batch: the whole batch.
        rows: the number of samples of the batch.
        span: the samples with which the step ran.
    """
    if isinstance(error, PipelineError) or span.rows == rows:
        return
    shapes = ", ".join(str(tuple(t.shape)) for t in tensors_in(batch) if t.ndim and t.size(0) == rows)
    error.add_note(
        f"training_step ran with {span.rows} of the {rows} samples of a batch. Its tensors of shape {shapes} were cut "
        "along axis 0. If one of them does not have an entry for each sample, such as weights of classes, a table or "
        "the edges of graphs, it must not be cut: keep it in a buffer of the module, or set "
        "PipelineStrategy(microbatches=1)"
    )


def stage_modules(module: nn.Module, layout: UnitLayout) -> list[nn.Module]:
    """Return the modules within units that have weights or buffers. Their attributes belong to one stage."""
    owners = {name.rpartition(".")[0] for name in layout.parts_of}
    units = layout.modules(module).items()
    inside = [(f"{path}.{name}".rstrip("."), part) for path, whole in units for name, part in whole.named_modules()]
    return [part for path, part in inside if path in owners]
