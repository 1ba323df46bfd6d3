"""One run of a Trainer method: the cut module, its engine, and the batches that go through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_pipes.engine.allocator import trimmed_heap
from lightning_pipes.engine.compute.item import Item
from lightning_pipes.engine.compute.reducer import Reducer
from lightning_pipes.engine.compute.stage import Body, Stage
from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.messages.transport import make_transport
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.ir import Kind, LayerUse, PipelineError, Plan, Policy, Program, Span
from lightning_pipes.planning.planner import DRAIN
from lightning_pipes.trainer.loop.connections import Connections
from lightning_pipes.trainer.loop.seen import Looks
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.module.batches import SampleLists, check_same, fingerprint, rows_of, sample_fingerprint
from lightning_pipes.trainer.module.capture import NoCallError
from lightning_pipes.trainer.module.optimizers import check_same_settings, settings_of
from lightning_pipes.trainer.module.tape import TapedLayer
from lightning_pipes.trainer.moves.moving import Moving
from lightning_pipes.trainer.moves.part import Part
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.ranks.control import Coming
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.reports.report import KEPT_WINDOWS, Window
from lightning_pipes.trainer.reports.stage_bytes import SavedBytes, StageBytes
from lightning_pipes.trainer.step.logs import LogReplay, merge, recorded
from lightning_pipes.trainer.step.loss_check import LossCheck
from lightning_pipes.trainer.step.loss_weights import LossWeights, Sums
from lightning_pipes.trainer.step.sample_check import SampleCheck
from lightning_pipes.trainer.step.steps import Context, EvaluationBatch, Steps, TrainingBatch

CHECKED_BATCHES = 2
"""Batches at the start of every epoch, and of a run, whose checksums all ranks compare."""

MARKED_ON_DEVICE = 16
"""Of so many batches on a GPU one is marked: the host waits for the values."""

TRAINING = "training"
Mark = tuple[int, int] | None


class EvaluatedStep(NamedTuple):
    """How an evaluation step goes through the layers, as its first batch has shown.

    Attributes:
        with_layers: whether it calls them.
        whole: whether batches go through whole, for samples are not on axis 0 of all tensors.
    """

    with_layers: bool
    whole: bool


class Training(ABC):
    """How a run trains: the part in which schedules that flush and those that do not differ. All of it is collective.

    Attributes:
        streams: stages step apart, for batches overlap.
    """

    streams: ClassVar[bool] = False

    @abstractmethod
    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        """See `PipelineRun.train`."""

    @abstractmethod
    def drain(self) -> None:
        """Finishes what `train` has left for later."""

    @abstractmethod
    def agreement(self, stops: StopAgreement) -> Callable[[], None]:
        """A function that has the ranks agree on stopping after a batch."""

    @abstractmethod
    def batch_complete(self, stage: Stage, item: Item) -> None:
        """Called when the gradients of a batch are complete on a stage of this rank."""

    @abstractmethod
    def give_back_gradients(self) -> None:
        """Puts the gradients where the optimizer looks for them."""

    def own_gradients(self) -> AbstractContextManager[None]:
        """In the block parameters have the gradients that were accumulated for them."""
        return nullcontext()

    def why_no_state(self, parameter: torch.Tensor | None) -> str:
        """Return why hooks can't have what an optimizer keeps of a parameter, or of all; empty where they can."""
        return ""

    def use(self, batch: Any) -> LayerUse | None:
        """The layers that a batch of an evaluation needs on the device; None means those that are there."""
        return None

    def close(self) -> None:  # noqa: B027  # most keep nothing
        """The run is over."""


class Listener:
    """Sees what a run does on its rank, as it does it; in a stream, where ranks are at different batches."""

    def injected(self, item: Item) -> None:
        """A training batch is about to be added to the window."""

    def runs(self, stage: Stage, item: Item, span: Span) -> None:
        """A micro-batch is about to go forward through a stage."""

    def began(self, stage: Stage, item: Item) -> None:
        """The first forward of a training batch on a stage is about to run."""

    def steps(self, stage: Stage, item: Item) -> None:
        """A batch is about to step its layers on a stage."""

    def stepped(self, stage: Stage, item: Item) -> None:
        """A batch has stepped its layers on a stage."""

    def heard(self, number: int, batch: Any, out: Any) -> None:
        """The result of batch `number` is known here: what the user's step gave. In the order of batches."""


class PipelineRun:
    """Takes batches through the pipeline, from `setup` to `teardown` of the strategy.

    Collective: all ranks make one, and the same calls of it, in the same order.

    Args:
        trainer: whose `fit`, `validate`, `test` or `predict` this is.
        connections: to the other ranks.
        part: what of the module is on this rank.
        plans: how batches are cut and ordered.
        steps: runs the user's steps.
        seed: what the random streams of the layers start from.
        transport: how messages travel, as `make_transport` names it.
        check_loss: compare the loss of the first batch with those of its micro-batches.
        training: makes what trains, when all else is made.
        moves: how layers move while training goes on.

    Attributes:
        windows: the last batches.
        took: nanoseconds of the first batches on this rank.
        listeners: told of what happens in a stream.
        looks: what planners get to see of the last batches.
        moving: the moves of layers.
        steps_asked: whether an optimizer is asked to step by the batch that runs.

    Raises:
        PlanError: the transport can't be had here.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        ranks: Ranks,
        connections: Connections,
        part: Part,
        plans: Plans,
        steps: Steps,
        seed: int,
        transport: str,
        check_loss: bool,
        training: Callable[[PipelineRun], Training],
        moves: str = DRAIN,
    ) -> None:
        self.part = part
        self.cut = cut = part.cut
        self.plans = plans
        self.steps = steps
        self.state = steps.state
        self.global_ranks = global_ranks = tuple(part.holdings.global_ranks)
        self.windows: deque[Window] = deque(maxlen=KEPT_WINDOWS)
        self.took: list[int] = []
        self.listeners: list[Listener] = []
        self.looks = Looks(ranks)
        self.steps_asked = False
        self.replay = LogReplay(cut.module)
        self.fitting = trainer.state.fn == TrainerFn.FITTING
        self.trainer = trainer
        self.connections = connections
        self.control = control = ranks.pipeline
        self.device = device = ranks.device
        self.hidden = part.hidden
        self._evaluated = 0
        self._evaluated_steps: dict[tuple[Any, ...], EvaluatedStep] = {}
        """Of steps that evaluate, by name and loader, whether they call the layers."""
        self._trained = 0  # batches, or begun to be
        self._comparing = False  # this batch with that of all ranks
        self._saved_bytes = SavedBytes()
        self.lists = SampleLists()
        rank = self._rank = part.holdings.rank
        plan, order = plans.for_rows(plans.trial_rows)
        self.last_rank = global_ranks[plan.ranks[-1]]
        self.first = plan.ranks[0] == rank
        self.last = plan.ranks[-1] == rank
        self.stages = self._made_stages(plan)
        self._loss_check = None
        self._sample_check = None
        if check_loss and self.fitting:
            self._sample_check = SampleCheck(cut, steps, device, global_ranks[rank])
        self._weights = None
        if self.fitting and LossWeights.wanted(cut.module, check_loss):
            sums = self._sums_over_replicas(ranks)
            if self.last:
                self._weights = LossWeights(cut.module, check_loss, sums, ranks.grid.replicas)
        if check_loss and self._weights is not None:
            needed = partial(self._saved_bytes.of_a_sample, plan.n_stages - 1)
            self._loss_check = LossCheck(cut, steps, device, needed, self._weights)
        make = partial(make_transport, plan, rank, global_ranks, device, control.watch, transport)
        connect = partial(control.watch.call, make)
        self.engine = Engine(
            plan,
            order,
            list(self.stages.values()),
            connections.transport(connect),
            rank=rank,
            device=device,
            seed=seed,
            watch=connections.engine_watch,
            turns=connections.turns,
        )
        self.moving = Moving(self, ranks.control, moves)
        self._training = training(self)
        fault_point("transport.made")

    def train(
        self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool = True
    ) -> Any:
        """The result of the user's step, logged and with its loss, on every rank: forward and backward of one batch.

        Gradients are summed over all who hold a parameter if they are `complete`: a step may follow.
        """
        self.cut.check_in_place()
        out = self._training.train(batch, arguments, optimizers, complete)
        self._evaluated = 0
        return out

    @contextmanager
    def step_asked(self) -> Iterator[None]:
        """In the block an optimizer is asked to step by the batch that runs."""
        self.steps_asked = True
        try:
            yield
        finally:
            self.steps_asked = False

    def drain(self) -> None:
        """Finishes what `train` has left for later; every rank calls it after the same batch."""
        with self.cut.scope.suspended():  # a hook may save a checkpoint
            self._training.drain()
            self.moving.settle()

    def agreement(self, stops: StopAgreement) -> Callable[[], None]:
        """A function that has the ranks agree on stopping after a batch; layers that travel arrive before the end."""
        agree = self._training.agreement(stops)

        def then_finish() -> None:
            agree()
            if self.trainer.should_stop or stops.terminated:
                self.moving.finish()

        return then_finish

    def give_back_gradients(self) -> None:
        """Puts the gradients where the optimizer looks for them."""
        self._training.give_back_gradients()

    def own_gradients(self) -> AbstractContextManager[None]:
        """In the block parameters have the gradients that were accumulated for them."""
        return self._training.own_gradients()

    def why_no_state(self, parameter: torch.Tensor | None) -> str:
        """Return why hooks can't have what an optimizer keeps of a parameter, or of all; empty where they can."""
        return self._training.why_no_state(parameter)

    @property
    def streams(self) -> bool:
        """Whether stages step apart, for batches overlap."""
        return self._training.streams

    def turn_to(self, plan: Plan, order: Program | Policy) -> None:
        """The next window is that of another plan; the layers that it has elsewhere move. Collective where any do."""
        if plan is self.engine.plan:
            return
        if plan.layers != self.part.holdings.layers:
            self.moving.turn(plan.layers)
        if plan.layers == self.engine.plan.layers:
            self.engine.adopt(plan, order)
            return
        self._saved_bytes.forget()
        self.stages = self._made_stages(plan)
        self.engine.adopt(plan, order, list(self.stages.values()))

    def _made_stages(self, plan: Plan) -> dict[int, Stage]:
        made = {}
        for number in plan.stages[self._rank]:
            layers = self.part.layers_of(number)
            made[number] = Stage(
                number,
                {n: TapedLayer(layer, n, self.hidden.layer) for n, layer in layers.items()},
                self._told(self._saved_bytes.around(number, self.steps.body(number))),
                partial(self._batch_complete, number),
                recompute=bool(plan.recompute) and plan.recompute[number],
                last_backward=None if self.part.reducer is None else partial(self._reducing, self.part.reducer, number),
                named=layers,
            )
        return made

    @staticmethod
    def _reducing(reducer: Reducer, stage: int, item: Item) -> AbstractContextManager[None]:
        return reducer.last_backward(stage) if item.data.complete else nullcontext()

    def _told(self, body: Body) -> Body:
        def telling(stage: Stage, item: Item, span: Span, received: Any) -> Any:
            for listener in self.listeners:
                if item.training and not stage.recomputing and not span.start:
                    listener.began(stage, item)
                listener.runs(stage, item, span)
            return body(stage, item, span, received)

        return telling

    def inject(self, item: Item) -> None:
        """Adds a training batch to the window; its size has the plan of the engine."""
        for listener in self.listeners:
            listener.injected(item)
        if self.last:
            number = self.engine.plan.n_stages - 1
            spans = [span.clip_to(item.rows) for span in self.engine.plan.spans(Kind.F, number)]
            self.steps.expect(self.stages[number], item, [span for span in spans if span.rows])
        self.engine.inject(item)

    def _sums_over_replicas(self, ranks: Ranks) -> Sums | None:
        """Return what adds up numbers of the replicas' last stages; None without replicas. Collective."""
        if ranks.grid.replicas == 1:
            return None
        place = ranks.grid.pipeline.index(self.last_rank)
        group = ranks.control.subgroup([pipeline[place] for pipeline in ranks.grid.pipelines], "loss weights")
        return partial(ranks.control.start_all_reduce, group=group)

    def begin_loss_check(self, data: TrainingBatch) -> None:
        """Called before a batch; its size has the plan of the engine."""
        plan = self.engine.plan
        if self._sample_check is not None:
            self._sample_check.begin(data, plan.spans(Kind.F, 0))
        if self._weights is None:
            return
        last = plan.n_stages - 1
        forward, backward = plan.spans(Kind.F, last), plan.spans(Kind.B, last)
        spans = [span.clip_to(data.rows) for span in (forward if len(forward) > len(backward) else backward)]
        spans = [span for span in spans if span.rows]
        data.weights = self._weights.of(data.batch, data.rows, spans)
        if self._loss_check is not None:
            self._loss_check.begin(data, spans)

    @property
    def weighed_by(self) -> str:
        """By what losses of micro-batches are weighed, for people; empty on other ranks than that of the last stage."""
        return "" if self._weights is None else self._weights.name

    def check_loss(self, item: Item) -> None:
        """Called after a batch, before anything steps by its gradients."""
        if self._sample_check is not None and item.data.entered:
            with trimmed_heap():  # a whole batch fits into no hole that micro-batches have left
                for number, stage in self.stages.items():
                    if number in item.data.entered:
                        self._sample_check.compare(stage, item)
        if self._loss_check is not None:
            self._loss_check.compare(self.stages[self.engine.plan.n_stages - 1], item)

    def _batch_complete(self, number: int, item: Item) -> None:
        self._training.batch_complete(self.stages[number], item)

    def evaluate(self, step: Callable[..., Any], context: Context, batch: Any, arguments: tuple[Any, ...]) -> Any:
        """Forward of one batch through `step`, which runs once on the whole batch; its result on every rank."""
        rows = rows_of(batch)
        batch_idx = arguments[0] if arguments else 0
        self.check(batch, batch_idx, step.__name__)
        mark = self.mark(batch, batch_idx)
        if not self._evaluated:
            self.part.buffers.before_batch()
        item = Item(self._evaluation_number(), rows, training=False, use=self._training.use(batch))
        item.data = EvaluationBatch(context)
        message = None
        self.steps.begin_batch()
        with self.hidden.batch(training=False):
            end = self._capture(step, item, context, batch, arguments)
            with_layers, whole = self._evaluated_steps[_key_of_evaluation(step, item, arguments)]
            outputs = self.engine.evaluate(item, 1 if whole else None) if with_layers else ()
            if self.last:
                with context(), recorded(self.cut.module) as calls:
                    if end is not None:  # it has run to its end here
                        out, calls = end.out, end.calls
                    elif with_layers:
                        out = self.steps.finish(step, item, batch, arguments, outputs)
                    else:
                        out = self.steps.run_without_layers(step, item, batch, arguments)
                logs = self.trainer.state.fn != TrainerFn.PREDICTING
                if end is not None or not with_layers:
                    self.state.note_microbatch(Span(0, rows))
                message = (out, self.steps.changes(), self.replay.pack(merge([calls], [rows])) if logs else [], mark)
        out, changes, logged, last_mark = self.control.broadcast(message, self.last_rank)
        self.steps.settle(None if self.last else changes)
        self.check_mark(mark, last_mark, f"{step.__name__}, batch {batch_idx}")
        with context():
            self.replay.replay(logged)
        return move_data_to_device(out, self.device)

    def _capture(
        self, step: Callable[..., Any], item: Item, context: Context, batch: Any, arguments: tuple[Any, ...]
    ) -> NoCallError | None:
        """Get what an evaluation step calls the layers with, on the first stage.

        In the first batch all ranks learn whether the step calls them: one that does not runs as it is, on the last
        stage. They learn whether its samples are on axis 0 of all tensors: a batch goes through the layers whole
        otherwise. Return how it ended without the call, where it need not run again.
        """
        key, data, end = _key_of_evaluation(step, item, arguments), item.data, None
        known = self._evaluated_steps.get(key)
        if self.first and (known is None or known.with_layers):
            try:
                with context():
                    self.steps.capture(step, item, batch, arguments)
            except NoCallError as error:
                if known is not None:
                    raise
                end = error
        if known is None:
            first_rank = self.global_ranks[self.engine.plan.ranks[0]]
            found = EvaluatedStep(*self.control.broadcast((end is None, data.elsewhere), first_rank))
            self._evaluated_steps[key] = found
            if found.whole:
                rank_zero_info(
                    f"{step.__name__} gives the layers tensors whose samples are not on axis 0: batches of evaluation "
                    "go through them whole, in one micro-batch"
                )
        elif data.elsewhere and not known.whole:
            raise PipelineError(
                f"{step.__name__} gives the layers tensors whose samples are not on axis 0 in this batch, and did not "
                "in the first one; give them tensors with samples on axis 0, or take microbatches=1"
            )
        return end

    def stage_bytes(self, optimizers: Sequence[Optimizer]) -> dict[int, StageBytes]:
        """The bytes that the stages of this rank hold, once one batch was trained."""
        held = {number: stage.layers.values() for number, stage in self.stages.items()}
        return self._saved_bytes.of(held, optimizers)

    def settle(self) -> None:
        """Nothing is trained any more: layers that took turns on the device have tensors of their own again."""
        self._training.close()

    def close(self) -> None:
        """Ends the connections to the neighbours."""
        self.engine.close()
        self.part.close()

    def mark(self, batch: Any, number: int, use: LayerUse | None = None) -> Mark:
        """Return checksums of a batch and of the layers that it uses, which ranks compare; None for most on a GPU."""
        if self.control.size == 1 or (self.device.type != "cpu" and number % MARKED_ON_DEVICE):
            return None
        return sample_fingerprint(batch), 0 if use is None else use.fingerprint

    def check_mark(self, own: Mark, last: Mark, where: str) -> None:
        """Compare this rank's mark of a batch with that of the last stage.

        Raises:
            PipelineError: they differ.
        """
        if own is None or last is None or own == last:
            return
        ranks = (self.global_ranks[self.part.holdings.rank], self.last_rank)
        check_same([f"{mark[0]:08x}" for mark in (own, last)], ranks, where)
        raise _other_layers(where, [f"checksum {mark[1]:08x}" for mark in (own, last)], ranks)

    def check_layers(self, use: LayerUse | None, where: str) -> None:
        """Compare the layers that the ranks say a batch uses, for the batches that `check` compares.

        Raises:
            PipelineError: they differ.
        """
        if use is None or not self._comparing:
            return
        said = self.control.all_gather(sorted(name for names in use.layers for name in names))
        if any(names != said[0] for names in said[1:]):
            common = set(said[0]).intersection(*said[1:])
            own = [[name for name in names if name not in common] for names in said]
            raise _other_layers(where, [", ".join(names[:5]) or "none" for names in own], self.control.ranks)

    def check(self, batch: Any, batch_idx: int, what: str) -> None:
        """Compares the first batches of all ranks, and what their optimizers are told.

        Raises:
            PipelineError: now or a batch later: they differ.
        """
        before = len(self.windows)
        if what == TRAINING:  # a window may hold any number of batches, and ranks would wait for each other at each
            before = self._trained
            self._trained += 1
        self._comparing = min(batch_idx, before) < CHECKED_BATCHES and self.control.size > 1
        if self._comparing:
            settings = settings_of(self.trainer.optimizers) if what == TRAINING else {}
            found = self.control.start_all_gather((fingerprint(batch), settings))
            where = f"{what}, batch {batch_idx}"
            check = partial(_check_same, found, self.control.ranks, where)
            if what == TRAINING:
                self.connections.check_later(found.come, check, late=1)
            else:
                check()

    def _evaluation_number(self) -> int:
        """Different from batch to batch, the same after a resume at the same place."""
        self._evaluated += 1
        return (self.trainer.fit_loop.total_batch_idx + 1 << 20) + self._evaluated


def _key_of_evaluation(step: Callable[..., Any], item: Item, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the name of the step and the number of its loader; single samples, which need no cut, by themselves."""
    return step.__name__, *arguments[1:2], item.rows == 1


def _check_same(found: Coming[list[tuple[str, dict[str, str]]]], ranks: Sequence[int], where: str) -> None:
    batches, settings = zip(*found(), strict=True)
    check_same_settings(settings, ranks)
    check_same(batches, ranks, where)


def _other_layers(where: str, said: Sequence[str], ranks: Sequence[int]) -> PipelineError:
    listed = "; ".join(f"{layers} on rank {rank}" for layers, rank in zip(said, ranks, strict=True))
    return PipelineError(
        f"{where}: the ranks of one pipeline have the batch use different layers ({listed}), so that stages would be "
        "trained by different subnets. layers_of_batch must depend on the batch, or on numbers that are the same on "
        "all ranks: give explorers and spaces one seed"
    )
