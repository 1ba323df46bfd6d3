"""Batches that overlap: schedules that do not flush between them, inside Lightning's loop.

`train` returns as soon as there is nothing to do without another batch, while earlier ones are still on their way back.
So the ranks are at different batches, and nothing may make them wait for each other there: every stage steps its own
optimizers, results go through the store, stops are agreed on late. Before whatever needs all ranks at one place, and
weights that are up to date, the window is drained: validation, checkpoints, the end of an epoch, stops.
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
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.engine.compute.weights import Change
from lightning_pipes.engine.residency.layer_memory import LayerMemory, StateMemory, VersionMemory
from lightning_pipes.engine.residency.mirrors import BulkTreeTransport
from lightning_pipes.engine.residency.upcoming import PREDICTORS, PredictorChoice
from lightning_pipes.ir import LayerUse, PipelineError, Plan, Policy, Schedule
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.layer_copies import Cuts, LayerCopies, LayerCosts
from lightning_pipes.trainer.loop.run import PipelineRun, TrainingLoop
from lightning_pipes.trainer.loop.step_statistics import AsynchronousStatistics, WindowRecorder
from lightning_pipes.trainer.loop.stopping import LateAgreement, StopAgreement
from lightning_pipes.trainer.loop.watcher import AsynchronousStep
from lightning_pipes.trainer.module.batches import rows_of
from lightning_pipes.trainer.module.optimizers import check_momentum, predict_change
from lightning_pipes.trainer.module.remote_tensors import RemoteTensor
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.notices import Notices
from lightning_pipes.trainer.ranks.processes import process_rank
from lightning_pipes.trainer.ranks.ranks import Grid
from lightning_pipes.trainer.relocation.transfer import settings_of, with_settings
from lightning_pipes.trainer.step.between_steps import BATCH_HOOKS, BetweenSteps
from lightning_pipes.trainer.step.hooks import has_hooks
from lightning_pipes.trainer.step.uses import (
    ChoosesLayers,
    PartialSteps,
    check_layers,
    check_room,
    use_of,
    warn_without_uses,
)


class AsynchronousLoop(TrainingLoop):
    """Trains by a schedule that does not flush.

    Args:
        control: of all ranks, those of other replicas too.
        memory: where layers that batches choose take turns, or where a schedule of a fixed order stashes weights;
            None where all stay.

    Attributes:
        between: refuses hooks that change what batches in flight use.
        statistics: what ranks tell each other for planners.
        orders_uses: results are those of one batch after another, for a policy orders the uses of layers.
        serialized: batches run one by one, for memory is short.
        unstepped_batches: batches under way, by number, which may have left gradients.
    """

    is_asynchronous = True

    def __init__(self, run: PipelineRun, control: Control, memory: StateMemory | None = None) -> None:
        check_layers(run.cut.module, run.cut.full)
        schedule, several = run.plans.schedule, len(run.global_ranks) > 1
        if schedule.predicts_weights:
            check_prediction(run, memory)
        self._run = run
        self._all = control
        self._memory = None if memory is None else enable_offload(run, memory)
        run.local_layers.average_by_batch(run.engine)

        # What ranks exchange while they are at different batches.
        depth = schedule.depth if isinstance(schedule, Policy) else 0
        self._max_lag = run.relocation.max_lag = max(len(run.global_ranks), depth)
        notices, rank = Notices(run.control), run.global_ranks[run.local_layers.holdings.rank]
        self._results = Results(notices, run.control.ranks[0], self._max_lag, run.last_stage_ranks)
        self.statistics = AsynchronousStatistics(run.statistics, notices, control.ranks, rank, self._max_lag)
        warn_without_uses(run.cut.module, schedule, len(run.global_ranks))
        self._mirroring = LayerCopies(run, control) if several and Cuts.are_needed(run.cut.module, schedule) else None
        if self._mirroring is not None:
            run.relocation.check_layers_stay("batches have cuts of their own")

        # What hooks may see and change while batches are under way.
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
        run.user_steps.left.expect_overlap(schedule.name)

        # Batches under way, the oldest first.
        self._under_way: deque[AsynchronousStep] = deque()
        self._unpublished: deque[AsynchronousStep] = deque()  # the last stage has not sent their results
        self.unstepped_batches: dict[int, Item] = {}
        self._recent: dict[int, Item] = {}  # those, and later ones that have overtaken them
        self._last_number = -1
        self._latest: Any = torch.full((), torch.nan, device=run.device)
        self._window = WindowRecorder()
        self._window_plans = run.plans
        self.serialized = False

        # Optimizers, and the gradients by which they step.
        self._optimizers: Sequence[Optimizer] = ()
        self._groups: dict[int, tuple[int, int]] = {}  # by id of a parameter, its optimizer and its group there
        self._steps: PartialSteps | None = None  # of this window: layers move between windows
        self._stepped_ids: set[int] | None = None  # ids of the parameters that a batch steps now
        self._kept_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._step_gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Gradients by which the latest batch was stepped, where no other rank is in this pipeline."""
        self._shows_gradients = False

    def train(self, batch: Any, arguments: tuple[Any, ...], optimizers: Sequence[Optimizer], complete: bool) -> Any:
        """Start one batch, and run what can run without another.

        Return the latest result known here: on the last stage that of this batch, if it is through. Before the first
        result, return NaN.
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
        """Switch to the plan of the batch; another plan ends the window."""
        run, engine, plans = self._run, self._run.engine, step.plans or self._run.plans
        if engine.is_open and (
            step.rows > engine.plan.jobs[0].rows or plans is not self._window_plans or self.serialized
        ):
            self.drain()
        if not engine.is_open:
            self._window_plans = plans
            with self.own_gradients():  # those that are accumulated move with their layers
                run.switch_plan(*plans.for_rows(step.rows))
            self.between.forget_layers()
            self._steps = None
            self._groups.clear()
            if run.plans.schedule.predicts_weights:
                for stage in run.stages.values():
                    stage.predict = self._predict_changes
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
        step.samples = run.lists.find_lists(step.batch, step.rows)
        step.initial_state = run.state.capture_state() if self._has_batch_hooks else None
        run.weigh_losses(step)
        step.use = use_of(run.cut.module, run.cut.full, step.batch, engine.plan)

    def _predict_changes(self, item: Item) -> Change:
        """Return what predicts updates of parameters, by the settings that the batch's own one will have."""
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
        """Add the batch to those under way."""
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
        """Step the parameters of a batch on this stage, by the settings that its optimizers had when it began.

        Accumulated batches are stepped together.
        """
        run, step = self._run, item.data
        run.watchers.before_optimizer_step(step)
        step.stepped += 1
        if step.stepped == len(run.stages):
            step.item = None  # else both live until garbage is collected
        if run.has_last_stage and not run.is_last_rank:
            self._results.send_part(run.results_for_last_rank(step))
        stage.average_gradients(item)
        if step.complete and run.local_layers.reducer is not None:
            run.local_layers.reducer.finish()
        elif step.complete and run.local_layers.replica_averages is None:
            run.local_layers.shared.sum_gradients()  # over the ranks of the stage, where it has several
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
        """Give the parameters that `item` steps on a stage their gradients in the block, and no others."""
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
        """Let the user's hooks in the block change what `item` steps here; they see the module's state as of `item`."""
        others = [each.use for each in self._recent.values() if each is not item] if self.orders_uses else ()
        with (
            self.between.step_hooks(others, mine, self._optimizers),
            item.data.in_initial_state,
            self._run.state.watch_step_hooks(),
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
        """Let hooks see gradients as on one process, which clears them in the next batch, where all layers are here."""
        if not self._has_other_ranks:
            self._shows_gradients = True
            for p, gradient in (*self._accumulated(), *self._step_gradients):
                p.grad = gradient

    def why_no_state(self, parameter: torch.Tensor | None) -> str:
        schedule = self._run.plans.schedule.name
        foreign = isinstance(parameter, RemoteTensor)
        if not self.orders_uses or (foreign and not self._names_layers):
            return ""  # stages miss steps, or what is done to each state by itself is done where it is
        if foreign or (parameter is None and self._names_layers and self._has_other_ranks):
            return (
                f": which layers of other ranks have states there depends on the batches so far, and with schedule "
                f"{schedule!r} stages step at other times. Work on the states of each parameter by itself, as by "
                "`if not p.is_meta and p in optimizer.state`"
            )
        if self._is_settled(parameter):
            return ""
        return (
            f" while batches are under way that step the same weights: with schedule {schedule!r} it is that of an "
            "earlier batch. Look at the states of a batch's own weights in on_before_optimizer_step or in a hook that "
            "optimizer.register_step_post_hook gets, at all of them in on_train_epoch_start; or use a schedule that "
            "flushes between batches, such as '1f1b'"
        )

    def _is_settled(self, parameter: torch.Tensor | None) -> bool:
        """Return whether all batches so far have stepped a parameter, or all parameters, of this rank, and none
        more."""
        if self._stepped_ids is not None:
            alone = parameter is None and not self._has_other_ranks and len(self.unstepped_batches) == 1
            return alone or id(parameter) in self._stepped_ids
        if not self._run.engine.is_open or not self.unstepped_batches:
            return True
        uses = [item.use for item in self.unstepped_batches.values()]
        return parameter is not None and not self.between.is_used(parameter, uses)

    def _warn_of_old_weights(self) -> None:
        """Warn of a hook that looks at layers between two batches, on the rank that notices it."""
        scope = self._run.cut.scope
        if self._stepped_ids is not None or not self._run.engine.is_open:
            return
        scope.on_layers = lambda: None
        warnings.warn(
            f"{scope.hook} looks at layers while batches are under way. With schedule "
            f"{self._run.plans.schedule.name!r} each stage steps when the gradients of a batch are there. So weights "
            "may be those of an earlier batch, gradients are cleared, and averages or logs of them differ from one "
            "process. Look at weights in on_train_epoch_end or in a hook that optimizer.register_step_post_hook gets, "
            "and at gradients in on_before_optimizer_step; or use a schedule that flushes between batches, such as "
            "'1f1b'",
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
        """Give parameters their accumulated gradients in the block; outside of it they have none.

        Lightning clears gradients when it steps an optimizer, and stages step at other times. So the gradients of
        batches that wait for a step are kept here between two calls of `train`. Those that hooks see meanwhile, by
        `give_back_gradients`, are hidden first and shown again.
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
        """Take the gradients away that hooks may see between batches, and return whether there were any.

        What a hook has changed in gradients that still wait for a step is kept.
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
        """Return the parameters of this rank that have a gradient of a batch under way."""
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
        """Send the results of finished batches from the last stage to the others, as soon as it knows them.

        The others wait for a result once they have stepped, and the last stage may wait for what they compute.
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
        """Log finished batches."""
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
                listener.after_result(step.number, step.batch, self._latest)

    def _is_known(self, step: AsynchronousStep) -> bool:
        return step.message is not None if self._run.is_last_rank else step.stepped == len(self._run.stages)

    @staticmethod
    def _all_losses(step: AsynchronousStep) -> bool:
        return sum(span.rows for span in step.results) == step.rows


class Results:
    """The results of each batch: the last stage publishes them and goes on, and the others read them when they are that
    far.

    By the time a rank has stepped for a batch its result is there.

    Args:
        pipeline: a name of it, for replicas have one store.
        max_lag: batches that ranks may be apart.
        last_stage: the global ranks of the last stage; the first one publishes the result, of which each has a part.
    """

    def __init__(self, notices: Notices, pipeline: int, max_lag: int, last_stage: Sequence[int]) -> None:
        self._notices, self._pipeline, self._max_lag = notices, pipeline, max_lag
        self._others = last_stage[1:]
        self._n_sent = self._n_received = self._n_parts = 0

    def send_part(self, results: Any) -> None:
        """Send this rank's part of the result of the next batch to the first rank of the last stage."""
        self._notices.put(f"{process_rank()}/{self._name(self._n_parts)}", results)
        self._n_parts += 1

    def receive_parts(self) -> list[Any]:
        """Return what other ranks of the last stage have of the next batch: they know it when gradients are summed."""
        names = [f"{rank}/{self._name(self._n_parts)}" for rank in self._others]
        self._n_parts += 1
        found = [self._notices.get(name) for name in names]
        for name in names:
            self._notices.remove(name)
        return found

    def send_result(self, message: Any) -> None:
        """Send the result of the next batch from the last stage."""
        self._notices.put(self._name(self._n_sent), message)
        old = self._n_sent - self._max_lag - 1
        self._n_sent += 1
        if old >= 0:
            self._notices.remove(self._name(old))  # all have read it: what they sent since needed its gradient

    def receive_result(self) -> Any:
        """Return the result of the next batch, on ranks without the last stage.

        Raises:
            PeerFailure: another rank failed.
        """
        self._n_received += 1
        return self._notices.get(self._name(self._n_received - 1))

    def _name(self, batch: int) -> str:
        return f"{self._pipeline}/{batch}"


def check_trainer_settings(trainer: pl.Trainer, schedule: Schedule | Policy, grid: Grid, shared: Sequence[str]) -> None:
    """Refuse what needs all stages at one batch, for a schedule which never has them there.

    Args:
        shared: names of the parameters that several ranks train.

    Raises:
        PipelineError: names the setting, and a way out.
    """
    name, flush = schedule.name, "or a schedule that flushes between batches, such as '1f1b'"
    by_norm = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"
    chooses = isinstance(schedule, Policy)  # what runs next, by what is there
    refused = {
        "accumulate_grad_batches": (
            chooses and trainer.accumulate_grad_batches > 1,
            f"use a larger batch_size, {flush}",
        ),
        "gradient_clip_val": (chooses and by_norm, f"the norm is that of all stages; clip by 'value', {flush}"),
        "ModelCheckpoint(train_time_interval=..., monitor=...)": (
            private.monitors_by_time(trainer),
            f"ranks know the metric of different batches then; use every_n_train_steps, {flush}",
        ),
        "precision='16-mixed'": (
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"its scaler looks at the gradients of all stages; use 'bf16-mixed', {flush}",
        ),
    }
    for what, (given, way_out) in refused.items():
        if given:
            raise PipelineError(
                f"{what} can't be used with schedule {name!r}, whose stages step at other times: {way_out}"
            )
    if by_norm and grid.length > 1:
        rank_zero_warn(
            f"schedule {name!r}: every stage clips by the norm of its own layers, because stages step at other times. "
            f"gradient_clip_val={trainer.gradient_clip_val} bounds the norm of each stage; the norm of all stages may "
            "be larger, by the root of their number"
        )
    if shared:
        raise PipelineError(
            f"{', '.join(shared[:5])}: several ranks train these parameters, because they are outside of the pipelined "
            f"module or tied. With schedule {name!r} stages step at other times, and copies would become different; "
            f"put them into a layer of the nn.Sequential, {flush}"
        )


def enable_offload(run: PipelineRun, memory: StateMemory) -> LayerMemory | None:
    """Have weights take turns on the device, and return the memory of layers; None where versions of weights do.

    Raises:
        PipelineError: the run, the module or its optimizers don't allow it.
    """
    if isinstance(run.plans.schedule, Schedule):
        check_stash(run)
        run.engine.offload_versions(VersionMemory(memory, run.device))
        return None
    check_turns(run)
    plain = [private.plain_optimizer(o) for o in run.trainer.optimizers]
    for number in run.stages:
        layers = run.local_layers.layers_of(number)
        check_room(number, layers, plain, memory.device_bytes, run.device.type == "cpu")
    run.relocation.check_layers_stay("MemorySwap has them take turns on the device")
    layer_memory = LayerMemory(memory, run.device, lambda: run.trainer.optimizers)
    run.engine.enable_offload(layer_memory, choose_predictor(run, memory.predictor))
    return layer_memory


def choose_predictor(run: PipelineRun, name: str) -> PredictorChoice | None:
    """Return what predicts the next layers of a rank, with the costs that cut batches; None for the default."""
    module, policy = run.cut.module, run.plans.schedule
    if name == PREDICTORS[0]:
        return None
    assert isinstance(policy, Policy), "only policies order batches that overlap"
    costs = Cuts(module, run.cut.full, policy, module.costs_of_layers() if isinstance(module, LayerCosts) else None)
    tells = name == "algorithm_3" and len(run.global_ranks) > 1
    transport = BulkTreeTransport(run.local_layers.bulk_transfer, run.global_ranks) if tells else None
    return PredictorChoice(name, costs.cost, transport)


def check_turns(run: PipelineRun) -> None:
    """Refuse runs in which layers can't take turns on the device.

    Raises:
        PipelineError: the module does not say which layers batches use, or forwards keep them, or one half of a
            backward does for the other.
    """
    module, plan = run.cut.module, run.engine.plan
    if not isinstance(module, ChoosesLayers):
        raise PipelineError(
            f"MemorySwap keeps the layers on the device that batches use, and {type(module).__name__} does not name "
            "them; give it layers_of_batch, as for a Supernet, or leave MemorySwap out"
        )
    if not _recomputes(plan):
        raise PipelineError(
            "MemorySwap needs PipelineStrategy(recompute=True). Else a forward keeps its layers on the device until "
            "its backward, and batches in flight could block each other"
        )
    if plan.split_backward:
        raise PipelineError(
            "MemorySwap has layers take turns on the device, and schedule "
            f"{run.plans.schedule.name!r} splits backward: weight gradients need the layers where the input gradients "
            "had them. Leave MemorySwap out, or split_backward"
        )


def check_prediction(run: PipelineRun, memory: StateMemory | None) -> None:
    """Refuse runs in which weights can't be predicted.

    Raises:
        PipelineError: versions are not copied, or batches are read before an update that are not counted as updates.
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


def check_stash(run: PipelineRun) -> None:
    """Refuse runs in which weight versions can't take turns on the device.

    Raises:
        PipelineError: something refers to them from forward to backward, or from one half of a backward to the other.
    """
    plan, name = run.engine.plan, run.plans.schedule.name
    if not _recomputes(plan):
        raise PipelineError(
            f"MemorySwap moves weight versions of schedule {name!r}, and needs PipelineStrategy(recompute=True); else "
            "a forward keeps its version on the device until its backward"
        )
    if plan.split_backward:
        raise PipelineError(
            f"MemorySwap moves weight versions, and schedule {name!r} splits backward, whose second half needs them "
            "where they were. Leave MemorySwap out, or take a schedule that does not split"
        )


def _recomputes(plan: Plan) -> bool:
    """Return whether forwards that wait keep only their input; on the last stage none waits."""
    return plan.n_stages == 1 or (bool(plan.recompute) and all(plan.recompute[:-1]))
