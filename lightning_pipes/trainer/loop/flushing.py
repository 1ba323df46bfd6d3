"""One batch after another: all stages end it before the next one begins, and Lightning steps the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.item import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.run import TRAINING, PipelineRun, Training
from lightning_pipes.trainer.loop.seen import batches_left
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.module.batches import rows_of
from lightning_pipes.trainer.module.checks import warn_about_small_batch
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.reports.report import KEPT_STEPS, Window
from lightning_pipes.trainer.reports.timing import Share
from lightning_pipes.trainer.step.gradients import FreshGradients
from lightning_pipes.trainer.step.parameter_hooks import ParameterHooks
from lightning_pipes.trainer.step.steps import TrainingBatch


class Flushing(Training):
    """Of a schedule that flushes."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._gradients = FreshGradients()
        self._hooks = ParameterHooks(run.device)
        self._keep_old = is_overridden("optimizer_zero_grad", run.cut.module)

    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        run, trainer = self._run, self._run.trainer

        # 1. All ranks got the same batch.
        rows = rows_of(batch)
        batch_idx = arguments[0] if arguments else trainer.fit_loop.batch_idx
        run.check(batch, batch_idx, TRAINING)

        # 2. The plan of a batch of so many samples; layers that it has on other ranks move.
        mark = run.mark(batch, batch_idx)
        divisor = trainer.accumulate_grad_batches
        number = trainer.fit_loop.total_batch_idx
        first = batch_idx % divisor == 0
        run.moving.gradients = self._keep_old or not first
        plans = run.moving.plans(partial(self._revised, rows, number), number)
        plan, order = plans.for_rows(rows)
        if not run.windows:
            warn_about_small_batch(rows, plan.n_stages)
        run.turn_to(plan, order)
        run.moving.gradients = True

        # 3. Forward and backward of all micro-batches; the user's step runs on the last stage.
        run.part.buffers.before_batch()
        data = TrainingBatch(batch, rows, arguments, divisor, samples=run.lists.of(batch, rows), complete=complete)
        run.steps.begin_batch()
        run.begin_loss_check(data)
        tell = run.control.prepare_broadcast(run.last_rank)
        gradients = self._gradients.made(optimizers, run.part.unstepped, first, self._keep_old)
        part, alone = run.part, first and complete

        def sum_of_hooked(parameters: Sequence[nn.Parameter]) -> None:
            if not complete:  # else they are summed with all others
                part.shared.sum_gradients_of(parameters)

        hooks = self._hooks.deferred(part.parameters, part.reducer, alone, sum_of_hooked)
        with run.hidden.batch(training=True), gradients, hooks:
            item = Item(number, rows, data)
            run.inject(item)
            run.engine.drain()

            # 4. Gradients summed over who shares a parameter, and averaged over replicas, if a step may follow.
            if complete:
                part.shared.sum_gradients()
                if part.reducer is not None:
                    part.reducer.finish()

        # 5. What was to be checked meanwhile, and the loss, before anything steps by these gradients.
        run.connections.check()
        run.check_loss(item)
        window = Window(plan, order, run.engine.events)
        run.windows.append(window)
        if run.plans.every:
            run.looks.add(window)
        if len(run.took) < KEPT_STEPS:
            run.took.append(Share.of(run.engine.events).took)

        # 6. The last stage tells all ranks what the step gave and logged; every rank logs it.
        message = None
        if run.last:
            out, logged = data.result()
            message = (out, run.steps.changes(), run.replay.pack(logged), mark)
        out, changes, logged, last_mark = tell(message)
        run.steps.settle(None if run.last else changes)
        run.check_mark(mark, last_mark, f"{TRAINING}, batch {batch_idx}")
        with trainer.precision_plugin.train_step_context():  # numbers become tensors of its default type
            run.replay.replay(logged)
        return move_data_to_device(out, run.device)

    def _revised(self, rows: int, batch: int) -> Plans:
        """The answer of the planner, when it is to look again."""
        run, plans = self._run, self._run.plans
        if not plans.due(batch):
            return plans
        looks = run.looks.look(plans.for_rows(rows)[0])
        return plans.revised(rows, looks, batches_left(run.trainer))

    def drain(self) -> None:
        pass

    def agreement(self, stops: StopAgreement) -> Callable[[], None]:
        run, trainer = self._run, self._run.trainer
        agree = run.connections.agreement(trainer, stops, run.control)

        def then_settle() -> None:
            agree()
            if private.validation_follows(trainer) or trainer.is_last_batch:
                run.drain()

        return then_settle

    def batch_complete(self, stage: Stage, item: Item) -> None:
        """Lightning steps when the gradients of all stages are complete."""

    def give_back_gradients(self) -> None:
        self._gradients.give_back()
