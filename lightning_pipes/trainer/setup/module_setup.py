"""The part of a setup that depends on how the module is cut, and its implementation for a container of layers."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast
from weakref import WeakSet

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_pipes.ir import Plan
from lightning_pipes.trainer.checkpoint.files import CheckpointWriter
from lightning_pipes.trainer.checks import warn_about_module
from lightning_pipes.trainer.cuts.cut import ModuleCut
from lightning_pipes.trainer.cuts.layers.capture import CacheSwitch, Interceptor
from lightning_pipes.trainer.cuts.layers.hidden_state import HiddenState
from lightning_pipes.trainer.cuts.layers.left_values import LeftValues, layers_by_number
from lightning_pipes.trainer.cuts.layers.pipelined import (
    MIN_STATISTICS_SAMPLES,
    ContainerCut,
    batch_statistics,
    layer_sizes,
)
from lightning_pipes.trainer.cuts.layers.proxy import Layers
from lightning_pipes.trainer.cuts.layers.steps import LayerSteps
from lightning_pipes.trainer.cuts.steps import UserSteps
from lightning_pipes.trainer.loop.connections import Connections
from lightning_pipes.trainer.loop.host import PipelineHost
from lightning_pipes.trainer.plan.container import warn_about_outside
from lightning_pipes.trainer.plan.decider import PlanDecider
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.profile_cache import find_cache
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.settings import Settings
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.relocation.local_layers import LocalLayers
from lightning_pipes.trainer.results.generators import ModuleGenerators
from lightning_pipes.trainer.results.module_state import ModuleState
from lightning_pipes.trainer.session import Session
from lightning_pipes.trainer.user.patches import Patches
from lightning_pipes.trainer.verify.reference import ReferenceProcess
from lightning_pipes.trainer.weights.deferred import DeferredWeights, check_same_cut, group_layers
from lightning_pipes.trainer.weights.sharding import leave_spread

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SetupContext:
    """The inputs of every phase of `prepare`.

    Attributes:
        host: the strategy.
        session: the connections and resources from one call of `setup_environment` to the next.
        request: the run that the user requests.
        settings: the arguments of the strategy.
        writing: specifies how checkpoints are written.
        reference: the process that verifies the run, or None.
        start_epoch: called at the start of each epoch.
        patches: the changes of the run to other objects, which `teardown` reverts.
        by_units: modules whose training_step could not be cut in the layers of a container.
    """

    host: PipelineHost
    session: Session
    request: RunRequest
    settings: Settings
    writing: CheckpointWriter
    reference: ReferenceProcess | None
    start_epoch: Callable[[], None]
    patches: Patches
    by_units: WeakSet[pl.LightningModule]

    @property
    def module(self) -> pl.LightningModule:
        """The user's module."""
        module = self.host.lightning_module
        assert module is not None, "the Trainer has one"
        return module

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer of the module."""
        return self.module.trainer

    @property
    def is_fitting(self) -> bool:
        """Whether the run trains."""
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def is_manual(self) -> bool:
        """Whether the run trains with manual optimization."""
        return self.is_fitting and not self.module.automatic_optimization

    @property
    def ranks(self) -> Ranks:
        """The position of this rank, and the control channels to the other ranks."""
        return self.session.ranks

    @property
    def connections(self) -> Connections:
        """The connections to the other ranks."""
        return self.session.connections

    @property
    def shares_ranks(self) -> bool:
        """Whether siblings of a job array share the ranks."""
        return self.connections.turns is not None


@dataclass(frozen=True)
class WholeWeights:
    """Describes how ranks hold the weights of a module before it is cut.

    Attributes:
        container: the path of the container to cut, if it had to be chosen early because layers are sharded.
        is_sharded: whether layers are sharded by `fully_shard` or `parallelize_module`.
        is_spread: whether an earlier run has left the layers of any rank distributed.
    """

    container: str | None
    is_sharded: bool
    is_spread: bool


class ModuleSetup(ABC):
    """The setup of a module for one way of cutting it.

    All methods are collective: all ranks make one setup and make the same calls.

    Attributes:
        path: the path of the container to cut, or an empty path for the whole module.
        body: the part of the module that sees one micro-batch at a time.
        whole_loss_refusal: the reason why no stage can compute the loss of a whole batch. Empty if the last stage can.
        ruled_out_weights: candidates for the weights of micro-batches that do not reproduce the loss of a batch, or
            None if nothing was compared.
    """

    path: str
    body: nn.Module
    whole_loss_refusal: ClassVar[str] = ""
    ruled_out_weights: frozenset[str] | None = None

    def __init__(self, context: SetupContext) -> None:
        self._context, self._request, self._settings = context, context.request, context.settings
        self._trainer, self._module, self._ranks = context.trainer, context.module, context.ranks
        self.profiles = find_cache(self._trainer)
        """The measured profiles of earlier runs."""

    @property
    def ends_whole(self) -> bool:
        """Whether the step ends with layers that run once for all samples of a batch."""
        return False

    def explain_uncompared_loss(self, holdings: Holdings) -> str:
        """Return the reason why no rank can compute the loss of a whole batch, or an empty text if one can."""
        if len(holdings.ranks_of_stages[-1]) > 1:
            return "the last stage has several ranks, and none of them has a whole batch"
        return self.whole_loss_refusal

    @abstractmethod
    def decide(self) -> Decision:
        """Return the schedule, the micro-batches and the layers of each stage."""

    @abstractmethod
    def index_parameters(self, holdings: Holdings) -> None:
        """Register the stages of each parameter in `holdings`."""

    @abstractmethod
    def group_parts(self) -> Mapping[int, Iterable[nn.Module]]:
        """Return the parts of the module that initialize their weights on `meta` together, by their random stream."""

    @abstractmethod
    def make_weights(self, deferred: DeferredWeights, holdings: Holdings) -> None:
        """Initialize the weights of this rank. This method is collective and is called while the module is whole."""

    @abstractmethod
    def make_hidden_state(self, holdings: Holdings) -> HiddenState | None:
        """Return the tracker of objects that layers of several stages share, or None if stages send all of them.

        It is called while the module is whole.
        """

    @abstractmethod
    def cut(self, local: Sequence[int]) -> ModuleCut:
        """Cut the module so that this rank keeps the `local` layers."""

    @abstractmethod
    def make_steps(self, local_layers: LocalLayers, plan: Plan, seed: int) -> UserSteps:
        """Return the object that runs the user's steps on the stages of this rank.

        Args:
            local_layers: the layers of this rank.
            plan: the plan of a batch.
            seed: the seed of the random numbers of the steps.
        """


class ContainerSetup(ModuleSetup):
    """The setup of a module that is cut in the layers of a container.

    Args:
        context: the inputs of the setup.
        path: the path of the container.
        weights: how ranks hold the weights.
    """

    def __init__(self, context: SetupContext, path: str, weights: WholeWeights) -> None:
        super().__init__(context)
        self.path, self._weights = path, weights
        layers = self._module.get_submodule(path)
        assert isinstance(layers, Layers)
        self._layers = self.body = layers
        self._caches = CacheSwitch(self._module)
        self._interceptor = Interceptor(f"self.{path}", isinstance(layers, nn.ModuleList), self._caches)
        warn_about_module(self._module, layers)

    def decide(self) -> Decision:
        """Return the decision.

        The decision is made as requested, from measured times if the run trains, or it is the decision of earlier
        siblings.
        """
        grid, connections = self._ranks.grid, self._context.connections
        request = self._resume_cut(connections.complete_request(self._request, grid.n_planned))
        least = MIN_STATISTICS_SAMPLES if batch_statistics(self._layers) else 1
        plain = request.unmeasured(layer_sizes(self._layers), grid.n_planned, least, grid.degrees)
        measures = self._context.is_fitting and not grid.degrees
        return connections.agree_on_decision(
            self._module, plain, lambda: self._measure(request, plain) if measures else plain
        )

    def _resume_cut(self, request: RunRequest) -> RunRequest:
        """Return the request with the stages of the checkpoint from which training resumes, if it has any."""
        before = self._context.session.checkpointing.resumed_placement()
        if before is None or not self._context.is_fitting or self._context.shares_ranks:
            return request
        resumed = request.resume_cut(before, len(self._layers), self._ranks.grid.n_planned)
        if resumed is not request:
            rank_zero_info(f"Stages begin at layers {before.cuts}, as they did when the checkpoint was written")
        return resumed

    def _measure(self, request: RunRequest, plain: Decision) -> Decision:
        """Return the decision from measured times."""
        _log.debug("setup: layers of %s are measured", self.path)
        shards = self._ranks.grid.replicas if self._settings.shard_optimizer else 1
        times_steps = self._context.connections.computes_alone
        decider = PlanDecider(
            self._trainer, self.path, self._ranks, self._settings.transport, self.profiles, shards, times_steps
        )
        measured = decider.decide(request, plain)
        if self._ranks.grid.n_planned > 1:
            warn_about_outside(self._module, self.path, measured.profile)
        return measured

    def index_parameters(self, holdings: Holdings) -> None:
        """Register the layers of each parameter in `holdings`."""
        holdings.index_parameters(self._module, self.path)

    def group_parts(self) -> Mapping[int, Iterable[nn.Module]]:
        """Return the parts of each layer, and the parts of the module outside of the layers."""
        return group_layers(self._module, self.path)

    def make_weights(self, deferred: DeferredWeights, holdings: Holdings) -> None:
        """Initialize the weights of the local layers, and the weights outside of the layers."""
        deferred.make_layers(holdings.local, holdings.position_of_layer, self._settings.seed, self._ranks)

    def make_hidden_state(self, holdings: Holdings) -> HiddenState:
        """Return the tracker of objects that layers of several stages share."""
        return HiddenState(
            self._module, self.path, holdings, self._ranks.pipeline, self._context.connections.check_later
        )

    def cut(self, local: Sequence[int]) -> ContainerCut:
        """Replace the container by the `local` layers."""
        self._caches.log()
        if self._weights.is_sharded:
            leave_spread(self._module, self.path, local)
        if self._weights.is_spread:
            check_same_cut(self._module, (self.path, tuple(local)), self._ranks.control)
        return ContainerCut(self._module, self.path, local, self._interceptor, self._ranks.device)

    def make_steps(self, local_layers: LocalLayers, plan: Plan, seed: int) -> LayerSteps:
        """Return the object that runs the user's steps around the layers of this rank."""
        module, device, holdings = self._module, self._ranks.device, local_layers.holdings
        cut = cast(ContainerCut, local_layers.cut)
        assert local_layers.hidden is not None
        generators = ModuleGenerators(module, self._layers, cut.proxy)
        state = ModuleState(
            module, (cut.proxy, *self._layers.modules()), local_layers.hidden.objects_of_layers, device, generators
        )
        left = LeftValues(module, layers_by_number(self._layers), lambda: holdings.local, state, cut.scope, self.path)
        precision = self._context.host.precision_plugin
        return LayerSteps(module, precision, self._interceptor, plan, holdings.rank, seed, device, state, left)
