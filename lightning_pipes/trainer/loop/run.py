"""One run of a Trainer method: the cut module, its engine, and the batches that go through."""

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
from lightning_pipes.engine.compute.stage import Body, Stage
from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.messages.transport import make_transport
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.ir import Kind, LayerUse, PipelineError, Plan, Policy, Program, Span
from lightning_pipes.planning.planner import BLOCKING
from lightning_pipes.trainer.loop.connections import Connections
from lightning_pipes.trainer.loop.step_statistics import StepStatistics
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.loop.watcher import TrainingStep, Watchers
from lightning_pipes.trainer.module.batches import SampleLists
from lightning_pipes.trainer.module.tape import TapedLayer
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.relocation.local_layers import LocalLayers
from lightning_pipes.trainer.relocation.relocation import LayerRelocation
from lightning_pipes.trainer.reports.report import KEPT_WINDOWS, Window
from lightning_pipes.trainer.reports.stage_bytes import SavedBytes, StageBytes
from lightning_pipes.trainer.step.logs import LogReplay, MetricState
from lightning_pipes.trainer.step.loss_weights import LossWeights, Sums
from lightning_pipes.trainer.step.steps import StepResult, Steps

_log = logging.getLogger(__name__)


class TrainingLoop(ABC):
    """How a run trains: the part in which schedules that flush and those that do not differ. All of it is collective.

    Attributes:
        is_asynchronous: stages step apart, for batches overlap.
    """

    is_asynchronous: ClassVar[bool] = False

    @abstractmethod
    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        """Run forward and backward of one batch, and return the result of the user's step, logged and with its loss, on
        every rank.

        Args:
            arguments: of training_step after the batch.
            complete: whether an optimizer step may follow: gradients are summed over all ranks that hold a parameter.
        """

    @abstractmethod
    def drain(self) -> None:
        """Finish what `train` has left for later."""

    @abstractmethod
    def make_agreement(self, stops: StopAgreement) -> Callable[[], None]:
        """Return a function by which ranks agree on stopping after a batch."""

    @abstractmethod
    def batch_complete(self, stage: Stage, item: Item) -> None:
        """Called when the gradients of a batch are complete on a stage of this rank."""

    @abstractmethod
    def give_back_gradients(self) -> None:
        """Put the gradients where the optimizer looks for them."""

    def pause_step(self) -> AbstractContextManager[None]:
        """Run the block, which steps an optimizer, at the same place of a step on all stages."""
        return nullcontext()

    def resume_step(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the user's `closure` as it runs in a step that is paused."""
        return closure

    def own_gradients(self) -> AbstractContextManager[None]:
        """Give parameters their accumulated gradients in the block."""
        return nullcontext()

    def why_no_state(self, parameter: torch.Tensor | None) -> str:
        """Return why hooks can't read an optimizer's state of a parameter, or of all; empty where they can."""
        return ""

    def layer_use(self, batch: Any) -> LayerUse | None:
        """Return the layers that an evaluated batch needs on the device; None keeps those that are there."""
        return None

    def close(self) -> None:  # noqa: B027  # most keep nothing
        """The run is over."""


class StageListener:
    """Observes a run on its rank; where batches overlap, ranks may be at different batches."""

    def before_inject(self, item: Item) -> None:
        """A training batch is about to be added to the window."""

    def before_forward(self, stage: Stage, item: Item, span: Span) -> None:
        """A micro-batch is about to go forward through a stage."""

    def before_first_forward(self, stage: Stage, item: Item) -> None:
        """The first forward of a training batch on a stage is about to run."""

    def before_optimizer_step(self, stage: Stage, item: Item) -> None:
        """A batch is about to step its layers on a stage."""

    def after_optimizer_step(self, stage: Stage, item: Item) -> None:
        """A batch has stepped its layers on a stage."""

    def after_result(self, number: int, batch: Any, out: Any) -> None:
        """The result of batch `number` is known here: what the user's step gave. In the order of batches."""


class PipelineRun:
    """Takes batches through the pipeline, from `setup` to `teardown` of the strategy.

    Collective: all ranks make one, and the same calls of it, in the same order.

    Args:
        trainer: whose `fit`, `validate`, `test` or `predict` this is.
        connections: to the other ranks.
        part: the layers and parameters of this rank.
        plans: how batches are cut and ordered.
        steps: runs the user's steps.
        seed: what the random streams of the layers start from.
        transport: how messages travel, as `make_transport` names it.
        check_loss: find out in the first batches how losses of micro-batches are weighed.
        ruled_out: candidates for these weights that don't make the loss; None if none were compared.
        make_training_loop: factory of the training loop, called last.
        relocation: how layers move while training goes on.

    Attributes:
        windows: the last batches.
        local_layers: of this rank, with their optimizers.
        user_steps: run the user's code around the layers.
        is_last_rank: whether this is the first rank of the last stage, which returns results.
        last_rank: the global rank of that one.
        is_first_rank: whether this is the first rank of stage 0.
        took: nanoseconds of the first batches on this rank.
        listeners: called at each stage's steps; see `StageListener`.
        statistics: what planners get to see of the last batches.
        relocation: the moves of layers.
        training_loop: trains the batches.
        decision: the one that first steps have called for; None while they agree with that of the run.
        watchers: checks, statistics and safety nets beside the step; set after the run is made.
        loss_weights: weighs the losses of micro-batches, on the rank of the last stage.
        awaits_batch: whether an optimizer is to step by a batch that has not begun.

    Raises:
        PlanError: the transport can't be had here.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        ranks: Ranks,
        connections: Connections,
        part: LocalLayers,
        plans: Plans,
        steps: Steps,
        seed: int,
        transport: str,
        check_loss: bool,
        make_training_loop: Callable[[PipelineRun], TrainingLoop],
        relocation: str = BLOCKING,
        ruled_out: Collection[str] | None = None,
    ) -> None:
        self.local_layers = part
        self.cut = cut = part.cut
        self.plans = plans
        self.user_steps = steps
        self.state = steps.state
        self.global_ranks = global_ranks = tuple(part.holdings.global_ranks)
        self.windows: deque[Window] = deque(maxlen=KEPT_WINDOWS)
        self.took: list[int] = []
        self.listeners: list[StageListener] = []
        self.statistics = StepStatistics(ranks)
        self.awaits_batch = False
        self.replay = LogReplay(cut.module)
        self.is_fitting = trainer.state.fn == TrainerFn.FITTING
        self.trainer = trainer
        self.connections = connections
        self.control = control = ranks.pipeline
        self.device = device = ranks.device
        self.hidden = part.hidden
        self.saved_bytes = SavedBytes()
        self.lists = SampleLists()
        rank = self._rank = part.holdings.rank
        plan, order = plans.for_rows(plans.trial_rows)
        self.last_rank = global_ranks[plan.ranks[-1]]
        self.is_first_rank = plan.ranks[0] == rank
        self.is_last_rank = plan.ranks[-1] == rank
        self.has_last_stage = rank in plan.ranks_of_stages[-1]
        self.last_stage_ranks = tuple(global_ranks[r] for r in plan.ranks_of_stages[-1])
        if len(self.last_stage_ranks) > 1:
            steps.state.refuse_changes(
                f"the last stage has {len(self.last_stage_ranks)} ranks, each with its own samples. Give it one, as in "
                "data_parallel=[2, 1], or log the values instead"
            )
        self.stages = self._make_stages(plan)
        self.loss_weights = None
        if self.is_fitting and LossWeights.are_needed(cut.module, check_loss or ruled_out is not None):
            sums = (
                self._sums_over_replicas(ranks) if part.replica_averages is None else None
            )  # else each weighs its own batch
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
            seed=seed,
            watch=connections.engine_watch,
            turns=connections.turns,
        )
        self.relocation = LayerRelocation(trainer, part, ranks.control, relocation, plans)
        self.watchers = Watchers()
        self.decision: Decision | None = None
        self.training_loop = make_training_loop(self)
        self.relocation.is_asynchronous = self.training_loop.is_asynchronous
        steps.may_skip_batches = steps.runs_whole_evaluation and not self.is_asynchronous and ranks.grid.replicas == 1
        fault_point("transport.made")

    @contextmanager
    def expect_batch(self) -> Iterator[None]:
        """Have an optimizer step in the block by the batch that is trained in it, where batches overlap.

        Raises:
            PipelineError: no batch has run in the block.
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
        """Finish the batches under way. Collective."""
        with self.cut.scope.suspend_hooks():  # a hook may save a checkpoint
            self.training_loop.drain()

    def drain(self) -> None:
        """Finish the batches under way, and bring weights up to date. Collective."""
        with self.cut.scope.suspend_hooks():
            self.finish_batches()
            if self.relocation.may_defer_steps:
                self.finish_move()

    def finish_move(self, number: int | None = None) -> None:
        """Wait until layers that travel have arrived, and go on with the plans that they travel for. Collective.

        Args:
            number: of the next batch; by default the one after that of the Trainer.
        """
        moving = self.relocation
        if not moving.is_moving:
            return
        self.finish_batches()
        moving.stop_sending()
        with self.training_loop.own_gradients():  # those that are accumulated move with their layers
            plans = moving.finish_move()
            self.switch_plan(*plans.for_rows(self.engine.plan.jobs[0].rows))
        moving.record_end(self.trainer.fit_loop.total_batch_idx + 1 if number is None else number)

    def make_agreement(self, stops: StopAgreement) -> Callable[[], None]:
        """Return a function by which ranks agree on stopping; layers that travel arrive before the end."""
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
        """Return the parameters that a hook may give an optimizer, as `CutModule.list_parameters`; none where batches
        overlap."""
        return {} if self.is_asynchronous else self.cut.list_parameters()

    def switch_plan(self, plan: Plan, order: Program | Policy) -> None:
        """Use another plan from the next window on; layers that it places on other ranks move. Collective where any
        do."""
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
        for number in plan.stages[self._rank]:
            layers = self.local_layers.layers_of(number)
            made[number] = Stage(
                number,
                {n: TapedLayer(layer, n, self.hidden.layer) for n, layer in layers.items()},
                self._watch_body(number, self.user_steps.stage_body(number)),
                partial(self._batch_complete, number),
                recompute=bool(plan.recompute) and plan.recompute[number],
                last_backward=partial(self._around_last_backward, number)
                if self.local_layers.reduces_in_backward
                else None,
                named=layers,
            )
            made[number].show_version = self.user_steps.show_version
            if self.plans.every and self.device.type == "cpu":  # on a GPU a forward returns before it has run
                made[number].clock = self.statistics.add_layer
        return made

    def _around_last_backward(self, stage: int, item: Item) -> AbstractContextManager[None]:
        return self.local_layers.around_last_backward(stage, item.data.complete)

    def _watch_body(self, number: int, body: Body) -> Body:
        """Return the body of a stage that calls listeners and measures its first micro-batch."""
        measured, seen = self.saved_bytes.watch_body(number, body), self.saved_bytes.seen

        def run(stage: Stage, item: Item, span: Span, received: Any) -> Any:
            for listener in self.listeners:
                if item.training and not stage.recomputing and not span.start:
                    listener.before_first_forward(stage, item)
                listener.before_forward(stage, item, span)
            return (body if number in seen else measured)(stage, item, span, received)

        return run

    def inject(self, step: TrainingStep, use: LayerUse | None = None) -> Item:
        """Add a training batch to the window; its size has the plan of the engine.

        Args:
            use: the layers that it uses; None for all.
        """
        plan = self.engine.plan
        step.item = item = Item(step.number, step.rows, step, use=use)
        for listener in self.listeners:
            listener.before_inject(item)
        if self.has_last_stage:
            number = plan.n_stages - 1
            spans = [span.clip_to(item.rows) for span in plan.local_spans(Kind.F, number, self._rank)]
            self.user_steps.prepare_last_stage(self.stages[number], item, [span for span in spans if span.rows])
        self.engine.inject(item)
        return item

    def weigh_losses(self, step: TrainingStep) -> None:
        """Decide how much the loss of each micro-batch counts, on the rank of the last stage."""
        if self.loss_weights is None:
            return
        plan = self.engine.plan
        last = plan.n_stages - 1
        forward, backward = plan.spans(Kind.F, last), plan.spans(Kind.B, last)
        spans = [span.clip_to(step.rows) for span in (forward if len(forward) > len(backward) else backward)]
        step.weights = self.loss_weights.weigh_batch(step.batch, step.rows, [span for span in spans if span.rows])

    def results_for_last_rank(self, step: TrainingStep) -> dict[Span, StepResult]:
        """Return the step's results for the samples of this rank, if ranks share the samples of a batch.

        Raises:
            PipelineError: the step logs a metric, whose state has the samples of this rank alone.
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
        """Return what adds up numbers of the replicas' last stages; None without replicas. Collective."""
        if ranks.grid.replicas == 1:
            return None
        place = ranks.grid.pipeline.index(self.last_rank)
        shards = range(ranks.grid.shards)
        groups = [ranks.control.subgroup(ranks.grid.on_all_replicas((place,), n), "loss weights") for n in shards]
        return partial(ranks.control.start_all_reduce, group=groups[ranks.grid.shard])

    @property
    def weighed_by(self) -> str:
        """The name of the weights of micro-batch losses; empty on ranks without the last stage."""
        return "" if self.loss_weights is None else self.loss_weights.name

    def _batch_complete(self, number: int, item: Item) -> None:
        self.training_loop.batch_complete(self.stages[number], item)

    def stage_bytes(self, optimizers: Sequence[Optimizer]) -> dict[int, StageBytes]:
        """Return the bytes that the stages of this rank hold, once one batch was trained."""
        held = {number: stage.layers.values() for number, stage in self.stages.items()}
        return self.saved_bytes.measured_stages(held, optimizers)

    def settle_layers(self) -> None:
        """Give layers that took turns on the device tensors of their own again, after training."""
        self.training_loop.close()

    def close(self) -> None:
        """End the connections to the neighbours."""
        self.engine.close()
        self.local_layers.close()
