"""One batch after another: all stages end it before the next one begins, and Lightning steps the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from lightning_pipes.engine.compute.item import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.trainer.loop.run import TRAINING, PipelineRun, Training
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.module.batches import rows_of
from lightning_pipes.trainer.module.checks import warn_about_small_batch
from lightning_pipes.trainer.reports.report import Window
from lightning_pipes.trainer.reports.timing import Share
from lightning_pipes.trainer.step.gradients import FreshGradients
from lightning_pipes.trainer.step.steps import TrainingBatch


class Flushing(Training):
    """Of a schedule that flushes."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._gradients = FreshGradients()
        self._keep_old = is_overridden("optimizer_zero_grad", run.cut.module)

    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        run, trainer = self._run, self._run.trainer
        rows = rows_of(batch)
        batch_idx = arguments[0] if arguments else trainer.fit_loop.batch_idx
        run.check(batch, batch_idx, TRAINING)
        divisor = trainer.accumulate_grad_batches
        run.buffers.before_batch()
        data = TrainingBatch(batch, rows, arguments, divisor)
        plan, order = run.plans.for_rows(rows)
        if not run.windows:
            warn_about_small_batch(rows, plan.n_stages)
        if plan is not run.engine.plan:
            run.engine.adopt(plan, order)
        run.begin_loss_check(data)
        first = batch_idx % divisor == 0
        tell = run.control.prepare_broadcast(run.last_rank)
        with run.hidden.batch(training=True), self._gradients.made(optimizers, first, self._keep_old):
            item = Item(trainer.fit_loop.total_batch_idx, rows, data)
            run.engine.inject(item)
            if run.reducer is not None:
                run.reducer.on = complete
            run.engine.drain()
            if complete:
                run.shared.sum_gradients()
                if run.reducer is not None:
                    run.reducer.finish()
        run.connections.check()
        run.check_loss(item)
        run.windows.append(Window(plan, order, run.engine.events))
        run.took.append(Share.of(run.engine.events).took)
        message = None
        if run.last:
            out, logged = data.result()
            message = (out, run.replay.pack(logged))
        out, logged = tell(message)
        with trainer.precision_plugin.train_step_context():  # numbers become tensors of its default type
            run.replay.replay(logged)
        return move_data_to_device(out, run.device)

    def drain(self) -> None:
        pass

    def agreement(self, stops: StopAgreement) -> Callable[[], None]:
        return self._run.connections.agreement(self._run.trainer, stops, self._run.control)

    def batch_complete(self, stage: Stage, item: Item) -> None:
        """Lightning steps when the gradients of all stages are complete."""

    def give_back_gradients(self) -> None:
        self._gradients.give_back()
