"""Setup of a run: from a whole module to stages in a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_pipes.engine.compute.rng import replica_seed
from lightning_pipes.engine.residency.layer_memory import StateMemory
from lightning_pipes.ir import PipelineError, PlanError, Policy, Program, Schedule
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.active_run import ActiveRun
from lightning_pipes.trainer.callbacks.schedule_tuner import add_tuner
from lightning_pipes.trainer.checkpoint.files import Writing
from lightning_pipes.trainer.loop.asynchronous import AsynchronousTraining, check_streaming
from lightning_pipes.trainer.loop.evaluation import Evaluation
from lightning_pipes.trainer.loop.host import PipelineHost
from lightning_pipes.trainer.loop.run import PipelineRun, Training
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.loop.synchronous import SynchronousTraining
from lightning_pipes.trainer.module.capture import CacheSwitch, Interceptor
from lightning_pipes.trainer.module.checks import check_run, equal_weights, warn_about_module, warn_about_pieces
from lightning_pipes.trainer.module.deferred import DeferredWeights, check_optimizers, check_same_cut
from lightning_pipes.trainer.module.hidden_state import HiddenState, NoHiddenState
from lightning_pipes.trainer.module.optimizer_shards import OptimizerShards, check_shardable
from lightning_pipes.trainer.module.optimizers import (
    OptimizerLayout,
    OptimizersView,
    parameter_names,
    refuse_unsuitable,
)
from lightning_pipes.trainer.module.pipelined import (
    LEAST_FOR_STATISTICS,
    CutModule,
    NoContainerError,
    batch_statistics,
    find_pipelined,
    layer_sizes,
    log_choice,
)
from lightning_pipes.trainer.module.proxy import Layers
from lightning_pipes.trainer.module.sharding import check_shards, leave_spread, unshard_outside
from lightning_pipes.trainer.module.step_probe import check_steps_apart
from lightning_pipes.trainer.module.weight_callbacks import check_callbacks, spread_callbacks
from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.plan.container import find_container, find_reason_for_units, warn_about_outside
from lightning_pipes.trainer.plan.deciding import Deciding
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.prediction import Prediction
from lightning_pipes.trainer.plan.profile_cache import ProfileCache, find_cache
from lightning_pipes.trainer.plan.request import Placement, RunRequest, check_same_arguments, describe_arguments
from lightning_pipes.trainer.plan.settings import BATCH, PARAMETERS, Settings, names_modules
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.replicas import has_shards
from lightning_pipes.trainer.relocation.local_layers import LocalLayers
from lightning_pipes.trainer.session import Session
from lightning_pipes.trainer.state.left_values import LeftValues, layers_by_number
from lightning_pipes.trainer.state.module_state import ModuleState
from lightning_pipes.trainer.step.between_steps import check_clearing
from lightning_pipes.trainer.step.clipping import GradientAgreement, HookClipping
from lightning_pipes.trainer.step.hooks import track_hooks, track_optimizer_steps, wrap_module_hooks
from lightning_pipes.trainer.step.logs import GradientLogs, limit_metric_sync
from lightning_pipes.trainer.step.steps import Steps
from lightning_pipes.trainer.unit_setup import UnitSetup, find_refused
from lightning_pipes.trainer.units.cut import WHOLE
from lightning_pipes.trainer.verify.reference import ReferenceProcess
from lightning_pipes.trainer.verify.verifier import Verifier, check_verifiable
from lightning_pipes.trainer.watchers.default import default_watchers

_log = logging.getLogger(__name__)


def prepare(
    strategy: PipelineHost,
    session: Session,
    request: RunRequest,
    settings: Settings,
    writing: Writing,
    reference: ReferenceProcess | None,
    start_epoch: Callable[[], None],
    patches: Patches,
) -> None:
    """Prepare the run that a Trainer begins, in the order in which this runs. Collective.

    Every resource is stored in `session` as soon as it exists, so that `teardown` releases it when a later call fails.

    Args:
        request: the run that the user asks for.
        writing: writes checkpoints.
        reference: the process that verifies the run, if one does.
        start_epoch: called when an epoch has begun.
        patches: closed by `teardown`.

    Raises:
        PlanError, PipelineError: the module, the settings or the schedule don't go together.
    """
    module, precision = strategy.lightning_module, strategy.precision_plugin
    assert module is not None, "the Trainer has one"
    trainer, ranks, links, checkpointing = module.trainer, session.ranks, session.links, session.checkpointing
    fitting, memory = trainer.state.fn == TrainerFn.FITTING, strategy.memory

    # 1. All ranks have the same module and settings; optimizers are made over the whole module.
    check_run(module, trainer, writing.background)
    check_same_arguments(describe_arguments(request, settings), ranks.control)
    is_sharded = session.replicas.mesh is not None and ranks.control.any(has_shards(module))[0]
    if is_sharded:
        check_shards(module, session.replicas.mesh)
        check_sharded_run(settings, request, links.turns is not None)
    is_spread = equal_weights(module, ranks.control, session.replicas if is_sharded else None)
    path = choose_container(trainer, module, session, settings.module) if is_sharded else None
    if path is not None:
        unshard_outside(module, path)
    private.forget_optimizers(strategy)
    named_groups = _make_optimizers(strategy, module) if fitting else ()
    if fitting and settings.shard_optimizer:
        check_shardable(strategy.optimizers, ranks.device)

    # 2. What is cut, and how.
    units = None
    if path is None:
        path, units = choose_cut(trainer, module, session, settings, request)
    checkpointing.container = path
    refused = {
        "a module that is cut by units": path == WHOLE,
        "a module with sharded layers": is_sharded,
        "siblings of a job array on shared ranks": links.turns is not None,
    }
    if settings.degrees and any(refused.values()):
        why = next(what for what, asked in refused.items() if asked)
        raise PipelineError(
            f"data_parallel={list(settings.degrees)} shares out samples among the ranks of a stage, which {why} can't "
            "have; set data_parallel to a number"
        )
    if units is None and path == WHOLE:
        units = UnitSetup(trainer, module, session, settings, request)
    full = module.get_submodule(path) if units is None else units.weights
    assert isinstance(full, Layers)
    warn_about_module(module, full if units is None else None)
    deferred = DeferredWeights(module, path)
    profiles = find_cache(trainer)
    _log.debug("setup: layers of %s over %d ranks", path, ranks.grid.n_planned)
    if units is None:
        shards = ranks.grid.replicas if settings.shard_optimizer else 1
        decision = decide(trainer, module, path, session, settings.transport, request, profiles, shards)
    else:
        decision = units.decide(request)
    _log.debug("setup: schedule %s, layers %s on ranks %s", decision.schedule, decision.layers, decision.ranks)
    strategy.take_decision(decision)
    if fitting:
        add_tuner(trainer, decision.schedule)

    # 3. Which rank holds what, and who may move layers later.
    if request.replanner is not None and links.turns is not None:
        raise PipelineError(
            "replan moves layers, which siblings of a job array can't while they share the ranks; leave it out, or "
            "run this training alone"
        )
    if settings.shard_optimizer and links.turns is not None:
        raise PipelineError(
            "shard_optimizer=True shards states over replicas, which siblings of a job array can't while they share "
            "the ranks; leave it out, or run this training alone"
        )
    cuts = PARAMETERS if names_modules(request.partition) else request.partition
    holdings = Holdings(ranks.grid, decision.ranks, decision.layers)
    if units is None:
        holdings.index_parameters(module, path)
    else:
        units.note_weights(holdings)
    checkpointing.placement = lambda: Placement(holdings.layers, decision.ranks, cuts)
    plans = decision.plans(request.replanner, holdings.tied, settings.relocation, settings.degrees)
    plan, order = plans.for_rows(plans.trial_rows)
    if fitting and plans.microbatches > 1:
        warn_about_pieces(full if units is None else module)
    ranks.control.watch.stages = dict(holdings.stages_of_processes())
    hidden = (
        HiddenState(module, path, holdings, ranks.pipeline, links.check_later)
        if units is None
        else NoHiddenState(holdings, ranks.pipeline, links.check_later)
    )
    training = choose_training(trainer, session, decision.schedule, settings, memory, holdings, order)

    check_callbacks(
        private.callbacks(trainer),
        module,
        overlaps=decision.schedule.name if fitting and order.is_endless else None,
        saves_parts=checkpointing.sharded,
        is_sharded=is_sharded,
    )

    # 4. The module is cut: this rank keeps its layers. It is shown before, while it is whole.
    _log.debug("setup: layers %s stay on rank %d", list(holdings.local), ranks.grid.rank)
    show_module(trainer, module, patches)
    cut: CutModule
    if units is None:
        caches = CacheSwitch(module)
        caches.log()
        interceptor = Interceptor(f"self.{path}", isinstance(full, nn.ModuleList), caches)
        if is_sharded:
            leave_spread(module, path, holdings.local)
        if is_spread:
            check_same_cut(module, path, holdings.local, ranks.control)
        session.cut = cut = CutModule(module, path, holdings.local, interceptor, ranks.device)
    else:
        session.cut = cut = by_units = units.cut(holdings.local)
    deferred.make(holdings.local, holdings.position_of_layer, settings.seed, ranks.device, ranks.pipeline)
    checkpointing.load_waiting(cut)
    session.layouts = [OptimizerLayout(o, names) for o, names in zip(strategy.optimizers, named_groups, strict=True)]
    for layout in session.layouts:
        layout.keep_local(cut.is_foreign)
    strategy.model_to_device()
    gather_average = partial(checkpointing.gather_average, cut)
    spread_callbacks(private.callbacks(trainer), module, cut.scope, gather_average, ranks.pipeline, patches)
    checkpointing.shards = None
    if fitting and settings.shard_optimizer:
        checkpointing.shards = OptimizerShards(strategy.optimizers, session.replicas, cut.scope, patches)

    # 5. Stages, engine and everything around them.
    _log.debug("setup: stages and engine")
    stops = StopAgreement(trainer, ranks.control, writing.at_once, lambda: links.is_ended_by_peer, patches)
    seed = replica_seed(settings.seed, ranks.grid.replica)
    if units is None:
        state = ModuleState(module, (cut.proxy, *full.modules()), hidden.objects_of_layers, ranks.device)
        steps = Steps(
            module,
            precision,
            interceptor,
            plan,
            holdings.rank,
            seed,
            ranks.device,
            state,
            LeftValues(module, layers_by_number(full), lambda: holdings.local, state, cut.scope, cut.path),
        )
    else:
        steps = units.make_steps(precision, plan, holdings.rank, seed, by_units)
    shares_ranks = links.turns is not None
    uncompared = "" if units is None else "the module is cut by units, and no stage can run a whole batch"
    if len(holdings.ranks_of_stages[-1]) > 1:
        uncompared = "the last stage has several ranks, and none of them has a whole batch"
    run = PipelineRun(
        trainer,
        ranks,
        links,
        LocalLayers(cut, holdings, hidden, session.layouts, session.replicas, ranks, shares_ranks),
        plans,
        steps,
        seed,
        settings.transport,
        settings.check_loss and not uncompared,
        training,
        settings.relocation,
        None if units is None else units.ruled_out_weights,
    )
    stays = bool(holdings.tied) or shares_ranks
    prediction = (
        Prediction(decision, ranks, links.n_trainings == 1, stays, profiles.forget_profile) if fitting else None
    )
    run.watchers = default_watchers(run, settings.check_loss, units is not None, uncompared, prediction)
    session.running = ActiveRun(run, stops, Evaluation(run))
    strategy.setup_precision_plugin()
    if memory is None or not isinstance(decision.schedule, Policy):  # else layers take turns on the device
        private.optimizers_to_device(strategy.optimizers, ranks.device)

    # 6. What Lightning and the user do around steps holds for all ranks.
    if ranks.grid.length > 1 and fitting:
        check_steps_apart(run.part.optimizers, run.is_asynchronous)
    holders = ranks.control if is_sharded else ranks.pipeline
    GradientAgreement(precision, holdings, None if run.is_asynchronous else holders, ranks.device, cut.scope, patches)
    agree = run.make_agreement(stops)

    def verify_and_agree() -> None:
        if session.verifier is not None:
            session.verifier.batch_ended()
        agree()

    wrap_hooks(trainer, run, ranks.pipeline, holders, verify_and_agree, start_epoch, patches)
    limit_metric_sync(module, session.replicas.group, patches)
    patches.callback(private.forget_training_data, trainer)
    patches.callback(checkpointing.data.forget_loaded)
    if fitting and settings.verify.batches:
        session.verifier = Verifier(settings.verify, reference, trainer, run, settings.seed)
        patches.callback(session.verifier.close)


def check_sharded_run(settings: Settings, request: RunRequest, shares_ranks: bool) -> None:
    """Refuse settings that don't work with layers that are sharded.

    Raises:
        PipelineError: the run asks for one of them.
    """
    schedule = request.schedule
    refused = {
        f"schedule {schedule.name!r} steps stages apart": not schedule.flushes,
        "shard_optimizer=True shards states that are sharded already": settings.shard_optimizer,
        "replan moves layers, whose shards stay with their ranks": request.replanner is not None,
        "partition and loss cut by units": names_modules(request.partition) or settings.loss == BATCH,
        "verify trains in one plain process, which has no shards": bool(settings.verify.batches),
        "siblings of a job array share the ranks": shares_ranks,
    }
    for why, is_asked in refused.items():
        if is_asked:
            raise PipelineError(
                f"configure_model has sharded layers, by fully_shard or parallelize_module, and {why}; use a schedule "
                "that flushes between batches, such as '1f1b', without this setting, or leave the shards out"
            )


def _make_optimizers(strategy: PipelineHost, module: pl.LightningModule) -> Sequence[tuple[tuple[str, ...], ...]]:
    """Make the optimizers, and return the names of the parameters of each of them, by group."""
    strategy.optimizers, strategy.lr_scheduler_configs = private.init_optimizers(module)
    refuse_unsuitable(strategy.optimizers)
    check_optimizers(strategy.optimizers)
    return parameter_names(module, strategy.optimizers)


def choose_container(trainer: pl.Trainer, module: pl.LightningModule, session: Session, named: str | None) -> str:
    """Return the path of the container to cut: the named one, that of a run that goes on, or the one found.

    Collective. `WHOLE` is returned where no container of layers is clearly the largest: the module is cut by units.
    """
    before = session.checkpointing.resumed_container()
    if named is None and before in dict(module.named_modules()):
        named = before
    if named is not None:
        return named if named == WHOLE else find_pipelined(module, named)
    find = partial(find_container, trainer, module, session.control, session.ranks.device)
    try:
        return session.links.agree_on_container(module, find)
    except NoContainerError as why:
        rank_zero_info(f"{str(why).partition('. ')[0]}: it is cut by units")
        return WHOLE


def choose_cut(
    trainer: pl.Trainer, module: pl.LightningModule, session: Session, settings: Settings, request: RunRequest
) -> tuple[str, UnitSetup | None]:
    """Return the path of the container to cut, and how the module is cut by units where that is decided here.

    A container that nobody names is left for units where it has a code or hooks of its own, where the step does not
    call its layers once and in order, and where most of the work is around it. Collective.

    Raises:
        PlanError, PipelineError: it can't be cut so.
    """
    if names_modules(request.partition) or (settings.loss == BATCH and settings.module is None):
        return WHOLE, None
    refused = settings.module is not None or settings.degrees or find_refused(module, session, settings, request)
    try:
        path = choose_container(trainer, module, session, settings.module)
    except PipelineError as error:
        if refused:
            raise
        rank_zero_info(f"{str(error).partition('; ')[0]}: the module is cut by units")
        return WHOLE, None
    reason = ""
    if not refused and path != WHOLE and trainer.state.fn == TrainerFn.FITTING and trainer.limit_train_batches != 0:
        reason = find_reason_for_units(trainer, module, path, session.control, session.ranks.device)
    if reason:
        try:
            units = UnitSetup(trainer, module, session, settings, request)
            why = reason.partition("; ")[0].partition(". ")[0]
            rank_zero_info(f"{type(module).__name__} is cut by units, not in the layers of self.{path}: {why}")
            return WHOLE, units
        except PipelineError as error:  # then the first batch ends with what is wrong with the container
            _log.debug("setup: %s can't be cut by units: %s", type(module).__name__, error)
    if path not in (WHOLE, settings.module):
        log_choice(module, path)
    return path, None


def decide(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    path: str,
    session: Session,
    transport: str,
    request: RunRequest,
    profiles: ProfileCache,
    shards: int,
) -> Decision:
    """Return the decision: as asked for, as measured where something is trained, or as siblings have made it.

    Args:
        shards: ranks over which optimizer states of a stage are sharded.
    """
    full, ranks, links = module.get_submodule(path), session.ranks, session.links
    assert isinstance(full, Layers)
    length, fitting = ranks.grid.n_planned, trainer.state.fn == TrainerFn.FITTING
    request = links.complete_request(request, length)
    before = session.checkpointing.resumed_placement()
    if before is not None and fitting and links.turns is None:
        resumed = request.resume_cut(before, len(full), length)
        if resumed is not request:
            rank_zero_info(f"Stages begin at layers {before.cuts}, as they did when the checkpoint was written")
        request = resumed
    least = LEAST_FOR_STATISTICS if batch_statistics(full) else 1
    plain = request.unmeasured(layer_sizes(full), length, least, ranks.grid.degrees)

    def measure() -> Decision:
        _log.debug("setup: layers of %s are measured", path)
        measured = Deciding(trainer, path, ranks, transport, profiles, shards).decide(request, plain)
        if length > 1:
            warn_about_outside(module, path, measured.profile)
        return measured

    return links.agree_on_decision(module, plain, measure if fitting and not ranks.grid.degrees else lambda: plain)


def choose_training(
    trainer: pl.Trainer,
    session: Session,
    schedule: Schedule | Policy,
    settings: Settings,
    memory: StateMemory | None,
    holdings: Holdings,
    order: Program | Policy,
) -> Callable[[PipelineRun], Training]:
    """Return the factory of the training loop for a schedule.

    Args:
        memory: of MemorySwap, which moves layers or weight versions to the device and back; None without it.
        order: the program or policy that orders a batch.

    Raises:
        PlanError, PipelineError: it can't train so.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    streams = fitting and order.is_endless
    if fitting and settings.verify.batches:
        check_verifiable(schedule)
    if fitting and memory is not None and not streams:
        raise PipelineError(
            "MemorySwap as a callback has the layers of a supernet take turns, or weight versions; schedule "
            f"{schedule.name!r} runs all layers for each batch, and has one version. Leave MemorySwap out, or "
            "use 'csp' for a supernet, or a schedule that stashes weights, such as 'pipedream' or 'dynpipe'"
        )
    if not streams:
        return SynchronousTraining
    if settings.shard_optimizer:
        raise PlanError(
            f"schedule {schedule.name!r} steps stages apart, and shard_optimizer=True shards the steps of schedules "
            "that flush between batches; use one of them, such as '1f1b', or leave shard_optimizer out"
        )
    session.links.check_endless(schedule.name)
    named = trainer.lightning_module.named_parameters()
    holders = holdings.holders
    tied = [n for n, p in named if p.requires_grad and len(holders.get(id(p), ())) > 1 and not holdings.in_one_stage(p)]
    check_streaming(trainer, schedule, session.ranks.grid, tied)
    return partial(AsynchronousTraining, control=session.ranks.control, memory=memory)


def wrap_hooks(
    trainer: pl.Trainer,
    run: PipelineRun,
    pipeline: Control,
    holders: Control,
    agree: Callable[[], None],
    start_epoch: Callable[[], None],
    patches: Patches,
) -> None:
    """Wrap the hooks of the user's module and callbacks from the inside out, until `patches` are closed.

    Args:
        holders: control of all ranks with a part of the gradients: the pipeline's, and those of its shards.
        agree: has ranks agree on stopping, after the hooks at which they do.
        start_epoch: called when an epoch has begun.
    """
    module, callbacks, scope, part = run.cut.module, private.callbacks(trainer), run.cut.scope, run.part
    HookClipping(lambda: part.parameters, scope, part.holdings, None if run.is_asynchronous else holders, patches)
    track_hooks(module, callbacks, scope, patches)
    OptimizersView(part.layouts, scope, patches, run.training.why_no_state, run.list_parameters, part.adopt_groups)
    step_whole = not run.is_asynchronous or isinstance(run.plans.schedule, Schedule)
    track_optimizer_steps(part.optimizers, scope, patches, step_whole)
    synchronise = partial(run.state.synchronise_ranks, pipeline, run.last_rank, run.last)
    followed = partial(run.state.follow_hook, synchronise=synchronise)
    wrap_module_hooks(module, patches, followed, run.last, run.is_asynchronous, agree, start_epoch)
    if run.is_asynchronous:  # where stages step apart, each logs for itself
        check_clearing(module, run.plans.schedule.name, patches)
    else:
        GradientLogs(module, callbacks, pipeline, run.replay, run.last_rank, patches)


def show_module(trainer: pl.Trainer, module: pl.LightningModule, patches: Patches) -> None:
    """Print and log the module while it is whole, and not again until `patches` are closed."""
    for logger in trainer.loggers if trainer.enable_autolog_hparams else []:
        logger.log_graph(module)
        _silence(logger, "log_graph", patches)
    if trainer.state.fn == TrainerFn.FITTING:
        for callback in private.callbacks(trainer):
            if isinstance(callback, ModelSummary):
                callback.on_fit_start(trainer, module)
                _silence(callback, "on_fit_start", patches)


def _silence(owner: object, name: str, patches: Patches) -> None:
    """Have a method do nothing; it may be shared with other runs, so that what closes first restores it for all."""
    vars(owner)[name] = lambda *args: None
    patches.callback(vars(owner).pop, name, None)
