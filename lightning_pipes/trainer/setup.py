"""From a whole module to its run in a pipeline, in the order of the methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_pipes.engine.compute.rng import replica_seed
from lightning_pipes.trainer.loop.connections import Connections
from lightning_pipes.trainer.loop.part import Part
from lightning_pipes.trainer.loop.run import PipelineRun, Training
from lightning_pipes.trainer.module.capture import Interceptor
from lightning_pipes.trainer.module.checks import warn_about, warn_about_pieces
from lightning_pipes.trainer.module.deferred import DeferredWeights, check_same_cut
from lightning_pipes.trainer.module.hidden_state import HiddenState
from lightning_pipes.trainer.module.optimizers import OptimizerLayout
from lightning_pipes.trainer.module.pipelined import CutModule
from lightning_pipes.trainer.module.proxy import Layers
from lightning_pipes.trainer.plan.container import warn_about_outside
from lightning_pipes.trainer.plan.deciding import Deciding
from lightning_pipes.trainer.plan.decision import Decision, Wanted
from lightning_pipes.trainer.plan.settings import Settings
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.ranks.replicas import Replicas
from lightning_pipes.trainer.step.steps import Steps


class PipelineSetup:
    """Collective: all ranks make one, and the same calls of it.

    Args:
        path: the pipelined container in the module.
        connections: to the other ranks.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, path: str, ranks: Ranks, connections: Connections
    ) -> None:
        full = module.get_submodule(path)
        assert isinstance(full, Layers)
        self.path = path
        self.full = full
        self._trainer = trainer
        self._module = module
        self._ranks = ranks
        self._connections = connections
        warn_about(module, full)
        self._deferred = DeferredWeights(module, path)

    def decide(self, wanted: Wanted, plain: Decision, transport: str) -> Decision:
        """The decision by the times of layers on these devices; `plain` where they are not measured."""
        made = Deciding(self._trainer, self.path, self._ranks, transport).decide(wanted, plain)
        if self._ranks.grid.length > 1:
            warn_about_outside(self._module, self.path, made.profile)
        return made

    def lay_out(self, decision: Decision) -> None:
        """Looks at the whole module as it will be cut: who holds what."""
        self.holdings = holdings = Holdings(self._ranks.grid, decision.ranks, decision.layers)
        holdings.look_at(self._module, self.path)
        self._plans = decision.plans()
        self._plan, order = self._plans.for_rows(self._plans.trial_rows)
        if self._trainer.state.fn == TrainerFn.FITTING and self._plans.microbatches > 1:
            warn_about_pieces(self.full)
        self.endless = order.endless
        self._ranks.control.watch.stages = dict(holdings.stages_of_processes())
        self._hidden = HiddenState(
            self._module,
            self.path,
            holdings,
            self._ranks.pipeline,
            self._connections.check_later,
        )

    def tied(self) -> list[str]:
        """Names of parameters that several ranks train."""
        who = self.holdings.holders
        return [n for n, p in self._module.named_parameters() if p.requires_grad and len(who.get(id(p), ())) > 1]

    def cut(self, seed: int, spread: bool) -> CutModule:
        """The module with the layers of this rank alone; those made on `meta` get values, which depend on `seed`.
        `spread` says whether an earlier run has left the layers of any rank spread out."""
        local = self.holdings.local
        self._interceptor = Interceptor(f"self.{self.path}", loop=isinstance(self.full, nn.ModuleList))
        if spread:
            check_same_cut(self._module, self.path, local, self._ranks.control)
        self._cut = CutModule(self._module, self.path, local, self._interceptor, self._ranks.device)
        self._deferred.make(local, self.holdings.place_of_layer, seed, self._ranks.device, self._ranks.pipeline)
        return self._cut

    def start(
        self,
        training: Callable[[PipelineRun], Training],
        replicas: Replicas,
        precision: Precision,
        settings: Settings,
        layouts: Sequence[OptimizerLayout],
    ) -> PipelineRun:
        """The run of the cut module, whose weights are on the device by now; it trains by what `training` makes."""
        holdings, ranks, connections = self.holdings, self._ranks, self._connections
        seed = replica_seed(settings.seed, ranks.grid.replica)
        bound = connections.turns is not None
        return PipelineRun(
            self._trainer,
            ranks,
            connections,
            Part(self._cut, holdings, self._hidden, layouts, replicas, ranks, bound),
            self._plans,
            Steps(self._module, precision, self._interceptor, self._plan, holdings.rank, seed, ranks.device),
            seed,
            settings.transport,
            settings.check_loss,
            training,
        )
