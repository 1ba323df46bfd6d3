"""From a whole module to its run in a pipeline, in the order of the methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_pipes.engine.compute.rng import replica_seed
from lightning_pipes.engine.residency.layer_memory import StateMemory
from lightning_pipes.ir import PipelineError
from lightning_pipes.planning.planner import Planner
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.flushing import Flushing
from lightning_pipes.trainer.loop.run import PipelineRun, Training
from lightning_pipes.trainer.loop.stopping import StopAgreement
from lightning_pipes.trainer.loop.streaming import Streaming, check_streaming
from lightning_pipes.trainer.loop.wrapping import wrap_hooks
from lightning_pipes.trainer.module.capture import CacheSwitch, Interceptor
from lightning_pipes.trainer.module.checks import warn_about, warn_about_pieces
from lightning_pipes.trainer.module.deferred import DeferredWeights, check_same_cut
from lightning_pipes.trainer.module.hidden_state import HiddenState
from lightning_pipes.trainer.module.optimizers import OptimizerLayout
from lightning_pipes.trainer.module.pipelined import (
    LEAST_FOR_STATISTICS,
    CutModule,
    batch_statistics,
    find_pipelined,
    layer_sizes,
)
from lightning_pipes.trainer.module.proxy import Layers
from lightning_pipes.trainer.module.step_probe import check_steps_apart
from lightning_pipes.trainer.moves.part import Part
from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.plan.container import find_container, warn_about_outside
from lightning_pipes.trainer.plan.deciding import Deciding
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.placement import Placement
from lightning_pipes.trainer.plan.prediction import Prediction
from lightning_pipes.trainer.plan.profile_cache import find_cache
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.settings import Settings
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.reports.summary import show_module
from lightning_pipes.trainer.running import Running
from lightning_pipes.trainer.session import Session
from lightning_pipes.trainer.state.left_values import LeftValues, layers_by_number
from lightning_pipes.trainer.state.module_state import ModuleState
from lightning_pipes.trainer.step.clipping import GradientAgreement
from lightning_pipes.trainer.step.logs import limit_metric_sync
from lightning_pipes.trainer.step.steps import Steps
from lightning_pipes.trainer.verify.reference import ReferenceProcess
from lightning_pipes.trainer.verify.verifier import Verifier, check_verifiable


class PipelineSetup:
    """Collective: all ranks make one, and the same calls of it.

    Args:
        path: the pipelined container in the module.
        patches: closed by `teardown`.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        path: str,
        session: Session,
        settings: Settings,
        patches: Patches,
    ) -> None:
        full = module.get_submodule(path)
        assert isinstance(full, Layers)
        self.path = path
        self.full = full
        self._trainer = trainer
        self._fitting = trainer.state.fn == TrainerFn.FITTING
        self._module = module
        self._session = session
        self._ranks = session.ranks
        self._links = session.links
        self._settings = settings
        self._patches = patches
        warn_about(module, full)
        self._deferred = DeferredWeights(module, path)
        self._profiles = find_cache(trainer)

    def decide(self, request: RunRequest) -> Decision:
        """The decision: as asked for, as measured where something is trained, or as siblings have made it."""
        length = self._ranks.grid.length
        request = self._resumed(self._links.requested(request, length), length)
        least = LEAST_FOR_STATISTICS if batch_statistics(self.full) else 1
        plain = request.unmeasured(layer_sizes(self.full), length, least)
        decide = partial(self._measured, request, plain) if self._fitting else lambda: plain
        return self._links.decide(self._module, plain, decide)

    def _resumed(self, request: RunRequest, ranks: int) -> RunRequest:
        """Return the run with its layers where the checkpoint has them that it goes on from."""
        checkpointing = self._session.checkpointing
        before, asked = checkpointing.resumed_placement(), request.partition
        checkpointing.placement = lambda: Placement(self.holdings.layers, self.holdings.ranks, asked)
        if before is None or not self._fitting or self._links.turns is not None:
            return request
        found = request.resumed(before, len(self.full), ranks)
        if found is not request:
            rank_zero_info(f"Stages begin at layers {before.cuts}, as they did when the checkpoint was written")
        return found

    def _measured(self, request: RunRequest, plain: Decision) -> Decision:
        """The decision by the times of layers on these devices; `plain` where they are not measured."""
        made = Deciding(self._trainer, self.path, self._ranks, self._settings.transport, self._profiles).decide(
            request, plain
        )
        if self._ranks.grid.length > 1:
            warn_about_outside(self._module, self.path, made.profile)
        return made

    def lay_out(self, decision: Decision, replanner: Planner | None = None) -> None:
        """Looks at the whole module as it will be cut: who holds what; and who may have layers move later.

        Raises:
            PipelineError: layers would move, which siblings' can't.
        """
        if replanner is not None and self._links.turns is not None:
            raise PipelineError(
                "replan moves layers, which siblings of a job array can't while they share the ranks; leave it out, or "
                "run this training alone"
            )
        self._decision = decision
        self.holdings = holdings = Holdings(self._ranks.grid, decision.ranks, decision.layers)
        holdings.look_at(self._module, self.path)
        self._plans = decision.plans(replanner, holdings.tied, self._settings.moves)
        self._plan, order = self._plans.for_rows(self._plans.trial_rows)
        if self._fitting and self._plans.microbatches > 1:
            warn_about_pieces(self.full)
        self._streams = self._fitting and order.is_endless
        self._ranks.control.watch.stages = dict(holdings.stages_of_processes())
        self._hidden = HiddenState(
            self._module,
            self.path,
            holdings,
            self._ranks.pipeline,
            self._links.check_later,
        )

    def training(self, memory: StateMemory | None) -> Callable[[PipelineRun], Training]:
        """A function that makes what trains by the schedule; with `memory` layers or weight versions take turns there.

        Raises:
            PlanError, PipelineError: it can't train so.
        """
        schedule = self._decision.schedule
        if self._fitting and self._settings.verify.batches:
            check_verifiable(schedule)
        if self._fitting and memory is not None and not self._streams:
            raise PipelineError(
                "MemorySwap as a callback has the layers of a supernet take turns, or weight versions; schedule "
                f"{schedule.name!r} runs all layers for each batch, and has one version. Leave MemorySwap out, or "
                "use 'csp' for a supernet, or a schedule that stashes weights, such as 'pipedream' or 'dynpipe'"
            )
        if not self._streams:
            return Flushing
        self._links.check_endless(schedule.name)
        check_streaming(self._trainer, schedule, self._ranks.grid, self._tied())
        return partial(Streaming, control=self._ranks.control, memory=memory)

    def _tied(self) -> list[str]:
        """Names of parameters that several ranks train."""
        who = self.holdings.holders
        return [n for n, p in self._module.named_parameters() if p.requires_grad and len(who.get(id(p), ())) > 1]

    def cut(self, spread: bool) -> CutModule:
        """The module with the layers of this rank alone; those made on `meta` get values, which depend on the seed.
        `spread` says whether an earlier run has left the layers of any rank spread out."""
        local = self.holdings.local
        show_module(self._trainer, self._module, self._patches)
        caches = CacheSwitch(self._module)
        caches.log()
        self._interceptor = Interceptor(f"self.{self.path}", isinstance(self.full, nn.ModuleList), caches)
        if spread:
            check_same_cut(self._module, self.path, local, self._ranks.control)
        self._cut = CutModule(self._module, self.path, local, self._interceptor, self._ranks.device)
        where, device = self.holdings.position_of_layer, self._ranks.device
        self._deferred.make(local, where, self._settings.seed, device, self._ranks.pipeline)
        self._session.checkpointing.load_waiting(self._cut)
        return self._cut

    def start(
        self,
        training: Callable[[PipelineRun], Training],
        precision: Precision,
        layouts: Sequence[OptimizerLayout],
        writing_at_once: Callable[[], AbstractContextManager[None]],
    ) -> Running:
        """The run of the cut module, whose weights are on the device by now; it trains by what `training` makes."""
        holdings, ranks, links, settings = self.holdings, self._ranks, self._links, self._settings
        stops = StopAgreement(self._trainer, ranks.control, writing_at_once, lambda: links.told_to_end, self._patches)
        seed = replica_seed(settings.seed, ranks.grid.replica)
        by_number = layers_by_number(self.full)
        layers = (self._cut.proxy, *self.full.modules())
        state = ModuleState(self._module, layers, self._hidden.objects_of_layers, ranks.device)
        rank, device = holdings.rank, ranks.device
        steps = Steps(
            self._module,
            precision,
            self._interceptor,
            self._plan,
            rank,
            seed,
            device,
            state,
            LeftValues(self._module, by_number, lambda: holdings.local, state, self._cut.scope),
        )
        bound = links.turns is not None
        run = PipelineRun(
            self._trainer,
            ranks,
            links,
            Part(self._cut, holdings, self._hidden, layouts, self._session.replicas, ranks, bound),
            self._plans,
            steps,
            seed,
            settings.transport,
            settings.check_loss,
            training,
            settings.moves,
        )
        stays = bool(holdings.tied) or bound
        prediction = (
            Prediction(self._decision, ranks, links.trainings == 1, stays, self._profiles.forget)
            if self._fitting
            else None
        )
        return Running(run, stops, prediction)

    def wrap(
        self,
        running: Running,
        precision: Precision,
        start_epoch: Callable[[], None],
        reference: ReferenceProcess | None,
    ) -> Verifier | None:
        """Has what Lightning and the user do around the run's steps do so for all ranks, and each epoch begin with
        `start_epoch`. Returns what compares the first batches with those of the reference, if that is wanted."""
        run, ranks, patches = running.run, self._ranks, self._patches
        if ranks.grid.length > 1 and self._fitting:
            check_steps_apart(run.part.optimizers, run.streams)
        pipeline = None if run.streams else ranks.pipeline
        GradientAgreement(precision, self.holdings, pipeline, ranks.device, self._cut.scope, patches)
        agree = run.agreement(running.stops)
        verifier: Verifier | None = None

        def verify_and_agree() -> None:
            if verifier is not None:
                verifier.batch_ended()
            agree()

        wanted = self._settings.verify
        verifies = self._fitting and wanted.batches > 0
        wrap_hooks(self._trainer, run, ranks.pipeline, verify_and_agree if verifies else agree, start_epoch, patches)
        limit_metric_sync(self._module, self._session.replicas.group, patches)
        patches.callback(private.forget_training_data, self._trainer)
        patches.callback(self._session.checkpointing.data.forget)
        if verifies:
            verifier = Verifier(wanted, reference, self._trainer, run, self._settings.seed)
            patches.callback(verifier.close)
        return verifier


def container(trainer: pl.Trainer, module: pl.LightningModule, session: Session, named: str | None) -> str:
    """The path of what is cut: as named, as before in a run that goes on, or as it is found. Collective."""
    before = session.checkpointing.resumed_container()
    if named is not None or before in dict(module.named_modules()):
        return find_pipelined(module, before if named is None else named)
    find = partial(find_container, trainer, module, session.control, session.ranks.device)
    return session.links.container(module, find)
