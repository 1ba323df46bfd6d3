"""The part of the model that this rank has, and how layers move from rank to rank between two windows.

    source   drained, as all ranks are    its state ----->  stand-ins     gradients, clipping, checkpoints, logs:
    target                                     -----> its weights here    all ask who holds what

Weights, buffers, gradients and optimizer states travel as parcels. They arrive before anything changes on any rank, so
a rank that fails meanwhile ends the run as it always does. Nothing random moves: random numbers depend on the layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from lightning_pipes.engine.messages.parcels import Parcels
from lightning_pipes.engine.residency.layer_state import LayerState
from lightning_pipes.engine.watch.points import point
from lightning_pipes.ir import PlanError, Span
from lightning_pipes.trainer.module.hidden_state import HiddenState
from lightning_pipes.trainer.module.optimizers import OptimizerLayout
from lightning_pipes.trainer.module.pipelined import CutModule
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.ranks.replicas import BufferSync, Replicas
from lightning_pipes.trainer.ranks.shared_parameters import SharedParameters


class Part:
    """This rank's layers, and what follows from who has which.

    Collective: all ranks make one, and the same calls of it.

    Args:
        cut: the module with the layers of this rank.
        hidden: watches what layers leave where others might look for it.
        layouts: of the optimizers.
        bound: whether siblings share the rank.

    Attributes:
        parameters: of this rank.
        shared: those that several ranks hold.
        reducer: averages the gradients of the stages over replicas of the pipeline, if there are any.
        buffers: keeps those of the replicas equal.
    """

    def __init__(
        self,
        cut: CutModule,
        holdings: Holdings,
        hidden: HiddenState,
        layouts: Sequence[OptimizerLayout],
        replicas: Replicas,
        ranks: Ranks,
        bound: bool,
    ) -> None:
        self.cut, self.holdings, self.hidden = cut, holdings, hidden
        self.buffers = BufferSync(cut.module, replicas)
        self._layouts, self._replicas, self._control, self._device = layouts, replicas, ranks.control, ranks.device
        self._bound = bound
        self._began = holdings.layers
        self._parcels: Parcels | None = None
        self._connect_gradients()

    def layers_of(self, stage: int) -> dict[int, nn.Module]:
        """The layers of a stage of this rank, by number."""
        return {number: self.cut.full[number] for number in range(*self.holdings.layers[stage])}

    def check(self, layers: Sequence[Span]) -> None:
        """Whether the stages can have these layers.

        Raises:
            PlanError: see `Holdings.moves`; or siblings share this rank, whose memory holds the layers of each.
        """
        if self.holdings.moves(layers) and self._bound:
            raise PlanError(
                "layers can't move while siblings of a job array share the ranks; run this training alone, or leave "
                "the layers out of the plan"
            )

    def move(self, layers: Sequence[Span]) -> None:
        """From now on the stages have these layers; no window is open.

        Raises:
            PlanError: see `Holdings.moves`, or a layer has something that can't be sent.
            PeerFailure: a rank has failed.
        """
        self.check(layers)
        moves = self.holdings.moves(layers)
        me = dist.get_rank()
        optimizers = [layout.optimizer for layout in self._layouts]
        coming = [m for m in moves if m.target == me]
        point("move")
        for m in coming:
            self.cut.check_arrival(m.layer)
        parcels = self.parcels
        sent = [
            parcels.send(m.target, m.layer, self._packed(LayerState.of(self.cut.full[m.layer], optimizers), m.layer))
            for m in moves
            if m.source == me
        ]
        expected = {m.layer: parcels.expect(m.source, m.layer) for m in coming}
        arrived = {layer: handle.content for layer, handle in expected.items()}
        for handle in sent:
            handle.wait()
        point("move.arrived")
        states = {layer: LayerState(**state) for layer, (state, _) in arrived.items()}
        self._disconnect_gradients()
        self.holdings.settle(layers)
        self.cut.hold(self.holdings.local, states, self._device)
        for layout in self._layouts:
            layout.keep_local(self.cut.is_foreign)
        for layer, state in states.items():
            state.put_optimizer_states(self.cut.full[layer], optimizers, self._device)
            self.buffers.follow(self._prefix(layer), arrived[layer][1])
        self.hidden.look_again()
        self._connect_gradients()

    def go_home(self) -> None:
        """The layers go back to where they were when the run began, and the next one looks for them."""
        if self.holdings.layers != self._began:
            self.move(self._began)

    def close(self) -> None:
        """Ends the connections by which layers moved, if any did."""
        self._disconnect_gradients()
        if self._parcels is not None:
            self._parcels.close()

    @property
    def parcels(self) -> Parcels:
        """Those by which layers go; all ranks have to ask for them the first time at one place of training."""
        if self._parcels is None:
            self._parcels = Parcels(dist.get_rank(), self.holdings.grid.pipeline, self._control.watch)
        return self._parcels

    def group_of(self, optimizer: int, layer: int, name: str) -> int | None:
        """The group in which an optimizer has a parameter, wherever that is; None if it has it not.

        Args:
            name: of the parameter in the layer.
        """
        groups = enumerate(self._layouts[optimizer].whole)
        return next((group for group, names in groups if self._prefix(layer) + name in names), None)

    def _packed(self, state: LayerState, layer: int) -> tuple[dict[str, object], list[str]]:
        return vars(state), self.buffers.changing(self._prefix(layer))

    def _prefix(self, layer: int) -> str:
        return f"{self.cut.path}.{list(self.cut.full._modules)[layer]}."

    def _connect_gradients(self) -> None:
        own = self.holdings.stages
        self.reducer = self._replicas.reducer({s: self.layers_of(s).values() for s in own}, self.holdings)
        self.parameters = list(self.cut.module.parameters())
        rest = [p for p in self.parameters if not self.holdings.in_one_stage(p)]
        self.shared = SharedParameters(rest, self.holdings, self._control)

    def _disconnect_gradients(self) -> None:
        if self.reducer is not None:
            self.reducer.remove()
