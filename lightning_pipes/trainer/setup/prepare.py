"""The setup of a run, which turns a whole module into stages of a pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.engine.compute.rng import replica_seed
from lightning_pipes.engine.private_torch import is_fully_sharded
from lightning_pipes.ir import PipelineError, PlanError, Policy, Schedule
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.active_run import ActiveRun
from lightning_pipes.trainer.callbacks.schedule_tuner import add_tuner
from lightning_pipes.trainer.checks import check_run, equalize_weights, warn_about_microbatch_effects
from lightning_pipes.trainer.cuts.layers.pipelined import NoContainerError, find_pipelined, log_choice
from lightning_pipes.trainer.cuts.units.cut import WHOLE_MODULE
from lightning_pipes.trainer.data.token_cut import SAMPLES, TOKENS
from lightning_pipes.trainer.loop.asynchronous import AsynchronousLoop, check_trainer_settings
from lightning_pipes.trainer.loop.between_steps import check_clearing
from lightning_pipes.trainer.loop.evaluation import Evaluation
from lightning_pipes.trainer.loop.manual import ManualLoop
from lightning_pipes.trainer.loop.run import PipelineRun, TrainingLoop
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.loop.synchronous import SynchronousLoop
from lightning_pipes.trainer.loop.uses import ChoosesLayers
from lightning_pipes.trainer.optimizers.optimizer_shards import OptimizerShards, check_shardable
from lightning_pipes.trainer.optimizers.optimizers import (
    OptimizerLayout,
    OptimizersView,
    parameter_names,
    refuse_unsuitable,
)
from lightning_pipes.trainer.optimizers.step_probe import check_skips_unused, check_steps_apart
from lightning_pipes.trainer.plan.container import UnitsReason, find_container, find_reason_for_units
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.plan.prediction import Prediction
from lightning_pipes.trainer.plan.request import Placement, RunRequest, check_same_arguments, describe_arguments
from lightning_pipes.trainer.plan.settings import AUTO, BATCH, PARAMETERS, names_modules
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.replica_world import alone
from lightning_pipes.trainer.ranks.replicas import has_shards
from lightning_pipes.trainer.relocation.local_layers import LocalLayers
from lightning_pipes.trainer.results.logs import GradientLogs, limit_metric_sync
from lightning_pipes.trainer.results.loss_weights import LossWeights
from lightning_pipes.trainer.setup.layout_choice import find_whole_loss_obstacle, names_layers
from lightning_pipes.trainer.setup.memory_limit import settle_recomputation, warn_about_memory_limit
from lightning_pipes.trainer.setup.microbatch_choice import find_sorting_obstacle, propose_sorting, settle_microbatches
from lightning_pipes.trainer.setup.module_setup import ContainerSetup, ModuleSetup, SetupContext, WholeWeights
from lightning_pipes.trainer.setup.unit_setup import UnitSetup, find_refused
from lightning_pipes.trainer.setup.weight_callbacks import check_callbacks, limit_writers, localize_callbacks
from lightning_pipes.trainer.user.clipping import GradientAgreement, HookClipping
from lightning_pipes.trainer.user.hooks import track_hooks, track_optimizer_steps, wrap_module_hooks
from lightning_pipes.trainer.user.patches import Patches
from lightning_pipes.trainer.verify.verifier import Verifier, check_verifiable
from lightning_pipes.trainer.watchers.default import default_watchers
from lightning_pipes.trainer.weights.deferred import DeferredWeights, check_optimizers
from lightning_pipes.trainer.weights.sharding import check_shards, unshard_outside

_log = logging.getLogger(__name__)


def prepare(context: SetupContext) -> None:
    """Prepare a run that a Trainer begins, in the order of the calls below. This function is collective.

    Every resource is stored in the session as soon as it exists, so that `teardown` can release it if a later call
    fails.

    Raises:
        PlanError, PipelineError: the module, the settings and the schedule are not compatible.
    """
    check_arguments(context)
    context = settle_recomputation(context)
    weights = share_weights(context)
    names_by_optimizer = make_optimizers(context)
    with alone():  # around the steps that are recorded and measured
        context, reason = propose_sorting(context)
        setup = choose_setup(context, weights)
        context = settle_microbatches(context, setup, reason)
        deferred = DeferredWeights(context.module, setup.group_parts(), context.connections.find_tensor)
        decision = decide(context, setup)
    holdings = place_layers(context, setup, decision)
    plans = make_plans(context, setup, decision, holdings)
    make_training_loop = choose_training_loop(context, plans, holdings)
    check_user_callbacks(context, plans, weights, setup.path)
    local_layers = cut_module(context, setup, holdings, plans, names_by_optimizer, deferred)
    run = make_run(context, setup, local_layers, plans, make_training_loop, decision)
    active = activate_run(context, setup, decision, run)
    wrap_steps(context, active, weights)
    begin_verification(context, run)


def check_arguments(context: SetupContext) -> None:
    """Check that the run is possible and that all ranks have the same settings."""
    settings = context.settings
    check_run(context.module, context.trainer, context.writing.background)
    if settings.microbatches_by == TOKENS and not LossWeights.are_needed(context.module, settings.check_loss):
        raise PipelineError(
            "microbatches_by='tokens' gives micro-batches different numbers of samples and tokens, and "
            "check_loss=False leaves out the comparison that shows how their losses are weighted. Remove "
            f"check_loss=False, or define microbatch_weight(batch) in {type(context.module).__name__}, which returns "
            "the weight of a micro-batch"
        )
    check_same_arguments(describe_arguments(context.request, context.settings), context.ranks.control)


def share_weights(context: SetupContext) -> WholeWeights:
    """Copy the weights of rank 0 to all ranks, and return a description of how the ranks hold the weights.

    Sharded parameters outside of the container that is cut are gathered.

    Raises:
        PipelineError: a module with sharded layers would be cut by units.
    """
    module, session, control = context.module, context.session, context.ranks.control
    is_sharded = session.replicas.mesh is not None and control.any(has_shards(module))[0]
    if is_sharded:
        check_shards(module, session.replicas.mesh)
        check_sharded_run(context)
    is_spread = equalize_weights(module, control, session.replicas if is_sharded else None)
    path = choose_container(context) if is_sharded else None
    if path == WHOLE_MODULE:
        raise PipelineError(
            f"{type(module).__name__} has sharded layers and would be cut by units, which can't be sharded. Put the "
            "layers into one container and name it, PipelineStrategy(module='path.to.it'), or leave the shards out"
        )
    if path is not None:
        unshard_outside(module, path)
    return WholeWeights(path, is_sharded, is_spread)


def check_sharded_run(context: SetupContext) -> None:
    """Reject settings that do not work with sharded layers.

    Raises:
        PipelineError: the run uses such a setting.
    """
    schedule, request, settings = context.request.schedule, context.request, context.settings
    name, is_asynchronous, trainer = schedule.name, not schedule.flushes, context.trainer
    by_norm = trainer.gradient_clip_val is not None and trainer.gradient_clip_algorithm != "value"
    frees = any(is_fully_sharded(part) for part in context.module.modules())
    refused = {
        f"schedule {name!r} keeps versions of weights, which fully_shard frees": is_asynchronous and frees,
        f"schedule {name!r} decides its order on each rank": is_asynchronous and isinstance(schedule, Policy),
        f"schedule {name!r} clips by the norm of a stage, of which a rank has shards": is_asynchronous and by_norm,
        f"MemorySwap moves the weight versions of schedule {name!r}": is_asynchronous
        and context.host.memory is not None,
        "shard_optimizer=True shards states that are sharded already": settings.shard_optimizer,
        "replan moves layers, whose shards stay with their ranks": request.replanner is not None,
        "partition names modules, which cuts by units": names_modules(request.partition),
        "loss='batch' cuts by units": settings.loss == BATCH,
        "verify trains in one plain process, which has no shards": bool(settings.verify.batches),
        "siblings of a job array share the ranks": context.shares_ranks,
    }
    for why, is_asked in refused.items():
        if is_asked:
            raise PipelineError(
                f"configure_model has sharded layers, by fully_shard or parallelize_module, and {why}; use a schedule "
                "that flushes between batches, such as '1f1b', without this setting, or leave the shards out"
            )


def make_optimizers(context: SetupContext) -> Sequence[tuple[tuple[str, ...], ...]]:
    """Make the optimizers of the whole module, and return the parameter names of each optimizer, by group."""
    host, module = context.host, context.module
    host.optimizers, host.lr_scheduler_configs = [], []  # of an earlier run
    if not context.is_fitting:
        return ()
    host.optimizers, host.lr_scheduler_configs = private.init_optimizers(module)
    refuse_unsuitable(host.optimizers)
    check_optimizers(host.optimizers)
    names = parameter_names(module, host.optimizers)
    if context.settings.shard_optimizer:
        check_shardable(host.optimizers, context.ranks.device)
    return names


def choose_setup(context: SetupContext, weights: WholeWeights) -> ModuleSetup:
    """Return the setup for the way in which the module is cut: in the layers of a container, or by units.

    Raises:
        PlanError, PipelineError: the module cannot be cut in the requested way.
    """
    path, units = (weights.container, None) if weights.container is not None else choose_cut(context)
    context.session.checkpointing.container = path
    refused = {
        "a module with sharded layers": weights.is_sharded,
        "siblings of a job array on shared ranks": context.shares_ranks,
    }
    degrees = context.settings.degrees
    if degrees and any(refused.values()):
        why = next(what for what, asked in refused.items() if asked)
        raise PipelineError(
            f"data_parallel={list(degrees)} shares out samples among the ranks of a stage, which {why} can't "
            "have; set data_parallel to a number"
        )
    _log.debug("setup: %s over %d ranks", f"layers of {path}" if path else "units", context.ranks.grid.n_planned)
    if path == WHOLE_MODULE:
        return units or UnitSetup(context)
    return ContainerSetup(context, path, weights)


def choose_cut(context: SetupContext) -> tuple[str, UnitSetup | None]:
    """Return the path of the container to cut, and the setup by units if it has already been created.

    A container that the user has not named is not cut if it has its own code or hooks, if the step does not call its
    layers once and in order, if most of the work is outside of it, if it is a frozen teacher, or if only units can
    compute the loss of a batch. The module is then cut by units. This function is collective.

    Returns:
        The path of the container, or `WHOLE_MODULE` for a module that is cut by units, and the setup of such a module.
        The setup is None if it has not been created yet.

    Raises:
        PlanError, PipelineError: the module cannot be cut in the requested way.
    """
    settings, module, trainer = context.settings, context.module, context.trainer
    if (
        context.is_manual
        or names_modules(context.request.partition)
        or (settings.loss == BATCH and settings.module is None)
    ):
        return WHOLE_MODULE, None
    if not context.is_fitting and settings.module is None and module in context.by_units:
        return WHOLE_MODULE, None  # the other steps use the same model
    keeps_container = bool(settings.module is not None or names_layers(context) or find_refused(context))
    try:
        path = choose_container(context)
    except PipelineError as error:
        if keeps_container:
            raise
        rank_zero_info(f"{error.reason}: the module is cut by units")
        return WHOLE_MODULE, None
    reason = UnitsReason()
    if not keeps_container and path != WHOLE_MODULE and context.is_fitting and trainer.limit_train_batches != 0:
        cuts = context.ranks.grid.length > 1 and context.request.microbatches != 1
        compares = cuts and settings.check_loss and settings.loss == AUTO and not find_whole_loss_obstacle(context)
        reason = find_reason_for_units(trainer, module, path, context.ranks.control, context.ranks.device, compares)
    if reason.text:
        try:
            units = UnitSetup(context)
            if units.end is not None or not reason.is_of_loss:
                rank_zero_info(
                    f"{type(module).__name__} is cut by units, not in the layers of self.{path}: {reason.text}"
                )
                context.by_units.add(module)
                return WHOLE_MODULE, units
        except PipelineError as error:  # the first batch then raises the error about the container
            _log.debug("setup: %s can't be cut by units: %s", type(module).__name__, error)
    if path not in (WHOLE_MODULE, settings.module):
        log_choice(module, path)
    return path, None


def choose_container(context: SetupContext) -> str:
    """Return the path of the container to cut.

    This is the container that the user named, the container of the run that is resumed, or the one that was found. The
    result is `WHOLE_MODULE` if no container of layers is clearly the largest, so that the module is cut by units. This
    function is collective.
    """
    module, session, named = context.module, context.session, context.settings.module
    before = session.checkpointing.resumed_container()
    if named is None and before in dict(module.named_modules()):
        named = before
    if named is not None:
        return named if named == WHOLE_MODULE else find_pipelined(module, named)
    find = partial(find_container, context.trainer, module, session.control, context.ranks.device)
    try:
        return context.connections.agree_on_container(module, find)
    except NoContainerError as why:
        rank_zero_info(f"{why.reason}: it is cut by units")
        return WHOLE_MODULE


def decide(context: SetupContext, setup: ModuleSetup) -> Decision:
    """Return the decision, and pass it to the strategy and its callbacks.

    Raises:
        PipelineError: the decision needs a feature that siblings of a job array do not support.
    """
    decision = setup.decide()
    _log.debug("setup: schedule %s, layers %s on ranks %s", decision.schedule, decision.layers, decision.ranks)
    context.host.adopt_decision(decision)
    if context.is_fitting:
        warn_about_memory_limit(decision)
        add_tuner(context.trainer, decision.schedule)
    refused = {
        "replan moves layers": context.request.replanner is not None,
        "shard_optimizer=True shards states over replicas": context.settings.shard_optimizer,
    }
    for what, is_asked in refused.items():
        if is_asked and context.shares_ranks:
            raise PipelineError(
                f"{what}, which siblings of a job array can't while they share the ranks; leave it out, or "
                "run this training alone"
            )
    return decision


def place_layers(context: SetupContext, setup: ModuleSetup, decision: Decision) -> Holdings:
    """Return the assignment of layers and parameters to ranks."""
    request, control = context.request, context.ranks.control
    partition = PARAMETERS if names_modules(request.partition) else request.partition
    holdings = Holdings(context.ranks.grid, decision.ranks, decision.layers)
    setup.index_parameters(holdings)
    context.session.checkpointing.placement = lambda: Placement(holdings.layers, decision.ranks, partition)
    control.watch.stages = dict(holdings.stages_of_processes())
    _log.debug("setup: layers %s stay on rank %d", list(holdings.local), context.ranks.grid.rank)
    return holdings


def make_plans(context: SetupContext, setup: ModuleSetup, decision: Decision, holdings: Holdings) -> Plans:
    """Return the plans of batches, by the number of samples of a batch."""
    settings = context.settings
    plans = decision.plans(context.request.replanner, holdings.tied, settings.relocation, settings.degrees)
    if context.is_fitting and plans.microbatches > 1:
        warn_about_microbatch_effects(setup.body)
    return plans


def choose_training_loop(
    context: SetupContext, plans: Plans, holdings: Holdings
) -> Callable[[PipelineRun], TrainingLoop]:
    """Return the factory of the training loop for a schedule.

    Raises:
        PlanError, PipelineError: the schedule cannot train this module with these settings.
    """
    schedule, settings, memory = plans.schedule, context.settings, context.host.memory
    is_asynchronous = context.is_fitting and plans.is_asynchronous
    if context.is_fitting and settings.verify.batches:
        with explain_choice(context.request, schedule):
            check_verifiable(schedule)
    if context.is_fitting and memory is not None and not is_asynchronous:
        raise PipelineError(
            "MemorySwap as a callback swaps the layers of a supernet, or old versions of weights, and schedule "
            f"{schedule.name!r} has neither. Leave MemorySwap out, or use 'csp' for a supernet, or a schedule that "
            "stashes weights, such as 'pipedream' or 'dynpipe'"
        )
    if not is_asynchronous:
        return ManualLoop if context.is_manual else SynchronousLoop
    with explain_choice(context.request, schedule):
        _check_asynchronous(context, schedule, holdings)
    return partial(AsynchronousLoop, control=context.ranks.control, memory=memory)


def _check_asynchronous(context: SetupContext, schedule: Schedule | Policy, holdings: Holdings) -> None:
    """Reject settings that are not supported by schedules that do not flush.

    Raises:
        PlanError, PipelineError: the run uses such a setting.
    """
    if context.settings.shard_optimizer:
        raise PlanError(
            f"schedule {schedule.name!r} steps stages apart, and shard_optimizer=True shards the steps of schedules "
            "that flush between batches; use one of them, such as '1f1b', or leave shard_optimizer out"
        )
    context.connections.check_asynchronous(schedule.name)
    named = context.module.named_parameters()
    holders = holdings.holders
    tied = [n for n, p in named if p.requires_grad and len(holders.get(id(p), ())) > 1 and not holdings.in_one_stage(p)]
    check_trainer_settings(context.trainer, schedule, context.ranks.grid, tied)


@contextmanager
def explain_choice(request: RunRequest, schedule: Schedule | Policy) -> Iterator[None]:
    """Add to the errors of a schedule that "auto" has chosen the reason why it could choose this schedule."""
    try:
        yield
    except PipelineError as error:
        if not request.chooses:
            raise
        why = f"schedule='auto' took {schedule.name!r}, which stale_gradients allows. Leave that out, for:"
        raise type(error)(f"{why} {error}") from None


def check_user_callbacks(context: SetupContext, plans: Plans, weights: WholeWeights, path: str) -> None:
    """Reject callbacks that do not work with a module that is cut."""
    check_callbacks(
        private.callbacks(context.trainer),
        context.module,
        asynchronous_schedule=plans.schedule.name if context.is_fitting and plans.is_asynchronous else None,
        saves_parts=context.session.checkpointing.sharded,
        is_sharded=weights.is_sharded,
        stays=path != WHOLE_MODULE and context.request.replanner is None,
    )


def cut_module(
    context: SetupContext,
    setup: ModuleSetup,
    holdings: Holdings,
    plans: Plans,
    names_by_optimizer: Sequence[tuple[tuple[str, ...], ...]],
    deferred: DeferredWeights,
) -> LocalLayers:
    """Cut the module and its optimizers, and return the layers that this rank keeps.

    While the module is whole, it is printed and logged, and weights of this rank on `meta` are initialized. After the
    module is cut, weights from a checkpoint are loaded, each optimizer keeps only the parameters of the local layers,
    and everything moves to the device.

    Args:
        context: the inputs of the setup.
        setup: the setup of the module.
        holdings: the assignment of layers to ranks.
        plans: the plans of batches.
        names_by_optimizer: the parameter names of each optimizer, by group.
        deferred: the weights that are initialized once their rank is determined.
    """
    host, session, ranks, patches = context.host, context.session, context.ranks, context.patches
    module, checkpointing, settings = context.module, session.checkpointing, context.settings
    hidden = setup.make_hidden_state(holdings)
    show_module(context.trainer, module, patches)  # while the module is whole
    setup.make_weights(deferred, holdings)
    session.cut = cut = setup.cut(holdings.local)
    checkpointing.load_waiting(cut)
    session.layouts = [OptimizerLayout(o, names) for o, names in zip(host.optimizers, names_by_optimizer, strict=True)]
    for layout in session.layouts:
        layout.keep_local(cut.is_foreign)
    host.model_to_device()
    context.connections.share_tensors(module, deferred.sources)
    gather_state = partial(checkpointing.gather_state, cut)
    localize_callbacks(private.callbacks(context.trainer), cut, gather_state, ranks, patches)
    checkpointing.shards = None
    if context.is_fitting and settings.shard_optimizer:
        checkpointing.shards = OptimizerShards(host.optimizers, session.replicas, cut.scope, patches)
    own_order = context.is_fitting and plans.is_asynchronous and isinstance(plans.schedule, Policy)
    return LocalLayers(cut, holdings, hidden, session.layouts, session.replicas, ranks, context.shares_ranks, own_order)


def make_run(
    context: SetupContext,
    setup: ModuleSetup,
    local_layers: LocalLayers,
    plans: Plans,
    make_training_loop: Callable[[PipelineRun], TrainingLoop],
    decision: Decision,
) -> PipelineRun:
    """Return the run with its engine, its stages and the user's steps."""
    _log.debug("setup: stages and engine")
    settings = context.settings
    seed = replica_seed(settings.seed, context.ranks.grid.replica)
    ruled_out = setup.ruled_out_weights
    if ruled_out is None and settings.check_loss and setup.path == WHOLE_MODULE:
        ruled_out = frozenset()  # logged values are weighted even if the loss could not be compared
    return PipelineRun(
        context.trainer,
        context.ranks,
        context.connections,
        local_layers,
        plans,
        setup.make_steps(local_layers, plans.for_rows(plans.trial_rows)[0], seed),
        seed,
        settings.transport,
        settings.check_loss and not setup.explain_uncompared_loss(local_layers.holdings),
        make_training_loop,
        settings.relocation,
        ruled_out,
        length_cost=None if settings.microbatches_by == SAMPLES else decision.length_cost,
        must_sort=settings.microbatches_by == TOKENS,
    )


def activate_run(context: SetupContext, setup: ModuleSetup, decision: Decision, run: PipelineRun) -> ActiveRun:
    """Return the run with its watchers, its stop agreement and its evaluation, and store it in the session."""
    host, ranks, connections, patches = context.host, context.ranks, context.connections, context.patches
    at_once = context.writing.at_once
    stops = StopAgreement(context.trainer, ranks.control, at_once, lambda: connections.is_terminated_by_signal, patches)
    prediction, holdings = None, run.local_layers.holdings
    if context.is_fitting:
        stays = bool(holdings.tied) or context.shares_ranks
        prediction = Prediction(decision, ranks, connections.n_siblings == 1, stays, setup.profiles.forget_profile)
    uncompared, by_units = setup.explain_uncompared_loss(holdings), setup.path == WHOLE_MODULE
    run.watchers = default_watchers(
        run,
        context.settings.check_loss,
        by_units,
        uncompared,
        prediction,
        can_sort=not find_sorting_obstacle(context),
    )
    context.session.active_run = active = ActiveRun(run, stops, Evaluation(run))
    host.setup_precision_plugin()
    if host.memory is None or not isinstance(decision.schedule, Policy):  # otherwise, layers take turns on the device
        private.optimizers_to_device(host.optimizers, ranks.device)
    return active


def wrap_steps(context: SetupContext, active: ActiveRun, weights: WholeWeights) -> None:
    """Make the operations of Lightning and of the user around steps apply to all ranks."""
    session, ranks, patches = context.session, context.ranks, context.patches
    run, local_layers = active.run, active.run.local_layers
    if ranks.grid.length > 1 and context.is_fitting:
        check_steps_apart(local_layers.optimizers, run.is_asynchronous)
    if run.is_asynchronous and isinstance(context.module, ChoosesLayers) and context.is_fitting:
        check_skips_unused(local_layers.optimizers)
    holders = ranks.control if weights.is_sharded else ranks.pipeline
    summed = None if run.is_asynchronous else holders
    precision = context.host.precision_plugin
    GradientAgreement(precision, local_layers.holdings, summed, ranks.device, run.cut.scope, patches)
    agree = run.make_agreement(active.stops)

    def verify_and_agree() -> None:
        if session.verifier is not None:
            session.verifier.batch_ended()
        agree()

    wrap_hooks(context.trainer, run, ranks.pipeline, holders, verify_and_agree, context.start_epoch, patches)
    if run.user_steps.may_skip_batches and context.is_fitting:
        patches.callback(private.allow_skipped_batches(context.trainer))
    patches.callback(private.share_validation_time(context.trainer, lambda due: ranks.control.any(due)[0]))
    limit_writers(private.callbacks(context.trainer), ranks.grid, patches)
    limit_metric_sync(context.module, session.replicas.group, patches)
    patches.callback(private.forget_run_data, context.trainer)
    patches.callback(session.checkpointing.data.forget_loaded)


def begin_verification(context: SetupContext, run: PipelineRun) -> None:
    """Compare the first batches with training in one process, if the user requests it."""
    verify = context.settings.verify
    if context.is_fitting and verify.batches:
        verifier = Verifier(verify, context.reference, context.trainer, run, context.settings.seed)
        context.session.verifier = verifier
        context.patches.callback(verifier.close)


def wrap_hooks(
    trainer: pl.Trainer,
    run: PipelineRun,
    pipeline: Control,
    holders: Control,
    agree: Callable[[], None],
    start_epoch: Callable[[], None],
    patches: Patches,
) -> None:
    """Wrap the hooks of the user's module and callbacks, from the innermost to the outermost wrapper.

    Args:
        trainer: the Trainer.
        run: the run.
        pipeline: the control channel of the pipeline.
        holders: the control channel of all ranks with a part of the gradients: the pipeline, and the ranks of its
            shards.
        agree: makes the ranks agree on stopping, after the hooks at which they do so.
        start_epoch: called at the start of each epoch.
        patches: the changes to the hooks, which are reverted when it is closed.
    """
    module, callbacks, scope, local_layers = run.cut.module, private.callbacks(trainer), run.cut.scope, run.local_layers
    HookClipping(
        lambda: local_layers.parameters, scope, local_layers.holdings, None if run.is_asynchronous else holders, patches
    )
    track_hooks(module, callbacks, scope, patches)
    OptimizersView(
        local_layers.layouts,
        scope,
        patches,
        run.training_loop.why_no_state,
        run.list_parameters,
        local_layers.adopt_groups,
    )
    step_whole = not run.is_asynchronous or isinstance(run.plans.schedule, Schedule)
    track_optimizer_steps(local_layers.optimizers, scope, patches, step_whole)
    synchronise = partial(run.state.synchronise_ranks, pipeline, run.last_rank, run.is_last_rank)
    followed = partial(run.state.follow_hook, synchronise=synchronise)
    wrap_module_hooks(module, patches, followed, run.is_last_rank, run.is_asynchronous, agree, start_epoch)
    if run.is_asynchronous:  # if stages step separately, each stage logs its own values
        check_clearing(module, run.plans.schedule.name, patches)
    else:
        GradientLogs(module, callbacks, pipeline, run.replay, run.last_rank, patches)


def show_module(trainer: pl.Trainer, module: pl.LightningModule, patches: Patches) -> None:
    """Print and log the module while it is whole, and not again until `patches` is closed."""
    for logger in trainer.loggers if trainer.enable_autolog_hparams else []:
        logger.log_graph(module)
        _silence(logger, "log_graph", patches)
    if trainer.state.fn == TrainerFn.FITTING:
        for callback in private.callbacks(trainer):
            if isinstance(callback, ModelSummary):
                callback.on_fit_start(trainer, module)
                _silence(callback, "on_fit_start", patches)


def _silence(owner: object, name: str, patches: Patches) -> None:
    """Replace a method by a function that does nothing.

    Several runs may share the method. It is restored for all of them when the first one closes.
    """
    vars(owner)[name] = lambda *args: None
    patches.callback(vars(owner).pop, name, None)
