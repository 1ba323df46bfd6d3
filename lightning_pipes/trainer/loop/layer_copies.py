"""Cuts of single batches. Layers are copied between ranks if the stages of a batch run other layers than the plan's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_pipes.engine.compute.stage import RankResources
from lightning_pipes.engine.residency.layer_memory import LayerMemory
from lightning_pipes.engine.residency.mirrors import BulkTreeTransport, Mirrors
from lightning_pipes.ir import LayerUse, PipelineError, Plan, PlanError, Policy, Span
from lightning_pipes.trainer.cuts.layers.proxy import Layers
from lightning_pipes.trainer.cuts.layers.tape import TapedLayer
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.uses import ChoosesLayers, number_layers
from lightning_pipes.trainer.ranks.control import Control


@runtime_checkable
class CutsBatches(Protocol):
    """A LightningModule that assigns layers to stages separately for each batch."""

    def cut_of_batch(self, batch: Any) -> Sequence[int] | None:
        """Return the number of the first layer of each stage except the first one, for a training batch.

        None selects the layers of the plan. The method is called on every rank and must return the same value on all of
        them.
        """


@runtime_checkable
class LayerCosts(Protocol):
    """A LightningModule that provides the costs of its layers."""

    def costs_of_layers(self) -> Mapping[str, float]:
        """Return the cost of each layer, by the names of `layers_of_batch`.

        A cost is in seconds of forward and backward, or in any proportional unit. The method is called once when
        training begins, and the result on the first rank is used.
        """


class Cuts:
    """The cuts of the batches of one training.

    Args:
        module: the user's module.
        full: all layers of the pipelined module.
        policy: cuts batches, unless the module does.
        costs: the costs that the module provides. With None, the cost of a layer is its number of parameters.

    Attributes:
        cost: returns the cost of a layer, given its name.
    """

    def __init__(
        self, module: pl.LightningModule, full: Layers, policy: Policy, costs: Mapping[str, float] | None
    ) -> None:
        self._module, self._full, self._policy = module, full, policy
        self._costs = None if costs is None else number_layers(full, costs)
        self.cost = cache(self._cost_of)

    @staticmethod
    def are_needed(module: pl.LightningModule, policy: object) -> bool:
        """Return whether batches have their own cuts.

        Raises:
            PipelineError: the module cuts batches, but does not specify which layers they use.
        """
        if isinstance(module, CutsBatches) and not isinstance(module, ChoosesLayers):
            raise PipelineError(
                f"{type(module).__name__} has cut_of_batch, which moves layers between ranks, and no layers_of_batch, "
                "which names the layers that a batch uses; give it both, or neither"
            )
        cuts = isinstance(policy, Policy) and policy.moves_layers_by_batch
        return isinstance(module, ChoosesLayers) and (cuts or isinstance(module, CutsBatches))

    def apply(self, batch: Any, use: LayerUse, plan: Plan) -> LayerUse:
        """Return `use` with the batch's own cut, if the batch has one.

        Raises:
            PlanError: the cut has the wrong number of stages, or does not assign the layers in order.
        """
        if not isinstance(self._module, CutsBatches):
            cut = self._policy.cut(use, self.cost, plan)
        else:
            begins = self._module.cut_of_batch(batch)
            cut = None if begins is None else self._check_cut(list(begins), plan)
        return use if cut is None or cut == plan.layers else use.with_cut(cut)

    def _check_cut(self, begins: list[int], plan: Plan) -> tuple[Span, ...]:
        ends = [0, *begins, plan.layers[-1].stop]
        if len(begins) != plan.n_stages - 1 or ends != sorted(ends):
            raise PlanError(
                f"cut_of_batch gives {begins} for {plan.n_stages} stages of layers 0 to {ends[-1] - 1}; it needs the "
                f"first layer of each stage but the first, {plan.n_stages - 1} numbers that do not fall"
            )
        return tuple(Span(a, b) for a, b in pairwise(ends))

    def _cost_of(self, name: str) -> float:
        if self._costs is not None:
            return self._costs.get(name, 0.0)
        number, _, part = name.partition(".")
        return float(sum(p.numel() for p in self._full[int(number)].get_submodule(part).parameters()))


class LayerCopies:
    """The copies of layers that one training has on this rank. Collective: all ranks create one.

    Args:
        run: the run of the training.
        control: the collectives of all ranks, including the ranks of other replicas, which use the same cuts.
        memory: loads and offloads layers; None if all layers stay on the device.

    Raises:
        PipelineError: siblings of a job array share the ranks.
    """

    def __init__(self, run: PipelineRun, control: Control, memory: LayerMemory | None) -> None:
        module, full, local_layers = run.cut.module, run.cut.full, run.local_layers
        if run.connections.turns is not None:
            raise PipelineError(
                "layers can't move between batches while siblings of a job array share the ranks; run this training "
                "alone, or leave out balanced=True and cut_of_batch"
            )
        policy = run.plans.schedule
        assert isinstance(policy, Policy), "only policies order batches that overlap"
        said = module.costs_of_layers() if isinstance(module, LayerCosts) else None
        self._cuts = Cuts(module, full, policy, control.broadcast(said, control.ranks[0]))
        self._optimizers: Sequence[Optimizer] = ()
        holdings, here = local_layers.holdings, local_layers.holdings.grid.position
        self._mirrors = Mirrors(
            dict(enumerate(full)),
            lambda number: holdings.position_of_layer[number] == here,
            BulkTreeTransport(local_layers.bulk_transfer, run.global_ranks),
            lambda: self._optimizers,
            cache(local_layers.group_of),
            run.device,
            memory,
        )
        self._layers = {n: TapedLayer(layer, n, local_layers.around_layer) for n, layer in enumerate(full)}

    def add_to(self, resources: RankResources) -> RankResources:
        """Return the resources of a rank with these copies."""
        return replace(resources, mirrors=self._mirrors, all_layers=self._layers)

    def layer_use(self, batch: Any, use: LayerUse, plan: Plan) -> LayerUse:
        """Return the use of a batch with its own cut."""
        return self._cuts.apply(batch, use, plan)

    def trains_by(self, optimizers: Sequence[Optimizer]) -> None:
        """Set the optimizers that step the layers."""
        self._optimizers = optimizers

    def step_layers(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Allow optimizers to step these layers in the block, including layers of other ranks."""
        return self._mirrors.in_optimizers(names)

    def show_layers(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Make these layers visible to the user's hooks in the block, including layers of other ranks."""
        return self._mirrors.in_module(names)
