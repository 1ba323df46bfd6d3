"""The training loop for batches that overlap: schedules that do not flush between batches, inside Lightning's loop.

`train` returns as soon as no further work is possible without another batch, while earlier batches are still in flight.
The ranks are therefore at different batches, and must not wait for each other between batches. Every stage steps its
own optimizers, results are exchanged through the store, and ranks agree on stops with a delay. The window is drained
before every operation that requires all ranks to be at one place with up-to-date weights: a validation, a checkpoint,
the end of an epoch, and a stop.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import RankResources, Stage
from lightning_pipes.engine.compute.weights import Change
from lightning_pipes.engine.residency.layer_memory import StateMemory
from lightning_pipes.ir import LayerUse, PipelineError, Policy, Schedule
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.data.batches import rows_of
from lightning_pipes.trainer.loop.between_steps import BATCH_HOOKS, BetweenSteps
from lightning_pipes.trainer.loop.layer_copies import Cuts, LayerCopies
from lightning_pipes.trainer.loop.offload import add_offload
from lightning_pipes.trainer.loop.result_exchange import ResultExchange
from lightning_pipes.trainer.loop.run import PipelineRun, TrainingLoop
from lightning_pipes.trainer.loop.step_statistics import AsynchronousStatistics, WindowRecorder
from lightning_pipes.trainer.loop.stopping import LateAgreement, StopAgreement
from lightning_pipes.trainer.loop.uses import (
    ChoosesLayers,
    PartialSteps,
    check_layers,
    use_of,
    warn_without_uses,
)
from lightning_pipes.trainer.loop.watcher import AsynchronousStep
from lightning_pipes.trainer.optimizers.optimizers import check_momentum, predict_change
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.notices import Notices
from lightning_pipes.trainer.ranks.ranks import Grid
from lightning_pipes.trainer.relocation.transfer import settings_of, with_settings
from lightning_pipes.trainer.user.hooks import has_hooks
from lightning_pipes.trainer.user.remote_tensors import RemoteTensor


class AsynchronousLoop(TrainingLoop):
    """Train with a schedule that does not flush.

    Args:
        run: the run of the training.
        control: the collectives of all ranks, including the ranks of other replicas.
        memory: the memory in which layers that batches choose are swapped, or weight versions of a schedule with a
            fixed order. With None, all of them stay on the device.

    Attributes:
        between: rejects hooks that change values that batches in flight use.
        statistics: the statistics that ranks exchange for planners.
        orders_uses: whether a policy orders the uses of layers, so that results equal the results of one batch after
            another.
        serialized: whether batches run one by one, because memory is short.
        unstepped_batches: batches in flight, by number, that may have gradients.
    """

    is_asynchronous = True

    def __init__(self, run: PipelineRun, control: Control, memory: StateMemory | None = None) -> None:
        check_layers(run.cut.module, run.cut.full)
        schedule, several = run.plans.schedule, len(run.global_ranks) > 1
        if schedule.predicts_weights:
            check_prediction(run, memory)
        self._run = run
        self._all = control
        plan, _ = run.plans.for_rows(run.plans.trial_rows)
        resources = RankResources(replica_averages=run.local_layers.order_by_batch(lambda: run.engine.is_open))
        if memory is not None:
            resources = add_offload(resources, run, plan, memory)
        self._memory = resources.memory

        # Data that ranks exchange while they are at different batches.
        depth = schedule.depth if isinstance(schedule, Policy) else 0
        self._max_lag = run.relocation.max_lag = max(len(run.global_ranks), depth)
        notices, rank = Notices(run.control), run.global_ranks[run.local_layers.holdings.rank]
        self._results = ResultExchange(notices, run.control.ranks[0], self._max_lag, run.last_stage_ranks)
        self.statistics = AsynchronousStatistics(run.statistics, notices, control.ranks, rank, self._max_lag)
        warn_without_uses(run.cut.module, schedule, len(run.global_ranks))
        self._mirroring: LayerCopies | None = None
        if several and Cuts.are_needed(run.cut.module, schedule):
            self._mirroring = LayerCopies(run, control, self._memory)
            resources = self._mirroring.add_to(resources)
            run.relocation.check_layers_stay("each batch has its own cut")

        self.resources = resources

        # Values that hooks may see and change while batches are in flight.
        overrides_hooks = partial(has_hooks, run.cut.module, private.callbacks(run.trainer))
        self.between = BetweenSteps(
            schedule.name,
            run.cut.module,
            run.cut.full,
            lambda: run.local_layers.holdings.local,
            overrides_hooks,
            memory is None,
        )
        self._has_other_ranks = several
        if several:
            run.cut.scope.on_layers = self._warn_of_old_weights
        self._has_batch_hooks = several and overrides_hooks(BATCH_HOOKS)
        self._names_layers = isinstance(run.cut.module, ChoosesLayers)
        self.orders_uses = isinstance(schedule, Policy)
        run.state.expect_overlap(schedule.name, alone=not several)
        run.user_steps.expect_overlap(schedule.name)

        # Batches in flight, the oldest first.
        self._under_way: deque[AsynchronousStep] = deque()
        self._unpublished: deque[AsynchronousStep] = deque()  # batches whose results the last stage has not sent
        self.unstepped_batches: dict[int, Item] = {}
        self._recent: dict[int, Item] = {}  # these batches, and later ones that have overtaken them
        self._last_number = -1
        self._latest: Any = torch.full((), torch.nan, device=run.device)
        self._window = WindowRecorder()
        self._window_plans = run.plans
        self.serialized = False

        # Optimizers, and the gradients that they use.
        self._optimizers: Sequence[Optimizer] = ()
        self._groups: dict[int, tuple[int, int]] = {}  # by the id of a parameter: its optimizer and its group
        self._steps: PartialSteps | None = None  # for this window only, because layers move between windows
        self._stepped_ids: set[int] | None = None  # ids of the parameters that a batch is stepping
        self._kept_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._step_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        """The gradients that were used to step the latest batch, if this pipeline has no other rank."""
        self._shows_gradients = False

    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        """Start one batch, and run everything that can run without another batch.

        Args:
            batch: the batch.
            arguments: the arguments of training_step after the batch.
            optimizers: the optimizers of this rank.
            complete: whether an optimizer step follows this batch.

        Returns:
            The latest result that is available on this rank. On the last stage, it is the result of this batch if the
            batch has finished. Before the first result, it is NaN.
        """
        watchers, step = self._run.watchers, self._begin(batch, arguments, complete)
        self._hide_gradients()
        self._step_gradients.clear()
        watchers.before_batch(step)
        self._run.awaits_batch = False
        self._plan(step, optimizers)
        with watchers.around_batch(step), self.own_gradients():
            self._inject(step)
            self._run.engine.progress()
        self._log_results()
        if private.pauses_after_this_batch(self._run.trainer):
            self._run.drain()
        return self._latest

    def _begin(self, batch: Any, arguments: tuple[Any, ...], complete: bool) -> AsynchronousStep:
        trainer = self._run.trainer
        return AsynchronousStep(
            batch,
            rows_of(batch, self._run.plans.microbatches > 1),
            arguments,
            trainer.accumulate_grad_batches,
            complete=complete,
            number=trainer.fit_loop.total_batch_idx,
            batch_idx=arguments[0] if arguments else trainer.fit_loop.batch_idx,
        )

    def _plan(self, step: AsynchronousStep, optimizers: Sequence[Optimizer]) -> None:
        """Switch to the plan of the batch. If it is another plan than before, the window ends first."""
        run, engine, plans = self._run, self._run.engine, step.plans or self._run.plans
        if engine.is_open and (
            step.rows > engine.plan.jobs[0].rows or plans is not self._window_plans or self.serialized
        ):
            self.drain()
        if not engine.is_open:
            self._window_plans = plans
            with self.own_gradients():  # accumulated gradients move with their layers
                run.switch_plan(*plans.for_rows(step.rows))
            self.between.forget_layers()
            self._steps = None
            self._groups.clear()
            run.state.remember_state()
        if self._optimizers is not optimizers:
            self._optimizers, self._steps = optimizers, None
            if self._mirroring is not None:
                self._mirroring.trains_by(optimizers)
            for optimizer in optimizers:
                private.expect_late_steps(optimizer)
            if run.plans.schedule.predicts_weights:
                check_momentum(map(private.plain_optimizer, optimizers), run.plans.schedule.name)
        self._last_number = step.number
        step.settings = [settings_of(o) for o in optimizers]
        run.sort_samples(step)
        step.initial_state = run.state.capture_state() if self._has_batch_hooks else None
        run.weigh_losses(step)
        step.use = use_of(run.cut.module, run.cut.full, step.batch, engine.plan)

    def predict_changes(self, item: Item) -> Change | None:
        """Return a function that predicts the updates of parameters, using the optimizer settings of the batch."""
        if not self._run.plans.schedule.predicts_weights:
            return None
        optimizers = [private.plain_optimizer(o) for o in self._optimizers]
        if not self._groups:
            self._groups = {
                id(p): (k, n)
                for k, o in enumerate(optimizers)
                for n, g in enumerate(o.param_groups)
                for p in g["params"]
            }

        def predict(parameter: nn.Parameter) -> torch.Tensor | None:
            if id(parameter) not in self._groups:
                return None
            k, n = self._groups[id(parameter)]
            return predict_change(optimizers[k], item.data.settings[k][n], parameter)

        return predict

    def _inject(self, step: AsynchronousStep) -> None:
        """Add the batch to the batches in flight."""
        run, plan, use = self._run, self._run.engine.plan, step.use
        self._under_way.append(step)
        if run.is_last_rank:
            self._unpublished.append(step)
        if self._mirroring is not None and use is not None:
            use = self._mirroring.layer_use(step.batch, use, plan)
        self.unstepped_batches[step.number] = item = run.inject(step, use)
        oldest = min(self.unstepped_batches)
        self._recent = {n: each for n, each in self._recent.items() if n >= oldest} | {step.number: item}
        self._window.add(use or LayerUse.from_plan(plan))

    def drain(self) -> None:
        run, engine = self._run, self._run.engine
        self.between.check()
        if not engine.is_open:
            return
        with private.as_in_training_step(run.trainer), torch.enable_grad():
            with self.own_gradients():
                engine.drain()
                if self.orders_uses:
                    self.between.check_gradients(self._last_number, self._with_gradients(), thorough=True)
            self._log_results()
        run.state.synchronise_ranks(run.control, run.last_rank, run.is_last_rank)
        if self._memory is not None:
            self._memory.flush()
        window = self._window.last_window(engine, self._window_plans)
        run.windows.append(window)
        if run.plans.every:
            self.statistics.add_window(window)

    def make_agreement(self, stops: StopAgreement) -> Callable[[], None]:
        run = self._run
        late = LateAgreement(run.trainer, stops, self._all, self._max_lag, lambda: not run.engine.is_open, run.drain)
        return late.agree_on_stop

    def batch_complete(self, stage: Stage, item: Item) -> None:
        """Step the parameters of a batch on this stage, with the settings that its optimizers had when the batch began.

        Batches of one accumulation window are stepped together.
        """
        run, step = self._run, item.data
        run.watchers.before_optimizer_step(step)
        step.stepped += 1
        if step.stepped == len(run.stages):
            step.item = None  # break the reference cycle, so that both are freed immediately
        if run.has_last_stage and not run.is_last_rank:
            self._results.send_part(run.results_for_last_rank(step))
        stage.average_gradients(item)
        if step.complete and run.local_layers.reducer is not None:
            run.local_layers.reducer.finish()
        elif step.complete and run.local_layers.replica_averages is None:
            run.local_layers.shared.sum_gradients()  # over the ranks of the stage, if it has several
        with self._own_gradients_of(stage, item) as mine, self._shown(stage, item):
            with self._hooks(item, mine):
                run.trainer.precision_plugin.post_backward(torch.zeros(()), run.cut.module)
            if step.complete:
                for listener in run.listeners:
                    listener.before_optimizer_step(stage, item)
                self._step(stage, item, mine)
        if step.complete:
            for listener in run.listeners:
                listener.after_optimizer_step(stage, item)
        self._send_results()

    @contextmanager
    def _own_gradients_of(self, stage: Stage, item: Item) -> Iterator[list[nn.Parameter]]:
        """Give only the parameters that `item` steps on a stage their gradients inside the block."""
        with_gradients, mine = self._with_gradients(), stage.stepped_parameters(item)
        if item.use is not None:
            self.between.check_gradients(item.number, with_gradients)
        ids = {id(p) for p in mine}
        others = [(p, p.grad) for p in with_gradients if id(p) not in ids]
        for p, _ in others:
            p.grad = None
        self._stepped_ids = {id(p) for p in mine}
        yield mine
        self._stepped_ids = None
        for p, gradient in others:
            p.grad = gradient

    @contextmanager
    def _hooks(self, item: Item, mine: Sequence[nn.Parameter]) -> Iterator[None]:
        """Let the user's hooks in the block change only the weights that `item` steps on this rank.

        They see the state of the module as of `item`.
        """
        others = [each.use for each in self._recent.values() if each is not item] if self.orders_uses else ()
        with (
            self.between.step_hooks(others, mine, self._optimizers),
            item.data.in_initial_state,
            self._run.state.watch.watch_step_hooks(),
        ):
            yield

    def _step(self, stage: Stage, item: Item, mine: Sequence[nn.Parameter]) -> None:
        run, step = self._run, item.data
        steps = self._steps = self._steps or PartialSteps(self._optimizers)
        run.relocation.before_step(item.number)
        for number, (optimizer, settings) in enumerate(zip(self._optimizers, step.settings, strict=True)):
            with steps.restrict_optimizer(number, optimizer, mine), self._stepping(stage, item):
                with with_settings(optimizer, settings):
                    with self._hooks(item, mine):
                        private.before_step(run.trainer.precision_plugin, run.cut.module, optimizer)
                    if not run.relocation.defer_step(item.number, number, optimizer, stage.layers):
                        optimizer.step()
                if not self._has_other_ranks and item.number == self._last_number:
                    self._step_gradients += [(p, p.grad) for p in mine if p.grad is not None]
                optimizer.zero_grad()
        if step.stepped == len(run.stages):
            before = [n for n, each in self.unstepped_batches.items() if n < item.number and not each.data.complete]
            for number in (*before, item.number):
                del self.unstepped_batches[number]

    def _stepping(self, stage: Stage, item: Item) -> AbstractContextManager[None]:
        if self._mirroring is None or item.use is None:
            return nullcontext()
        return self._mirroring.step_layers(item.use.stepped_layers(stage.number))

    def _shown(self, stage: Stage, item: Item) -> AbstractContextManager[None]:
        if self._mirroring is None or item.use is None:
            return nullcontext()
        return self._mirroring.show_layers(item.use.stepped_layers(stage.number))

    def give_back_gradients(self) -> None:
        """Show hooks the same gradients as on one process, if all layers are on this rank.

        On one process, gradients are cleared in the next batch.
        """
        if not self._has_other_ranks:
            self._shows_gradients = True
            for p, gradient in (*self._accumulated(), *self._step_gradients):
                p.grad = gradient

    def why_no_state(self, parameter: torch.Tensor | None) -> str:
        schedule = self._run.plans.schedule.name
        foreign = isinstance(parameter, RemoteTensor)
        if not self.orders_uses or (foreign and not self._names_layers):
            return ""  # stages miss steps, or each state is changed on its own rank
        if foreign or (parameter is None and self._names_layers and self._has_other_ranks):
            return (
                ": the layers of other ranks that have states depend on the batches so far, and with schedule "
                f"{schedule!r} stages take optimizer steps at different times. Read the states of each parameter "
                "separately, for example with `if not p.is_meta and p in optimizer.state`"
            )
        if self._is_settled(parameter):
            return ""
        return (
            f" while batches that update the same weights are in flight: with schedule {schedule!r}, the state belongs "
            "to an earlier batch. Read the states of the batch's own weights in on_before_optimizer_step or in a hook "
            "registered with optimizer.register_step_post_hook, and the states of all weights in on_train_epoch_start. "
            "Otherwise, use a schedule that flushes between batches, such as '1f1b'"
        )

    def _is_settled(self, parameter: torch.Tensor | None) -> bool:
        """Return whether a parameter of this rank, or all of them for None, has been stepped by all batches so far and
        no others."""
        if self._stepped_ids is not None:
            alone = parameter is None and not self._has_other_ranks and len(self.unstepped_batches) == 1
            return alone or id(parameter) in self._stepped_ids
        if not self._run.engine.is_open or not self.unstepped_batches:
            return True
        uses = [item.use for item in self.unstepped_batches.values()]
        return parameter is not None and not self.between.is_used(parameter, uses)

    def _warn_of_old_weights(self) -> None:
        """Warn about a hook that looks at layers between two batches, on the rank that detects it."""
        scope = self._run.cut.scope
        if self._stepped_ids is not None or not self._run.engine.is_open:
            return
        scope.on_layers = lambda: None
        warnings.warn(
            f"{scope.hook} reads layers while batches are in flight. With schedule {self._run.plans.schedule.name!r}, "
            "each stage takes its optimizer step as soon as the gradients of a batch are complete. Weights may "
            "therefore belong to an earlier batch, gradients are already cleared, and averages or logs of them differ "
            "from one process. Read weights in on_train_epoch_end or in a hook registered with "
            "optimizer.register_step_post_hook, and gradients in on_before_optimizer_step, or use a schedule that "
            "flushes between batches, such as '1f1b'",
            stacklevel=2,
        )

    def layer_use(self, batch: Any) -> LayerUse | None:
        run = self._run
        return None if self._memory is None else use_of(run.cut.module, run.cut.full, batch, run.engine.plan)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()

    @contextmanager
    def own_gradients(self) -> Iterator[None]:
        """Give parameters their accumulated gradients inside the block. Outside of it, they have none.

        Lightning clears gradients when it steps an optimizer, but stages step at other times. The gradients of batches
        that wait for a step are therefore kept here between two calls of `train`. Gradients that `give_back_gradients`
        shows to hooks in the meantime are hidden first and shown again after the block.
        """
        shown = self._hide_gradients()
        for p, gradient in self._kept_gradients:
            p.grad = gradient
        yield
        self._kept_gradients = [(p, p.grad) for p in self._with_gradients() if p.grad is not None]
        for p, _ in self._kept_gradients:
            p.grad = None
        if shown:
            self.give_back_gradients()

    def _hide_gradients(self) -> bool:
        """Remove the gradients that hooks may see between batches, and return whether there were any.

        Changes that a hook made to gradients that still wait for a step are kept.
        """
        shown, self._shows_gradients = self._shows_gradients, False
        if shown:
            if self._accumulated():
                self._kept_gradients = [(p, p.grad) for p, _ in self._kept_gradients if p.grad is not None]
            for p, _ in (*self._kept_gradients, *self._step_gradients):
                p.grad = None
        return shown

    def _accumulated(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the gradients to which the next batch is added before a step."""
        return [] if any(item.data.complete for item in self.unstepped_batches.values()) else self._kept_gradients

    def _with_gradients(self) -> list[torch.Tensor]:
        """Return the parameters of this rank that have a gradient of a batch in flight."""
        stages, batches = self._run.stages.values(), self.unstepped_batches.values()
        found = {
            id(p): p
            for item in batches
            for stage in stages
            for p in stage.stepped_parameters(item)
            if p.grad is not None
        }
        return list(found.values())

    def _send_results(self) -> None:
        """Send the results of finished batches from the last stage to the other stages, as soon as they are complete.

        The other stages wait for a result after they have stepped, and the last stage may wait for their computations.
        """
        several = len(self._run.last_stage_ranks) > 1
        while self._unpublished and (
            self._unpublished[0].stepped if several else self._all_losses(self._unpublished[0])
        ):
            step = self._unpublished.popleft()
            for part in self._results.receive_parts() if several else ():
                step.results.update(move_data_to_device(part, self._run.device))
            out, logged = step.result()
            step.message = (out, self._run.replay.pack_calls(logged), step.mark)
            self._results.send_result(step.message)

    def _log_results(self) -> None:
        """Log the available results of batches."""
        run = self._run
        self._send_results()
        while self._under_way and self._is_known(self._under_way[0]):
            step = self._under_way.popleft()
            message = step.message
            out, logged, step.last_mark = self._results.receive_result() if message is None else message
            run.watchers.after_batch(step)
            with run.trainer.precision_plugin.train_step_context():
                run.replay.replay_calls(logged)
            self._latest = move_data_to_device(out, run.device)
            for listener in run.listeners:
                listener.after_result(step.number, step.loaded_batch, self._latest)

    def _is_known(self, step: AsynchronousStep) -> bool:
        return step.message is not None if self._run.is_last_rank else step.stepped == len(self._run.stages)

    @staticmethod
    def _all_losses(step: AsynchronousStep) -> bool:
        return sum(span.rows for span in step.results) == step.rows


def check_trainer_settings(trainer: pl.Trainer, schedule: Schedule | Policy, grid: Grid, shared: Sequence[str]) -> None:
    """Check for settings that need all stages at one batch, which never happens with a schedule that does not flush.

    Args:
        trainer: the trainer whose settings are checked.
        schedule: the schedule, which does not flush.
        grid: the replicas and stages.
        shared: names of the parameters that several ranks train.

    Raises:
        PipelineError: a setting cannot be used. The message names it and suggests an alternative.
    """
    name, flush = schedule.name, "or a schedule that flushes between batches, such as '1f1b'"
    by_norm = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"
    chooses = isinstance(schedule, Policy)  # a policy selects the next instruction among the ready ones
    refused = {
        "accumulate_grad_batches": (
            chooses and trainer.accumulate_grad_batches > 1,
            f"use a larger batch_size, {flush}",
        ),
        "gradient_clip_val": (chooses and by_norm, f"the norm is computed over all stages; clip by 'value', {flush}"),
        "ModelCheckpoint(train_time_interval=..., monitor=...)": (
            private.monitors_by_time(trainer),
            f"each rank has the metric of a different batch; use every_n_train_steps, {flush}",
        ),
        "precision='16-mixed'": (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"its scaler reads the gradients of all stages; use 'bf16-mixed', {flush}",
        ),
    }
    for what, (given, way_out) in refused.items():
        if given:
            raise PipelineError(
                f"{what} can't be used with schedule {name!r}, whose stages take optimizer steps at different times: "
                f"{way_out}"
            )
    if by_norm and grid.length > 1:
        rank_zero_warn(
            f"schedule {name!r}: each stage clips by the norm of its own layers, because stages take optimizer steps "
            f"at different times. gradient_clip_val={trainer.gradient_clip_val} bounds the norm of each stage, so the "
            "norm over all stages may be larger by a factor of up to the square root of the number of stages"
        )
    if shared:
        raise PipelineError(
            f"{', '.join(shared[:5])}: several ranks train these parameters, because they are outside of the pipelined "
            f"module or tied. With schedule {name!r} stages step at other times, and copies would become different; "
            f"put them into a layer of the nn.Sequential, {flush}"
        )


def check_prediction(run: PipelineRun, memory: StateMemory | None) -> None:
    """Check whether weights can be predicted in this run.

    Raises:
        PipelineError: an option conflicts with copies of weight versions, or with one update per batch.
    """
    refused = {
        "MemorySwap": memory is not None,
        "accumulate_grad_batches": run.trainer.accumulate_grad_batches > 1,
        "relocation='buffered'": run.relocation.may_defer_steps,
    }
    for what, given in refused.items():
        if given:
            raise PipelineError(
                f"schedule {run.plans.schedule.name!r} with predict=True extrapolates copies of the weights over one "
                f"update for each batch, which {what} prevents; leave one of them out"
            )
