"""One run of a Trainer method: the cut module, its engine, and the batches that go through the pipeline."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import NOTHING_SHARED, Body, RankResources, Stage
from lightning_pipes.engine.compute.weights import Change
from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.messages.transport import make_transport
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.ir import Kind, LayerUse, PipelineError, Plan, Policy, Program, Span
from lightning_pipes.planning.planner import BLOCKING
from lightning_pipes.trainer.cuts.layers.tape import TapedLayer
from lightning_pipes.trainer.cuts.steps import StepResult, UserSteps
from lightning_pipes.trainer.data.batches import SampleLists
from lightning_pipes.trainer.data.length_cost import LengthCost
from lightning_pipes.trainer.data.token_cut import TokenCutter
from lightning_pipes.trainer.loop.connections import Connections
from lightning_pipes.trainer.loop.step_statistics import StepStatistics
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watchers
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.relocation.local_layers import LocalLayers
from lightning_pipes.trainer.relocation.relocation import LayerRelocation
from lightning_pipes.trainer.reports.report import MAX_REPORTED_WINDOWS, Window
from lightning_pipes.trainer.reports.stage_bytes import SavedBytes, StageBytes
from lightning_pipes.trainer.results.logs import LogReplay, MetricState
from lightning_pipes.trainer.results.loss_weights import LossWeights, Sums

_log = logging.getLogger(__name__)


class TrainingLoop(ABC):
    """The part of a run that differs between schedules that flush and schedules that do not.

    All methods are collective.

    Attributes:
        is_asynchronous: whether batches overlap, so that stages step at different times.
        resources: what the stages and the engine share.
    """

    is_asynchronous: ClassVar[bool] = False
    resources: RankResources = NOTHING_SHARED

    def predict_changes(self, item: Item) -> Change | None:
        """Return a function that predicts the updates of parameters for a batch, if the schedule predicts weights."""
        return None

    @abstractmethod
    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        """Run the forward and backward of one batch, and log the values of the user's step.

        Args:
            batch: the batch.
            arguments: the arguments of training_step after the batch.
            optimizers: the optimizers of this rank.
            complete: whether an optimizer step may follow, so that gradients are summed over all ranks that hold a
                parameter.

        Returns:
            The result of the user's step with its loss, on every rank.
        """

    @abstractmethod
    def drain(self) -> None:
        """Finish the work that `train` has deferred."""

    @abstractmethod
    def make_agreement(self, stops: StopAgreement) -> Callable[[], None]:
        """Return a function with which ranks agree on a stop after a batch."""

    @abstractmethod
    def batch_complete(self, stage: Stage, item: Item) -> None:
        """Handle the completion of a batch's gradients on a stage of this rank."""

    @abstractmethod
    def give_back_gradients(self) -> None:
        """Put the gradients where the optimizers expect them."""

    def pause_step(self) -> AbstractContextManager[None]:
        """Run the block, which steps an optimizer, at the same place of the user's step on all stages."""
        return nullcontext()

    def resume_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a version of the user's `closure` that can run while the step is paused."""
        return closure

    def own_gradients(self) -> AbstractContextManager[None]:
        """Give parameters their accumulated gradients inside the block."""
        return nullcontext()

    def why_no_state(self, parameter: torch.Tensor | None) -> str:
        """Return the reason why hooks cannot read the optimizer state of a parameter, or of all parameters for None.

        The reason is empty if hooks can read it.
        """
        return ""

    def layer_use(self, batch: Any) -> LayerUse | None:
        """Return the layers that an evaluated batch needs on the device, or None to leave the layers as they are."""
        return None

    def close(self) -> None:  # noqa: B027  # most loops hold no resources
        """Release resources at the end of the run."""


class StageListener:
    """Observes a run on its rank. If batches overlap, ranks may be at different batches."""

    def before_inject(self, item: Item) -> None:
        """Handle a training batch that is about to be added to the window."""

    def before_forward(self, stage: Stage, item: Item, span: Span) -> None:
        """Handle a micro-batch that is about to go forward through a stage."""

    def after_forward(self, stage: Stage, item: Item, span: Span) -> None:
        """Handle a micro-batch that has gone forward through a stage."""

    def before_first_forward(self, stage: Stage, item: Item) -> None:
        """Handle a training batch before its first forward on a stage."""

    def before_repetition(self) -> None:
        """Handle the beginning of another run of the latest batch, which leaves no trace."""

    def before_optimizer_step(self, stage: Stage, item: Item) -> None:
        """Handle a batch that is about to step its layers on a stage."""

    def after_optimizer_step(self, stage: Stage, item: Item) -> None:
        """Handle a batch that has stepped its layers on a stage."""

    def after_result(self, number: int, batch: Any, out: Any) -> None:
        """Handle the result of batch `number`, which is now available on this rank. Called in the order of batches.

        Args:
            number: the number of the batch since the beginning of training.
            batch: the batch.
            out: the value that the user's step returned.
        """


class PipelineRun:
    """Run batches through the pipeline, from `setup` to `teardown` of the strategy.

    Collective: all ranks create a run and make the same calls of it in the same order.

    Args:
        trainer: the trainer whose `fit`, `validate`, `test` or `predict` this run executes.
        ranks: the ranks of the job, and the collectives between them.
        connections: the connections to the other ranks.
        local_layers: the layers and parameters of this rank.
        plans: determines how batches are cut and ordered.
        user_steps: runs the user's steps.
        seed: the seed of the random streams of the layers.
        transport: the name of the transport of messages, as in `make_transport`.
        check_loss: whether to determine in the first batches how losses of micro-batches are weighted.
        make_training_loop: creates the training loop. Called before the stages and the engine are created.
        relocation: how layers move during training.
        ruled_out: weightings of the micro-batches that are known not to give the loss of the batch, or None if none
            were compared.
        length_cost: the cost of sequences by their lengths, if they are sorted into micro-batches of equal cost.
        must_sort: whether a batch whose sequences can't be sorted is an error.

    Attributes:
        windows: the last windows of batches.
        local_layers: the layers of this rank, with their optimizers.
        user_steps: runs the user's code around the layers.
        is_last_rank: whether this is the first rank of the last stage, which returns results.
        last_rank: the global rank of the first rank of the last stage.
        is_first_rank: whether this is the first rank of stage 0.
        took: nanoseconds of the first batches on this rank.
        listeners: objects that are called at the steps of each stage; see `StageListener`.
        statistics: the statistics of the last batches, for planners.
        relocation: moves layers between ranks.
        training_loop: trains the batches.
        decision: the decision that the first steps led to, or None while they confirm the decision of the run.
        watchers: checks, statistics and safeguards around the step. They are set after the run is created.
        loss_weights: weights the losses of micro-batches, on ranks of the last stage.
        awaits_batch: whether an optimizer is about to step by a batch that has not begun.
        padding_text: advice on the padding in the first batches. Empty if there is none.

    Raises:
        PlanError: the transport is not available here.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        ranks: Ranks,
        connections: Connections,
        local_layers: LocalLayers,
        plans: Plans,
        user_steps: UserSteps,
        seed: int,
        transport: str,
        check_loss: bool,
        make_training_loop: Callable[[PipelineRun], TrainingLoop],
        relocation: str = BLOCKING,
        ruled_out: Collection[str] | None = None,
        length_cost: LengthCost | None = None,
        must_sort: bool = True,
    ) -> None:
        self.local_layers = local_layers
        self.cut = cut = local_layers.cut
        self.plans = plans
        self.user_steps = user_steps
        self.state = user_steps.state
        self.global_ranks = global_ranks = tuple(local_layers.holdings.global_ranks)
        self.windows: deque[Window] = deque(maxlen=MAX_REPORTED_WINDOWS)
        self.took: list[int] = []
        self.listeners: list[StageListener] = []
        self.statistics = StepStatistics(ranks)
        self.awaits_batch = False
        self.padding_text = ""
        self.replay = LogReplay(cut.module)
        self.is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.trainer = trainer
        self.connections = connections
        self.control = control = ranks.pipeline
        self.device = device = ranks.device
        self.saved_bytes = SavedBytes()
        self.lists = SampleLists()
        rank = self._rank = local_layers.holdings.rank
        plan, order = plans.for_rows(plans.trial_rows)
        self.token_cutter = None
        if length_cost is not None:
            self.token_cutter = TokenCutter(plan.n_stages, plans.least_rows, length_cost, must_sort)
        self.last_rank = global_ranks[plan.ranks[-1]]
        self.is_first_rank = plan.ranks[0] == rank
        self.is_last_rank = plan.ranks[-1] == rank
        self.has_last_stage = rank in plan.ranks_of_stages[-1]
        self.last_stage_ranks = tuple(global_ranks[r] for r in plan.ranks_of_stages[-1])
        if len(self.last_stage_ranks) > 1:
            user_steps.state.watch.refuse_changes(
                f"the last stage has {len(self.last_stage_ranks)} ranks, each with its own samples. Give it one, as in "
                "data_parallel=[2, 1], or log the values instead"
            )
        self.relocation = LayerRelocation(trainer, local_layers, ranks.control, relocation, plans)
        self.watchers = Watchers()
        self.decision: Decision | None = None
        self._seed = seed
        self.training_loop = make_training_loop(self)
        self.relocation.is_asynchronous = self.training_loop.is_asynchronous
        self.stages = self._make_stages(plan)
        self.loss_weights = None
        if self.is_fitting and LossWeights.are_needed(cut.module, check_loss or ruled_out is not None):
            sums = (
                self._sums_over_replicas(ranks) if local_layers.replica_averages is None else None
            )  # otherwise, each replica weights its own batch
            if self.has_last_stage:
                replicas = ranks.grid.replicas if sums is not None else 1
                self.loss_weights = LossWeights(cut.module, check_loss, sums, replicas)
                self.loss_weights.ruled_out.update(ruled_out or ())
        make = partial(make_transport, plan, rank, global_ranks, device, control.watch, transport)
        connect = partial(control.watch.call, make)
        self.engine = Engine(
            plan,
            order,
            list(self.stages.values()),
            connections.open_transport(connect),
            rank=rank,
            device=device,
            watch=connections.engine_watch,
            turns=connections.turns,
            resources=self.training_loop.resources,
        )
        user_steps.may_skip_batches = (
            user_steps.runs_whole_evaluation and not self.is_asynchronous and ranks.grid.replicas == 1
        )
        fault_point("transport.made")

    @contextmanager
    def expect_batch(self) -> Iterator[None]:
        """Let an optimizer step in the block by the batch that is trained in the block, if batches overlap.

        Raises:
            PipelineError: no batch was trained in the block.
        """
        self.awaits_batch = True
        try:
            yield
            if self.awaits_batch:
                raise PipelineError(
                    f"{type(self.cut.module).__name__} calls optimizer.step() without a batch of its own. With "
                    f"schedule {self.plans.schedule.name!r} each stage steps once for a batch, as soon as its "
                    "gradients are complete there, so a second step can't be taken. Call "
                    "optimizer.step(closure=optimizer_closure) once for every batch, or use a schedule that flushes "
                    "between batches, such as '1f1b'"
                )
        finally:
            self.awaits_batch = False

    def finish_batches(self) -> None:
        """Finish the batches in flight. Collective."""
        with self.cut.scope.suspend_hooks():  # a hook may save a checkpoint
            self.training_loop.drain()

    def drain(self) -> None:
        """Finish the batches in flight, and bring weights up to date. Collective."""
        with self.cut.scope.suspend_hooks():
            self.finish_batches()
            if self.relocation.may_defer_steps:
                self.finish_move()

    def finish_move(self, number: int | None = None) -> None:
        """Wait until the layers that are moving have arrived, and continue with the plans for which they moved.

        Collective.

        Args:
            number: the number of the next batch. By default, it is the batch after the Trainer's current one.
        """
        moving = self.relocation
        if not moving.is_moving:
            return
        self.finish_batches()
        moving.stop_sending()
        with self.training_loop.own_gradients():  # accumulated gradients move with their layers
            plans = moving.finish_move()
            self.switch_plan(*plans.for_rows(self.engine.plan.jobs[0].rows))
        moving.record_end(self.trainer.fit_loop.total_batch_idx + 1 if number is None else number)

    def make_agreement(self, stops: StopAgreement) -> Callable[[], None]:
        """Return a function with which ranks agree on a stop. Layers that are moving arrive before the end."""
        agree = self.training_loop.make_agreement(stops)

        def then_finish() -> None:
            agree()
            if self.trainer.should_stop or stops.terminated:
                self.finish_move()

        return then_finish

    @property
    def is_asynchronous(self) -> bool:
        """Whether batches overlap, so that stages step at different times."""
        return self.training_loop.is_asynchronous

    def list_parameters(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Return the parameters that a hook may add to an optimizer, as `ModuleCut.list_parameters` does.

        If batches overlap, there are no such parameters.
        """
        return {} if self.is_asynchronous else self.cut.list_parameters()

    def switch_plan(self, plan: Plan, order: Program | Policy) -> None:
        """Use another plan, beginning with the next window. Layers that the plan places on other ranks move.

        Collective if layers move.
        """
        if plan is self.engine.plan:
            return
        _log.debug("plan: batches of %d samples, layers %s on ranks %s", plan.jobs[0].rows, plan.layers, plan.ranks)
        if plan.layers != self.local_layers.holdings.layers:
            self.relocation.move_now(plan.layers)
        if plan.layers == self.engine.plan.layers:
            self.engine.adopt(plan, order)
            return
        self.saved_bytes.forget_stages()
        self.stages = self._make_stages(plan)
        self.engine.adopt(plan, order, list(self.stages.values()))

    def _make_stages(self, plan: Plan) -> dict[int, Stage]:
        made = {}
        measures = self.plans.every and self.device.type == "cpu"  # on a GPU, a forward returns before it has finished
        for number in plan.stages[self._rank]:
            layers = self.local_layers.layers_of(number)
            made[number] = Stage(
                number,
                {n: TapedLayer(layer, n, self.local_layers.around_layer) for n, layer in layers.items()},
                self._watch_body(number, self.user_steps.stage_body(number)),
                partial(self._batch_complete, number),
                last_backward=partial(self._around_last_backward, number)
                if self.local_layers.reduces_in_backward
                else None,
                named=layers,
                clock=self.statistics.add_layer if measures else None,
                show_version=self.user_steps.show_version,
                predict=self.training_loop.predict_changes,
                seed=self._seed,
                device=self.device,
                resources=self.training_loop.resources,
            )
        return made

    def _around_last_backward(self, stage: int, item: Item) -> AbstractContextManager[None]:
        return self.local_layers.around_last_backward(stage, item.data.complete)

    def _watch_body(self, number: int, body: Body) -> Body:
        """Return the body of a stage with calls of the listeners, and with a measurement of its first micro-batch."""
        measured, seen = self.saved_bytes.watch_body(number, body), self.saved_bytes.seen

        def run(stage: Stage, item: Item, span: Span, received: Any) -> Any:
            for listener in self.listeners:
                if item.training and not stage.recomputing and not span.start:
                    listener.before_first_forward(stage, item)
                listener.before_forward(stage, item, span)
            try:
                out = (body if number in seen else measured)(stage, item, span, received)
            except Exception as error:
                if item.training and item.data.token_cut is not None:
                    error.add_note(item.data.token_cut.describe_crop(span))
                raise
            for listener in self.listeners:
                listener.after_forward(stage, item, span)
            return out

        return run

    def inject(self, step: TrainingStep, use: LayerUse | None = None) -> Item:
        """Add a training batch to the window. Its size must be the size in the plan of the engine.

        Args:
            step: the batch.
            use: the layers that the batch uses, or None for all layers.

        Returns:
            The batch in the form of the engine.
        """
        plan = self.engine.plan
        step.item = item = Item(step.number, step.rows, step, use=use, own_spans=step.own_spans)
        for listener in self.listeners:
            listener.before_inject(item)
        if self.has_last_stage:
            number = plan.n_stages - 1
            spans = step.locate_spans(plan.local_spans(Kind.F, number, self._rank))
            self.user_steps.prepare_last_stage(self.stages[number], item, spans)
        self.engine.inject(item)
        return item

    def sort_samples(self, step: TrainingStep) -> None:
        """Find the samples of each micro-batch, after the plan of the batch has been chosen."""
        step.samples = self.lists.find_lists(step.batch, step.rows)
        if self.token_cutter is None:
            return
        spans = [span for span in self.engine.plan.spans(Kind.F, 0) if span.start < step.rows]
        step.token_cut = self.token_cutter.cut(step.batch, step.rows, spans, step.samples)
        if step.token_cut is not None:
            step.sorted_from, step.batch = step.batch, step.token_cut.batch
        if not self.is_asynchronous:  # otherwise, the state of earlier batches is merged later
            self.state.token_cut = step.token_cut

    def weigh_losses(self, step: TrainingStep) -> None:
        """Determine the weight of the loss of each micro-batch, on the ranks of the last stage."""
        if self.loss_weights is None:
            return
        plan = self.engine.plan
        last = plan.n_stages - 1
        forward, backward = plan.spans(Kind.F, last), plan.spans(Kind.B, last)
        spans = step.locate_spans(forward if len(forward) > len(backward) else backward)
        step.weights = self.loss_weights.weigh_batch(step.batch, step.rows, spans)

    def results_for_last_rank(self, step: TrainingStep) -> dict[Span, StepResult]:
        """Return the step's results for the samples of this rank, if several ranks share the samples of a batch.

        Raises:
            PipelineError: the step logs a metric whose state contains the samples of this rank only.
        """
        if self.is_last_rank or not self.has_last_stage:
            return {}
        found = {}
        for span, result in step.results.items():
            calls = self.replay.pack_calls(result.logged)
            metric = next((call for call in calls if isinstance(call.value, MetricState)), None)
            if metric is not None:
                raise PipelineError(
                    f"{type(self.cut.module).__name__}.training_step logs a metric as {metric.name!r}, and the last "
                    f"stage has {len(self.last_stage_ranks)} ranks, each with its own samples. Log its value as a "
                    "number, or give the last stage one rank, as in data_parallel=[2, 1]"
                )
            found[span] = replace(result, logged=calls)
        return found

    def _sums_over_replicas(self, ranks: Ranks) -> Sums | None:
        """Return a function that sums numbers over the last stages of all replicas, or None without replicas.

        Collective.
        """
        if ranks.grid.replicas == 1:
            return None
        place = ranks.grid.pipeline.index(self.last_rank)
        shards = range(ranks.grid.shards)
        groups = [ranks.control.subgroup(ranks.grid.on_all_replicas((place,), n), "loss weights") for n in shards]
        return partial(ranks.control.start_all_reduce, group=groups[ranks.grid.shard])

    def count_microbatches(self, rows: int) -> int:
        """Return the number of micro-batches that have samples, in a batch of `rows` samples."""
        return sum(span.start < rows for span in self.engine.plan.spans(Kind.F, 0))

    @property
    def weighed_by(self) -> str:
        """The name of the weighting of micro-batch losses. It is empty on ranks without the last stage."""
        return "" if self.loss_weights is None else self.loss_weights.name

    def _batch_complete(self, number: int, item: Item) -> None:
        self.training_loop.batch_complete(self.stages[number], item)

    def stage_bytes(self, optimizers: Sequence[Optimizer]) -> dict[int, StageBytes]:
        """Return the bytes that the stages of this rank hold, after one batch has been trained."""
        held = {number: stage.layers.values() for number, stage in self.stages.items()}
        return self.saved_bytes.measured_stages(held, optimizers)

    def settle_layers(self) -> None:
        """Give layers that were moved to and from the device their own tensors again, after training."""
        self.training_loop.close()

    def close(self) -> None:
        """Close the connections to the neighboring ranks."""
        self.engine.close()
        self.local_layers.close()
