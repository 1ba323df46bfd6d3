"""Cuts of single batches. Copies of layers go from rank to rank where stages run other layers than the plan's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_pipes.engine.residency.mirrors import BulkTreeTransport, Mirrors
from lightning_pipes.ir import LayerUse, PipelineError, Plan, PlanError, Policy, Span
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.module.proxy import Layers
from lightning_pipes.trainer.module.tape import TapedLayer
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.step.uses import ChoosesLayers, number_layers


@runtime_checkable
class CutsBatches(Protocol):
    """A LightningModule that says which stage runs which layer, from batch to batch."""

    def cut_of_batch(self, batch: Any) -> Sequence[int] | None:
        """Return the number of the first layer of each stage but the first, for a training batch; None for those of the
        plan. Called on every rank, which must all get the same."""


@runtime_checkable
class LayerCosts(Protocol):
    """A LightningModule that knows how long parts of its layers take."""

    def costs_of_layers(self) -> Mapping[str, float]:
        """Return seconds of forward and backward, or numbers in proportion, by the names of `layers_of_batch`.

        Called once, when training begins; the numbers of the first rank count.
        """


class Cuts:
    """The cuts of one training.

    Args:
        policy: cuts batches, unless the module does it.
        full: the pipelined layers, all of them.
        costs: what the module says of them; where it says nothing, a layer costs as many as it has parameters.

    Attributes:
        cost: returns the cost of a layer by its name.
    """

    def __init__(
        self, module: pl.LightningModule, full: Layers, policy: Policy, costs: Mapping[str, float] | None
    ) -> None:
        self._module, self._full, self._policy = module, full, policy
        self._costs = None if costs is None else number_layers(full, costs)
        self.cost = cache(self._cost_of)

    @staticmethod
    def are_needed(module: pl.LightningModule, policy: object) -> bool:
        """Return whether batches get cuts of their own.

        Raises:
            PipelineError: the module wants to cut batches and does not say which layers they use.
        """
        if isinstance(module, CutsBatches) and not isinstance(module, ChoosesLayers):
            raise PipelineError(
                f"{type(module).__name__} has cut_of_batch, which moves layers between ranks, and no layers_of_batch, "
                "which names the layers that a batch uses; give it both, or neither"
            )
        cuts = isinstance(policy, Policy) and policy.moves_layers_by_batch
        return isinstance(module, ChoosesLayers) and (cuts or isinstance(module, CutsBatches))

    def apply(self, batch: Any, use: LayerUse, plan: Plan) -> LayerUse:
        """`use` with the batch's own cut, if it has one.

        Raises:
            PlanError: a cut for other stages or layers.
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
    """Holds copies of layers for one training on this rank. Collective: all ranks make one.

    Args:
        control: of all ranks, those of other replicas too, which cut batches alike.

    Raises:
        PipelineError: siblings share the ranks.
    """

    def __init__(self, run: PipelineRun, control: Control) -> None:
        module, full, part = run.cut.module, run.cut.full, run.local_layers
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
        holdings, here = part.holdings, part.holdings.grid.position
        self._mirrors = Mirrors(
            dict(enumerate(full)),
            lambda number: holdings.position_of_layer[number] == here,
            BulkTreeTransport(part.bulk_transfer, run.global_ranks),
            lambda: self._optimizers,
            cache(part.group_of),
            run.device,
        )
        run.engine.enable_mirrors(
            self._mirrors, {n: TapedLayer(layer, n, run.hidden.layer) for n, layer in enumerate(full)}
        )

    def layer_use(self, batch: Any, use: LayerUse, plan: Plan) -> LayerUse:
        """Return the use of a batch with its own cut."""
        return self._cuts.apply(batch, use, plan)

    def trains_by(self, optimizers: Sequence[Optimizer]) -> None:
        """These step the layers."""
        self._optimizers = optimizers

    def step_layers(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Let optimizers step these layers in the block, also layers of other ranks."""
        return self._mirrors.in_optimizers(names)

    def show_layers(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Show these layers to the user's hooks in the block, also layers of other ranks."""
        return self._mirrors.in_module(names)
