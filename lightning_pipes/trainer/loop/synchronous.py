"""The training loop of schedules that flush: all stages finish a batch before the next batch begins.

Lightning steps the optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.data.batches import rows_of
from lightning_pipes.trainer.loop.run import PipelineRun, TrainingLoop
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.loop.watcher import TrainingStep
from lightning_pipes.trainer.reports.report import Window
from lightning_pipes.trainer.results.logs import LogCall
from lightning_pipes.trainer.user.parameter_hooks import ParameterHooks

Gradients = list[tuple[torch.Tensor, torch.Tensor]]


class FreshGradients:
    """Protect the gradients of the pipeline from `zero_grad`, and return them in `backward`.

    Parameters that do not belong to an optimizer keep their gradients from batch to batch, as on one process. Their
    gradients of earlier windows are removed while a batch computes its own gradients, because several ranks may sum
    these.
    """

    def __init__(self) -> None:
        self._fresh: Gradients | None = None
        self._others: list[torch.Tensor] = []
        self._carried: Gradients = []  # gradients from before this accumulation window that no optimizer clears

    @contextmanager
    def set_aside(
        self, optimizers: Iterable[Optimizer], unoptimized: Sequence[torch.Tensor], first: bool, keep_old: bool = False
    ) -> Iterator[None]:
        """Set aside the gradients that the block computes.

        On the `first` batch of an accumulation window, the old gradients of the optimizers' parameters are dropped
        before the block, because Lightning is about to clear them. With `keep_old`, they are kept until Lightning
        decides about them, which takes memory for both. On later batches of the window, gradients are accumulated as
        usual.

        Args:
            optimizers: the optimizers of this rank.
            unoptimized: parameters of this rank that no optimizer has.
            first: whether this is the first batch of an accumulation window.
            keep_old: whether to keep the old gradients.
        """
        self._fresh = None
        if not first:
            for p, before in self._carried:
                p.grad = None if p.grad is None else p.grad - before
            yield
            for p, before in self._carried:
                p.grad = before if p.grad is None else p.grad + before
            return
        stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        known = {id(p) for p in stepped}
        self._others = [p for p in unoptimized if id(p) not in known]
        old = [p.grad if keep_old else None for p in stepped] + [p.grad for p in self._others]
        for p in (*stepped, *self._others):
            p.grad = None
        yield
        self._fresh = [(p, p.grad) for p in (*stepped, *self._others) if p.grad is not None]
        for p, grad in zip((*stepped, *self._others), old, strict=True):
            p.grad = grad

    def give_back(self) -> None:
        """Add the gradients that were set aside to the gradients that Lightning has left."""
        if self._fresh is not None:
            self._carried = [(p, p.grad) for p in self._others if p.grad is not None]
        for p, grad in self._fresh or ():
            p.grad = grad if p.grad is None else p.grad + grad
        self._fresh = None


class SynchronousLoop(TrainingLoop):
    """Train with a schedule that flushes."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._gradients = FreshGradients()
        self._hooks = ParameterHooks(run.device)
        self._keep_old = is_overridden("optimizer_zero_grad", run.cut.module)

    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        """Train one batch: choose its plan, run it, sum its gradients, and log the values of the last stage.

        The gradients are set aside until `give_back_gradients`, because Lightning clears the gradients of earlier
        batches in between.
        """
        watchers, step = self._run.watchers, self._begin(batch, arguments, complete)
        watchers.before_batch(step)
        self._plan(step)
        with watchers.around_batch(step), self._fresh_gradients(step, optimizers), self._deferred_hooks(step):
            self._run_batch(step)
            self._reduce_gradients(step)
        with self._run.local_layers.gathered.evaluation():  # watchers may run layers again
            watchers.before_optimizer_step(step)
        step.item = None  # break the reference cycle, so that both are freed immediately
        out, logged = self._share_result(step)
        watchers.after_batch(step)
        return self._log_results(out, logged)

    def _begin(self, batch: Any, arguments: tuple[Any, ...], complete: bool) -> TrainingStep:
        run, trainer = self._run, self._run.trainer
        divisor, batch_idx = trainer.accumulate_grad_batches, arguments[0] if arguments else trainer.fit_loop.batch_idx
        step = TrainingStep(
            batch,
            rows_of(batch, run.plans.microbatches > 1),
            arguments,
            divisor,
            complete=complete,
            number=trainer.fit_loop.total_batch_idx,
            batch_idx=batch_idx,
            first=batch_idx % divisor == 0,
        )
        run.relocation.keeps_gradients = self._keep_old or not step.first
        return step

    def _plan(self, step: TrainingStep) -> None:
        """Switch to the plan for the number of samples in the batch.

        Layers that the plan places on other ranks move.
        """
        run = self._run
        plan, step.order = (step.plans or run.plans).for_rows(step.rows)
        run.switch_plan(plan, step.order)
        run.relocation.keeps_gradients = True
        run.sort_samples(step)
        run.user_steps.begin_batch()
        run.weigh_losses(step)
        step.share = run.control.prepare_broadcast(run.last_rank)

    def _fresh_gradients(self, step: TrainingStep, optimizers: Sequence[Optimizer]) -> AbstractContextManager[None]:
        """Protect the gradients of the batch from Lightning's `zero_grad`."""
        return self._gradients.set_aside(optimizers, self._run.local_layers.unoptimized, step.first, self._keep_old)

    def _deferred_hooks(self, step: TrainingStep) -> AbstractContextManager[None]:
        """Run the user's hooks of parameters once per batch instead of once per micro-batch."""
        part = self._run.local_layers

        def sum_of_hooked(parameters: Sequence[nn.Parameter]) -> None:
            if not step.complete:  # otherwise, they are summed with all others
                part.shared.sum_gradients_of(parameters)

        return self._hooks.defer_hooks(part.parameters, part.reducer, step.first and step.complete, sum_of_hooked)

    def _run_batch(self, step: TrainingStep) -> None:
        """Run the forwards and backwards of all micro-batches.

        The user's step runs around the layers, or on every stage if the module is cut by units.
        """
        run = self._run
        run.inject(step)
        with run.user_steps.around_batch():
            run.engine.drain()
        if step.order is not None:
            step.window = Window(run.engine.plan, step.order, run.engine.events)

    def _reduce_gradients(self, step: TrainingStep) -> None:
        if step.complete:
            self._run.local_layers.complete_gradients()

    def _share_result(self, step: TrainingStep) -> tuple[Any, Sequence[LogCall]]:
        """Broadcast the result and the logs of the user's step from the last stage."""
        run, message = self._run, None
        if len(run.last_stage_ranks) > 1:
            found = run.control.gather(run.results_for_last_rank(step), run.last_rank)
            for results in found or ():
                step.results.update(move_data_to_device(results, run.device))
        if run.is_last_rank:
            out, logged = step.result()
            message = (out, run.user_steps.collect_changes(), run.replay.pack_calls(logged), step.mark)
        out, changes, logged, step.last_mark = step.share(message)
        run.user_steps.apply_changes(None if run.is_last_rank else changes)
        return out, logged

    def _log_results(self, out: Any, logged: Sequence[LogCall]) -> Any:
        """Replay the logs of the user's step, and return its result."""
        run = self._run
        with run.trainer.precision_plugin.train_step_context():  # numbers become tensors of its default dtype
            run.replay.replay_calls(logged)
        return move_data_to_device(out, run.device)

    def drain(self) -> None:
        pass

    def make_agreement(self, stops: StopAgreement) -> Callable[[], None]:
        run, trainer = self._run, self._run.trainer
        agree = run.connections.make_agreement(trainer, stops, run.control)

        def then_settle() -> None:
            agree()
            if private.validation_follows(trainer) or trainer.is_last_batch:
                run.drain()

        return then_settle

    def batch_complete(self, stage: Stage, item: Item) -> None:
        """Do nothing, because Lightning steps when the gradients of all stages are complete."""

    def give_back_gradients(self) -> None:
        self._gradients.give_back()
