"""The layers of this rank, with their optimizers, reducers and buffers.

When layers move between two windows, the source replaces their weights by stand-ins, and the target takes over their
state. Gradients, clipping, checkpoints and logs read the new placement from `Holdings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.reducer import ReplicaAverages, complete_gradient
from lightning_pipes.engine.messages.bulk_transfer import BulkTransfer
from lightning_pipes.engine.residency.layer_state import LayerState
from lightning_pipes.engine.residency.mirrors import BulkTreeTransport
from lightning_pipes.ir import PlanError, Span
from lightning_pipes.trainer.cuts.cut import ModuleCut
from lightning_pipes.trainer.cuts.layers.hidden_state import HiddenState
from lightning_pipes.trainer.optimizers.optimizers import OptimizerLayout
from lightning_pipes.trainer.optimizers.shared_parameters import SharedParameters
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.processes import process_rank
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.ranks.replicas import BufferSync, GatheredStages, Replicas


class LocalLayers:
    """The layers of this rank, with their optimizers and parameters.

    Collective: all ranks create one, and call its methods in the same order.

    Args:
        cut: the module with the layers of this rank.
        holdings: the placement of the layers.
        hidden: watches the objects that layers of several stages share.
        layouts: the optimizers and the names of their parameters.
        replicas: the ranks that hold the same stages.
        ranks: the ranks of the session.
        shares_rank: whether siblings of a job array share the rank.
        steps_by_batch: whether batches overlap in an order that each replica chooses for itself.

    Attributes:
        parameters: the parameters of this rank.
        unoptimized: the parameters of this rank that no optimizer has.
        device: the device of the parameters.
        layouts: the optimizers and the names of their parameters.
        initial_layers: the layers of each stage at the beginning of the run.
        shared: sums the gradients of parameters that several ranks hold.
        reducer: averages the gradients of the stages over the replicas of the pipeline, if there are any.
        replica_averages: replaces `reducer` if replicas have their own orders, and averages gradients batch by batch.
        gathered: lets FSDP2 gather and reduce its shards of the stages.
        buffers: keeps the buffers of all replicas equal.
    """

    def __init__(
        self,
        cut: ModuleCut,
        holdings: Holdings,
        hidden: HiddenState | None,
        layouts: Sequence[OptimizerLayout],
        replicas: Replicas,
        ranks: Ranks,
        shares_rank: bool,
        steps_by_batch: bool = False,
    ) -> None:
        self.cut, self.holdings, self.hidden = cut, holdings, hidden
        self.around_layer = None if hidden is None else hidden.layer
        """Returns a context for the forward of a layer, see `HiddenState.layer`. None if there is no such context."""
        self.buffers = BufferSync(cut.module, replicas.group or holdings.make_stage_group(ranks.control))
        self.layouts, self._replicas, self._control, self.device = layouts, replicas, ranks.control, ranks.device
        self._shares_rank = shares_rank
        self.initial_layers = holdings.layers
        self._bulk_transfer: BulkTransfer | None = None
        self._replica_transfer: BulkTransfer | None = None
        self.replica_averages = self._make_replica_averages() if steps_by_batch and holdings.grid.replicas > 1 else None
        self._connect_gradients()

    def layers_of(self, stage: int) -> dict[int, nn.Module]:
        """Return the layers of a stage of this rank, by number."""
        return {number: self.cut.full[number] for number in range(*self.holdings.layers[stage])}

    def check_placement(self, layers: Sequence[Span]) -> None:
        """Check that the layers of the stages can become `layers`.

        Raises:
            PlanError: see `Holdings.list_moves`; or layers would move while siblings share this rank, whose memory
                holds the layers of each sibling.
        """
        if self.holdings.list_moves(layers) and self._shares_rank:
            raise PlanError(
                "layers can't move while siblings of a job array share the ranks; run this training alone, or leave "
                "the layers out of the plan"
            )

    def take_layers(self, layers: Sequence[Span], arrived: Mapping[int, tuple[LayerState, Sequence[str]]]) -> None:
        """Change the layers of the stages to `layers`. This rank takes over the layers that have arrived.

        Args:
            layers: the new layers of each stage.
            arrived: for each layer that has arrived, its state and the names of its changing buffers, as returned by
                `changing_buffers`.
        """
        states = {layer: state for layer, (state, _) in arrived.items()}
        self._disconnect_gradients()
        self.holdings.place_layers(layers)
        self.cut.hold(self.holdings.local, states, self.device)
        for layout in self.layouts:
            layout.keep_local(self.cut.is_foreign)
        for layer, (state, changing) in arrived.items():
            state.put_optimizer_states(self.cut.full[layer], self.optimizers, self.device)
            self.buffers.follow_names(self._prefix(layer), changing)
        if self.hidden is not None:
            self.hidden.watch_again()
        self._connect_gradients()

    def state_of(self, layer: int, gradients: bool = True) -> LayerState:
        """Return the state of a layer of this rank. It refers to the tensors, and does not copy them."""
        return LayerState.from_layer(self.cut.full[layer], self.optimizers, gradients)

    def parameters_of(self, layer: int) -> dict[str, nn.Parameter]:
        """Return the parameters of a layer of this rank, by their names in the layer."""
        return dict(self.cut.full[layer].named_parameters())

    def changing_buffers(self, layer: int) -> list[str]:
        """Return the names of the layer's buffers that are known to change."""
        return self.buffers.changing_names(self._prefix(layer))

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of this rank."""
        return [layout.optimizer for layout in self.layouts]

    def order_by_batch(self, is_open: Callable[[], bool]) -> ReplicaAverages | None:
        """Return the averages of gradients over replicas batch by batch, if replicas have their own orders.

        Args:
            is_open: whether replicas run batches in their own orders at the moment.
        """
        if self.replica_averages is not None:
            self._replicas.has_own_order = is_open
        return self.replica_averages

    def close(self) -> None:
        """Close the connections of layer moves and of replicas, if there are any, and remove the reducer."""
        self._replicas.has_own_order = lambda: False
        self._disconnect_gradients()
        for transfer in (self._bulk_transfer, self._replica_transfer):
            if transfer is not None:
                transfer.close()

    @property
    def bulk_transfer(self) -> BulkTransfer:
        """The transfer of whole layers. All ranks must access it for the first time at the same batch."""
        if self._bulk_transfer is None:
            grid, watch = self.holdings.grid, self._control.watch
            self._bulk_transfer = BulkTransfer(process_rank(), grid.pipeline, watch)
        return self._bulk_transfer

    def _make_replica_averages(self) -> ReplicaAverages:
        grid = self.holdings.grid
        ranks = grid.on_all_replicas((grid.position,))
        self._replica_transfer = BulkTransfer(process_rank(), ranks, self._control.watch, self.device)
        return ReplicaAverages(BulkTreeTransport(self._replica_transfer, ranks), grid.replica, grid.replicas)

    @property
    def reduces_in_backward(self) -> bool:
        """Whether gradients are reduced over replicas while a stage runs its last backward of a batch."""
        return self.reducer is not None or bool(self.gathered)

    @contextmanager
    def around_last_backward(self, stage: int, is_complete: bool) -> Iterator[None]:
        """Wrap the backward of a stage that ends a batch on this stage.

        Args:
            stage: the stage.
            is_complete: whether an optimizer step follows. Until then, FSDP2 accumulates sharded gradients.
        """
        reducer = self.reducer if is_complete else None
        with self.gathered.last_backward(stage), nullcontext() if reducer is None else reducer.last_backward(stage):
            yield

    def complete_gradients(self) -> None:
        """Sum gradients over the ranks that share a parameter, and average them over replicas, before an optimizer
        step."""
        self.shared.sum_gradients()
        if self.reducer is not None:
            self.reducer.finish()
        for parameter in self.parameters:
            complete_gradient(parameter)

    def group_of(self, optimizer: int, layer: int, name: str) -> int | None:
        """Return the group in which an optimizer has a parameter of any rank; None if it does not have the parameter.

        Args:
            optimizer: the number of the optimizer.
            layer: the number of the layer.
            name: the name of the parameter in the layer.
        """
        groups = enumerate(self.layouts[optimizer].whole)
        return next((group for group, names in groups if self._prefix(layer) + name in names), None)

    def _prefix(self, layer: int) -> str:
        return self.cut.layer_prefix(layer)

    def _connect_gradients(self) -> None:
        own = self.holdings.stages
        layers = {s: self.layers_of(s).values() for s in own}
        self.reducer = None if self.replica_averages is not None else self._replicas.reducer(layers, self.holdings)
        self.gathered = GatheredStages({s: self.layers_of(s).values() for s in own})
        self.parameters = list(self.cut.module.parameters())
        self._find_unstepped()
        several = bool(self.holdings.grid.degrees)  # a stage has several ranks
        rest = [p for p in self.parameters if several or not self.holdings.in_one_stage(p)]
        self.shared = SharedParameters(rest, self.holdings, self._control)

    def adopt_groups(self) -> None:
        """Take over the parameter groups that a hook has added to the optimizers."""
        for layout in self.layouts:
            layout.keep_local(self.cut.is_foreign)
        self._find_unstepped()

    def _find_unstepped(self) -> None:
        stepped = {name for layout in self.layouts for names in layout.whole for name in names}
        named = self.cut.module.named_parameters()
        self.unoptimized = [p for name, p in named if name not in stepped and not self.cut.is_foreign(p)]

    def _disconnect_gradients(self) -> None:
        if self.reducer is not None:
            self.reducer.remove()
