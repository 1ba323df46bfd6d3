"""Layers go from rank to rank between batches, where these have cuts of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch.optim import Optimizer

from lightning_pipes.engine.residency.mirrors import BulkTreeTransport, Mirrors
from lightning_pipes.ir import LayerUse, PipelineError, Plan, Policy
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.module.tape import TapedLayer
from lightning_pipes.trainer.step.cuts import Cuts, LayerCosts


class LayerCopies:
    """Holds copies of layers for one training on this rank. Collective: all ranks make one.

    Raises:
        PipelineError: siblings share the ranks.
    """

    def __init__(self, run: PipelineRun) -> None:
        module, full, part = run.cut.module, run.cut.full, run.part
        if run.connections.turns is not None:
            raise PipelineError(
                "layers can't go from rank to rank between batches while siblings of a job array share the ranks: run "
                "this training alone, or leave out what cuts batches"
            )
        policy = run.plans.schedule
        assert isinstance(policy, Policy), "only policies order batches that overlap"
        said = module.costs_of_layers() if isinstance(module, LayerCosts) else None
        self._cuts = Cuts(module, full, policy, run.control.broadcast(said, run.global_ranks[0]))
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
        run.engine.mirror(self._mirrors, {n: TapedLayer(layer, n, run.hidden.layer) for n, layer in enumerate(full)})

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
