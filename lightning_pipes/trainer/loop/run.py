"""One run of a Trainer method: the cut module, its engine, and the batches that go through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pipes.engine.compute.item import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.engine import Engine
from lightning_pipes.engine.messages.transport import make_transport
from lightning_pipes.engine.watch.points import point
from lightning_pipes.ir import Kind, Plan, Policy, Program
from lightning_pipes.trainer.loop.connections import Connections
from lightning_pipes.trainer.loop.part import Part
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.module.batches import SampleLists, check_same, fingerprint, rows_of
from lightning_pipes.trainer.module.checks import warn_about_small_batch
from lightning_pipes.trainer.module.optimizers import check_same_settings, settings_of
from lightning_pipes.trainer.module.tape import TapedLayer
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.ranks.control import Coming
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.reports.report import KEPT_STEPS, KEPT_WINDOWS, Window
from lightning_pipes.trainer.reports.stage_bytes import SavedBytes, StageBytes
from lightning_pipes.trainer.reports.timing import Share
from lightning_pipes.trainer.step.gradients import FreshGradients
from lightning_pipes.trainer.step.logs import LogReplay, merge, recorded
from lightning_pipes.trainer.step.loss_check import LossCheck
from lightning_pipes.trainer.step.steps import Context, EvaluationBatch, Steps, TrainingBatch

CHECKED_BATCHES = 2
"""Batches at the start of every epoch, and of a run, whose checksums all ranks compare."""

TRAINING = "training"


class PipelineRun:
    """Takes batches through the pipeline, from `setup` to `teardown` of the strategy.

    Attributes:
        windows: the last batches.
        took: nanoseconds of the last batches on this rank.
        streams: stages step apart, for batches overlap.

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

    Raises:
        PlanError: the transport can't be had here.
    """

    streams = False

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
    ) -> None:
        self.part = part
        self.cut = cut = part.cut
        self.plans = plans
        self.steps = steps
        self.global_ranks = global_ranks = tuple(part.holdings.global_ranks)
        self.windows: deque[Window] = deque(maxlen=KEPT_WINDOWS)
        self.took: deque[int] = deque(maxlen=KEPT_STEPS)
        self.replay = LogReplay(cut.module)
        self.fitting = trainer.state.fn == TrainerFn.FITTING
        self._trainer = trainer
        self._module = cut.module
        self._connections = connections
        self._control = control = ranks.pipeline
        self._device = device = ranks.device
        self._gradients = FreshGradients()
        self._keep_old = is_overridden("optimizer_zero_grad", cut.module)
        self._evaluated = 0
        self._hidden = part.hidden
        self._saved_bytes = SavedBytes()
        self.lists = SampleLists()
        rank = self._rank = part.holdings.rank
        plan, order = plans.for_rows(plans.trial_rows)
        self.last_rank = global_ranks[plan.ranks[-1]]
        self.first = plan.ranks[0] == rank
        self.last = plan.ranks[-1] == rank
        self._stages = self._made_stages(plan)
        self._loss_check = None
        if check_loss and self.fitting and self.last:
            needed = partial(self._saved_bytes.of_a_sample, plan.n_stages - 1)
            self._loss_check = LossCheck(cut, steps, device, needed)
        make = partial(make_transport, plan, rank, global_ranks, device, control.watch, transport)
        connect = partial(control.watch.call, make)
        self.engine = Engine(
            plan,
            order,
            self._stages,
            connections.transport(connect),
            rank=rank,
            device=device,
            seed=seed,
            watch=connections.engine_watch,
            turns=connections.turns,
        )
        point("transport.made")

    def train(
        self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool = True
    ) -> Any:
        """The result of the user's step, logged and with its loss, on every rank: forward and backward of one batch.

        Gradients are summed over all who hold a parameter if they are `complete`: a step may follow.
        """
        # 1. All ranks got the same batch.
        rows = rows_of(batch)
        batch_idx = arguments[0] if arguments else self._trainer.fit_loop.batch_idx
        self._check(batch, batch_idx, TRAINING)

        # 2. The plan of a batch of so many samples; layers that it has on other ranks move.
        divisor = self._trainer.accumulate_grad_batches
        self.plans = self.plans.revised(rows, self._trainer.fit_loop.total_batch_idx)
        plan, order = self.plans.for_rows(rows)
        if not self.windows:
            warn_about_small_batch(rows, plan.n_stages)
        self._turn_to(plan, order)

        # 3. Forward and backward of all micro-batches; the user's step runs on the last stage.
        self.part.buffers.before_batch()
        data = TrainingBatch(batch, rows, arguments, divisor, samples=self.lists.of(batch, rows))
        self._begin_loss_check(data)
        first = batch_idx % divisor == 0
        tell = self._control.prepare_broadcast(self.last_rank)
        with self._hidden.batch(training=True), self._gradients.made(optimizers, first, self._keep_old):
            item = Item(self._trainer.fit_loop.total_batch_idx, rows, data)
            self.engine.inject(item)
            reducer = self.part.reducer
            if reducer is not None:
                reducer.on = complete
            self.engine.drain()

            # 4. Gradients summed over who shares a parameter, and averaged over replicas, if a step may follow.
            if complete:
                self.part.shared.sum_gradients()
                if reducer is not None:
                    reducer.finish()

        # 5. What was to be checked meanwhile, and the loss, before anything steps by these gradients.
        self._connections.check()
        self._check_loss(item)
        self.windows.append(Window(plan, order, self.engine.events))
        self.took.append(Share.of(self.engine.events).took)
        self._evaluated = 0

        # 6. The last stage tells all ranks what the step gave and logged; every rank logs it.
        message = None
        if self.last:
            out, logged = data.result()
            message = (out, self.replay.pack(logged))
        out, logged = tell(message)
        with self._trainer.precision_plugin.train_step_context():  # numbers become tensors of its default type
            self.replay.replay(logged)
        return move_data_to_device(out, self._device)

    def drain(self) -> None:
        """Finishes what `train` has left for later: here nothing."""

    def agreement(self, stops: StopAgreement) -> Callable[[], None]:
        """A function that has the ranks agree on stopping after a batch; they all are at the same one."""
        return self._connections.agreement(self._trainer, stops, self._control)

    def _made_stages(self, plan: Plan) -> list[Stage]:
        reducer = self.part.reducer
        return [
            Stage(
                number,
                {n: TapedLayer(layer, n, self._hidden.layer) for n, layer in self.part.layers_of(number).items()},
                self._saved_bytes.around(number, self.steps.body(number)),
                self._batch_complete,
                recompute=bool(plan.recompute) and plan.recompute[number],
                last_backward=None if reducer is None else reducer.last_backward,
            )
            for number in plan.stages[self._rank]
        ]

    def _turn_to(self, plan: Plan, order: Program | Policy) -> None:
        """The next window is that of another plan; the layers that it has elsewhere move. Collective where any do."""
        if plan is self.engine.plan:
            return
        if plan.layers == self.part.holdings.layers:
            self.engine.adopt(plan, order)
            return
        self.part.move(plan.layers)
        self._saved_bytes.forget()
        self._stages = self._made_stages(plan)
        self.engine.adopt(plan, order, self._stages)

    def _begin_loss_check(self, data: TrainingBatch) -> None:
        """Called before a batch; its size has the plan of the engine."""
        if self._loss_check is not None:
            plan = self.engine.plan
            self._loss_check.begin(data, plan.spans(Kind.B, plan.n_stages - 1))

    def _check_loss(self, item: Item) -> None:
        """Called after a batch, before anything steps by its gradients."""
        if self._loss_check is not None:
            self._loss_check.compare(self._stages[-1], item)

    def _batch_complete(self, item: Item) -> None:
        """Called when a stage's gradients of a batch are complete; Lightning steps when those of all are."""

    def give_back_gradients(self) -> None:
        """Puts the gradients where the optimizer looks for them."""
        self._gradients.give_back()

    def evaluate(self, step: Callable[..., Any], context: Context, batch: Any, arguments: tuple[Any, ...]) -> Any:
        """Forward of one batch through `step`, which runs once on the whole batch; its result on every rank."""
        rows = rows_of(batch)
        self._check(batch, arguments[0] if arguments else 0, step.__name__)
        if not self._evaluated:
            self.part.buffers.before_batch()
        item = Item(self._evaluation_number(), rows, training=False)
        data = item.data = EvaluationBatch(context)
        message = None
        with self._hidden.batch(training=False):
            if self.first:
                with context():
                    data.x, data.whole = self.steps.capture(step, item, batch, arguments)
            outputs = self.engine.evaluate(item)
            logs = self._trainer.state.fn != TrainerFn.PREDICTING
            if self.last:
                with context():
                    if logs:
                        with recorded(self._module) as calls:
                            out = self.steps.finish(step, item, batch, arguments, outputs)
                        message = (out, self.replay.pack(merge([calls], [rows])))
                    else:
                        message = (self.steps.finish(step, item, batch, arguments, outputs), [])
        out, logged = self._control.broadcast(message, self.last_rank)
        with context():
            self.replay.replay(logged)
        return move_data_to_device(out, self._device)

    def stage_bytes(self, optimizers: Sequence[Optimizer]) -> dict[int, StageBytes]:
        """The bytes that the stages of this rank hold, once one batch was trained."""
        return self._saved_bytes.of({stage.number: stage.layers.values() for stage in self._stages}, optimizers)

    def close(self) -> None:
        """Ends the connections to the neighbours."""
        self.part.close()
        self.engine.close()

    def _check(self, batch: Any, batch_idx: int, what: str) -> None:
        if min(batch_idx, len(self.windows)) < CHECKED_BATCHES and self._control.size > 1:
            settings = settings_of(self._trainer.optimizers) if what == TRAINING else {}
            found = self._control.start_all_gather((fingerprint(batch), settings))
            where = f"{what}, batch {batch_idx}"
            check = partial(_check_same, found, self._control.ranks, where)
            if what == TRAINING:
                self._connections.check_later(found.come, check, late=1)
            else:
                check()

    def _evaluation_number(self) -> int:
        """Different from batch to batch, the same after a resume at the same place."""
        self._evaluated += 1
        return (self._trainer.fit_loop.total_batch_idx + 1 << 20) + self._evaluated


def _check_same(found: Coming[list[tuple[str, dict[str, str]]]], ranks: Sequence[int], where: str) -> None:
    batches, settings = zip(*found(), strict=True)
    check_same_settings(settings, ranks)
    check_same(batches, ranks, where)
