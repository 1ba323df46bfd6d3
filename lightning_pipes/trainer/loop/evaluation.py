"""Evaluation of batches: a forward through the pipeline, embedded in the user's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.cuts.layers.capture import NoCallError
from lightning_pipes.trainer.cuts.layers.steps import LayerSteps, Outputs
from lightning_pipes.trainer.cuts.steps import Context
from lightning_pipes.trainer.cuts.units.lazy_step import EarlierStageError
from lightning_pipes.trainer.data.batches import copy_batch, rows_of
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.watcher import EvaluationStep
from lightning_pipes.trainer.results.generators import States
from lightning_pipes.trainer.results.logs import LogCall, merge, recorded


class EvaluatedStep(NamedTuple):
    """How an evaluation step uses the layers, as observed in its first batch.

    Attributes:
        with_layers: whether the step calls the layers.
        whole: whether batches go through the layers in one piece, because samples are not on axis 0 of all tensors.
    """

    with_layers: bool
    whole: bool


class _FurtherCall(NamedTuple):
    """A message from the last stage that the step calls the layers again, as a step that generates text does.

    Attributes:
        x: the input of the layers.
        changes: the changes of values that layers keep, since the previous call.
        generators: the states of the module's own random generators.
    """

    x: Any
    changes: Any
    generators: States


class Evaluation:
    """Evaluate batches in a run. Collective: all ranks create one and make the same calls."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._steps: dict[tuple[Any, ...], EvaluatedStep] = {}
        """How each of the user's steps uses the layers, by the key of `_key_of`."""
        self._joint_steps: set[tuple[Any, ...]] = set()
        """The keys of steps that run on all stages together, because they return to earlier stages."""
        self._unit_steps: set[tuple[Any, ...]] = set()
        """The keys of steps that have run by units."""
        self._trained, self._count = -1, 0

    def evaluate(self, step: Callable[..., Any], context: Context, batch: Any, arguments: tuple[Any, ...]) -> Any:
        """Evaluate one batch with the user's `step`, and return its result on every rank.

        The step runs once, on the whole batch.

        Args:
            step: the user's step.
            context: returns the context in which Lightning calls the step.
            batch: the batch.
            arguments: the arguments of the step after the batch.
        """
        run, data = self._run, self._begin(step, context, batch, arguments)
        watchers = run.watchers.of_evaluation
        watchers.before_batch(data)
        item = Item(self._number(), data.rows, data, training=False, use=run.training_loop.layer_use(batch))
        if run.user_steps.joint is not None or _key_of(step, item, arguments) in self._joint_steps:
            return self._evaluate_jointly(item)
        run.user_steps.begin_batch(training=False)
        with watchers.around_batch(data), run.local_layers.gathered.evaluation():
            message = self._forward(step, item, batch, arguments)
        if message is None:
            return self._repeat_jointly(item)
        out, changes, logged, data.last_mark = message
        run.user_steps.apply_changes(None if run.is_last_rank else changes)
        watchers.after_batch(data)
        with context():
            run.replay.replay_calls(logged)
        return move_data_to_device(out, run.device)

    @property
    def _layer_steps(self) -> LayerSteps:
        """The steps of a module that is cut by layers."""
        steps = self._run.user_steps
        assert isinstance(steps, LayerSteps)
        return steps

    def _evaluate_jointly(self, item: Item) -> Any:
        """Evaluate one batch on all stages together."""
        run, data = self._run, item.data
        around, weights = run.watchers.of_evaluation.around_batch(data), run.cut.scope.module_view(True)
        with around, data.context(), recorded(run.cut.module) as calls, weights:
            steps: Any = run.user_steps  # of a module that is cut by units
            out, data.last_mark = steps.evaluate_jointly(item, calls)
        run.watchers.of_evaluation.after_batch(data)
        with data.context():
            run.replay.replay_calls(calls if run.trainer.state.fn != TrainerFn.PREDICTING else [])
        return move_data_to_device(out, run.device)

    def _repeat_jointly(self, item: Item) -> Any:
        """Evaluate a batch again on all stages together. Later batches of its step and loader also run this way."""
        self._run.user_steps.apply_changes(([], {}))  # restores the state at the start of the batch
        self._joint_steps.add(_key_of(item.data.step, item, item.data.arguments))
        rank_zero_info(
            f"{item.data.name} returns to modules of earlier stages after modules of later stages, as decoding does. "
            "Its batches therefore run on one stage at a time, while the other stages wait"
        )
        return self._evaluate_jointly(item)

    def _begin(
        self, step: Callable[..., Any], context: Context, batch: Any, arguments: tuple[Any, ...]
    ) -> EvaluationStep:
        trained = self._run.trainer.fit_loop.total_batch_idx
        if trained != self._trained:
            self._trained, self._count = trained, 0
        batch_idx = arguments[0] if arguments else 0
        return EvaluationStep(
            context,
            step,
            batch,
            arguments,
            rows=rows_of(batch, self._run.plans.microbatches > 1),
            name=step.__name__,
            batch_idx=batch_idx,
            first=not self._count,
        )

    def _number(self) -> int:
        """Return a number that differs from batch to batch, but is the same after a resume at the same place."""
        self._count += 1
        return (self._trained + 1 << 20) + self._count

    def _forward(self, step: Callable[..., Any], item: Item, batch: Any, arguments: tuple[Any, ...]) -> Any:
        """Run the step, and return the message of the last stage on every rank.

        The result is None if the step returns to earlier stages, and therefore has to run on all of them together.
        """
        run, data = self._run, item.data
        if run.user_steps.runs_whole_evaluation:
            key = _key_of(step, item, arguments)
            before = batch if key in self._unit_steps else copy_batch(batch)  # the step may modify its batch
            self._unit_steps.add(key)
            ended = run.engine.evaluate(item, 1)
            data.batch = before  # kept for a second run
            if not run.is_last_rank:
                return self._receive(item)
            out, calls = ended[0][1]
            if isinstance(out, EarlierStageError):
                return run.control.broadcast(None, run.last_rank)
            return self._send(out, calls, item)
        end = self._capture(step, item, batch, arguments)
        with_layers, whole = self._steps[_key_of(step, item, arguments)]
        outputs = run.engine.evaluate(item, 1 if whole else None) if with_layers else ()
        if not run.is_last_rank:
            return self._receive(item)
        with data.context(), recorded(run.cut.module) as calls:
            if end is not None:  # the step has already run to its end on this rank
                out, calls = end.out, end.calls
            elif with_layers:
                out = self._layer_steps.finish(step, item, batch, arguments, outputs, partial(self._call_again, item))
            else:
                out = self._layer_steps.run_without_layers(step, item, batch, arguments)
        if end is not None or not with_layers:
            run.state.note_microbatch(Span(0, item.rows))
        return self._send(out, calls, item)

    def _send(self, out: Any, calls: list[LogCall], item: Item) -> Any:
        """Send the message of the last stage to the other ranks, and return it.

        It consists of the result, the changes of the module's state, the logs, and the checksums of the batch.
        """
        run = self._run
        logs = run.trainer.state.fn != TrainerFn.PREDICTING
        packed = run.replay.pack_calls(merge([calls], [item.rows])) if logs else []
        message = out, run.user_steps.collect_changes(), packed, item.data.mark
        run.control.broadcast(message, run.last_rank)
        return message

    def _receive(self, item: Item) -> Any:
        """Return the message of the last stage. Before it arrives, run the layers for each further call of the step."""
        run = self._run
        while isinstance(message := run.control.broadcast(None, run.last_rank), _FurtherCall):
            self._layer_steps.begin_call(message.changes)
            self._evaluate_again(item, move_data_to_device(message.x, run.device), message.generators)
        return message

    def _call_again(self, item: Item, x: Any, changes: Any, generators: States) -> tuple[Item, Outputs]:
        """Run the layers of all stages for a further call by the step on this rank, and return their outputs."""
        run = self._run
        run.control.broadcast(_FurtherCall(x, changes, generators), run.last_rank)
        self._layer_steps.begin_call()
        return self._evaluate_again(item, x, generators)

    def _evaluate_again(self, item: Item, x: Any, generators: States) -> tuple[Item, Outputs]:
        """Run the layers of this rank on `x` in one micro-batch, because the number of samples may have changed."""
        data = replace(item.data, x=x, is_repeated=True, left={}, generators=generators)
        item = replace(item, number=self._number(), data=data)
        return item, self._run.engine.evaluate(item, 1)

    def _capture(
        self, step: Callable[..., Any], item: Item, batch: Any, arguments: tuple[Any, ...]
    ) -> NoCallError | None:
        """Capture the input of the layers in an evaluation step, on the first stage.

        In the first batch, all ranks learn two facts about the step. If the step does not call the layers, it runs
        unchanged on the last stage. If its samples are not on axis 0 of all tensors, batches go through the layers in
        one piece.

        Returns:
            The result of a step that ended without calling the layers, so that it does not have to run again, or None.

        Raises:
            PipelineError: samples are not on axis 0 in this batch, but were on axis 0 in the first one.
        """
        run, key, data, end = self._run, _key_of(step, item, arguments), item.data, None
        known = self._steps.get(key)
        if run.is_first_rank and (known is None or known.with_layers):
            try:
                with data.context():
                    self._layer_steps.keep_input(step, item, batch, arguments)
            except NoCallError as error:
                if known is not None:
                    raise
                end = error
        if known is None:
            first_rank = run.global_ranks[run.engine.plan.ranks[0]]
            found = EvaluatedStep(*run.control.broadcast((end is None, data.has_other_axis), first_rank))
            self._steps[key] = found
            if found.whole:
                rank_zero_info(
                    f"{step.__name__} gives the layers tensors whose samples are not on axis 0: batches of evaluation "
                    "go through them whole, in one micro-batch"
                )
        elif data.has_other_axis and not known.whole:
            raise PipelineError(
                f"{step.__name__} gives the layers tensors whose samples are not on axis 0 in this batch, and did not "
                "in the first one; give them tensors with samples on axis 0, or take microbatches=1"
            )
        return end


def _key_of(step: Callable[..., Any], item: Item, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of a step: its name, the number of its loader, and whether the batch has a single sample.

    Batches of a single sample have separate keys, because they do not need to be cut.
    """
    return step.__name__, *arguments[1:2], item.rows == 1
