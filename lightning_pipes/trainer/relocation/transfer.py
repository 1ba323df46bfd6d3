"""Layers that travel between ranks: while all ranks wait, or before the switch while batches continue.

    source   trains the layer:  its current state --->   the gradients of every step since --->   the rest ---> |
    target   trains without it                           takes these steps as soon as everything has arrived    |

Weights, buffers, gradients and optimizer states are sent as parcels. They arrive before anything changes on any rank,
so a rank that fails in the meantime ends the run in the same way as at any other time. Random states are not sent,
because random numbers depend on the layer.

The source keeps the state of a layer until the target has confirmed with a checksum that its state is the same. The
states can differ if weights were changed by anything other than steps. A state that differs is sent again. The
optimizer steps of a layer that travels may be taken later than their batches, but in the order of the batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_pipes.engine.messages.bulk_transfer import TransferHandle
from lightning_pipes.engine.residency.layer_state import LayerState
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.ir import Span
from lightning_pipes.trainer.ranks.processes import process_rank
from lightning_pipes.trainer.relocation.local_layers import LocalLayers

GroupSettings = list[dict[str, Any]]
"""The settings of each group of an optimizer, such as the learning rate."""
Gradients = dict[torch.Tensor, torch.Tensor]
"""Gradients by parameter."""
_OF_THIS_RANK = ("params", "param_names")


def settings_of(optimizer: Optimizer) -> GroupSettings:
    """Return a copy of the settings of an optimizer's groups."""
    return [
        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items() if key not in _OF_THIS_RANK}
        for group in optimizer.param_groups
    ]


@contextmanager
def with_settings(optimizer: Optimizer, settings: GroupSettings) -> Iterator[None]:
    """Replace the settings of an optimizer's groups in the block."""
    now = settings_of(optimizer)
    _put_settings(optimizer, settings)
    yield
    _put_settings(optimizer, now)


def _put_settings(optimizer: Optimizer, settings: GroupSettings) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def _keep_gradients() -> float:
    """Serve as the closure of a late step, whose gradients are already known. The loss is unknown."""
    return math.nan


class DeferredSteps:
    """Optimizer steps that are taken later, with the gradients and the settings of their time, by batch and
    optimizer."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], tuple[GroupSettings, Gradients]] = {}

    def add(
        self, batch: int, number: int, settings: GroupSettings, gradients: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """Add a step of these parameters by an optimizer for a batch.

        Args:
            batch: the number of the batch.
            number: the number of the optimizer.
            settings: the settings of the optimizer's groups.
            gradients: the gradients by parameter.
        """
        self._steps.setdefault((batch, number), (settings, {}))[1].update(gradients)

    def add_gradients(self, batch: int, number: int, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Add more gradients to a step that has been added."""
        self._steps[batch, number][1].update(gradients)

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Take all steps, batch by batch. The current gradients of the parameters are kept."""
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        held = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        for (_, number), (settings, gradients) in sorted(self._steps.items(), key=lambda step: step[0]):
            optimizer = optimizers[number]
            for p, gradient in gradients.items():
                p.grad = gradient
            with with_settings(optimizer, settings):
                optimizer.step(_keep_gradients)
            for p in gradients:
                p.grad = None
        self._steps.clear()
        for p, gradient in zip(parameters, held, strict=True):
            p.grad = gradient


_log = logging.getLogger(__name__)


class LayerTransfer:
    """The transfer of the layers that have to move so that the stages get `layers`, as one rank sees it.

    Collective: all ranks create one, and call its methods in the same order, with `send_step` for the same batches.

    Args:
        local_layers: the layers of this rank.
        layers: the new layers of each stage.
        defers_steps: whether the steps of all layers wait until the transfer ends. Otherwise, the layers that travel
            still step at the source.
        number: the number of this transfer in the training.

    Attributes:
        moves: the layers that travel, with their source and target.
        n_resent: the number of layers that this rank has received a second time.

    Raises:
        PlanError: see `LocalLayers.check_placement`; or this rank can't take over a layer.
    """

    def __init__(
        self, local_layers: LocalLayers, layers: Sequence[Span], defers_steps: bool = False, number: int = 0
    ) -> None:
        local_layers.check_placement(layers)
        self.n_resent = 0
        self._local_layers, self._layers, self._defers_steps, self._number = local_layers, layers, defers_steps, number
        self.moves = local_layers.holdings.list_moves(layers)
        me = process_rank()
        self._leaving = {m.layer: m.target for m in self.moves if m.source == me}
        self._arriving = {m.layer: m.source for m in self.moves if m.target == me}
        self._has_left = False
        self._sent: list[TransferHandle] = []
        self._states: dict[int, TransferHandle] = {}
        self._steps: dict[tuple[int, int, int], TransferHandle] = {}
        if self.moves:
            fault_point("move")
            assert local_layers.bulk_transfer, "asked for by all ranks"
            for layer in self._arriving:
                local_layers.cut.check_arrival(layer)
            self._states = {layer: self._expect(source, layer, "state") for layer, source in self._arriving.items()}

    def send_states(self) -> None:
        """Send the current states. After this, `send_step` sends every step."""
        self._has_left = True
        for layer, target in self._leaving.items():
            state: Any = vars(self._local_layers.state_of(layer, gradients=False))
            if not self._defers_steps:  # the state changes while it travels
                state = pytree.tree_map_only(torch.Tensor, torch.clone, state)
            self._send(target, layer, "state", state)
        fault_point("move.launched")

    @property
    def has_left(self) -> bool:
        """Whether the states have been sent."""
        return self._has_left

    @property
    def has_arrived(self) -> bool:
        """Whether this rank has received all states, and all steps except the steps of the latest batch.

        Raises:
            PeerFailure: another rank has failed.
        """
        latest = max((batch for batch, _, _ in self._steps), default=-1)
        steps = (handle for (batch, _, _), handle in self._steps.items() if batch < latest)
        return all(handle.is_done() for handle in (*self._states.values(), *steps))

    def send_step(
        self, batch: int, number: int, optimizer: Optimizer, layers: Collection[int], deferred: DeferredSteps
    ) -> None:
        """Send the gradients with which an optimizer steps `layers` of this rank for a batch.

        If steps are deferred, the gradients are kept for later, and the gradients of the parameters become None.

        Args:
            batch: the number of the batch.
            number: the number of the optimizer.
            optimizer: the optimizer.
            layers: the layers that it steps.
            deferred: receives the steps that have to be taken later.
        """
        fault_point("move.step")
        gradients = {p: p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for layer in self._leaving.keys() & layers:
            own = {n: gradients.pop(p) for n, p in self._local_layers.parameters_of(layer).items() if p in gradients}
            if not self._defers_steps:
                own = {name: gradient.clone() for name, gradient in own.items()}
            self._send(self._leaving[layer], layer, "step", own, batch, number)
        for layer, source in self._arriving.items():
            if (batch, number, layer) not in self._steps:
                self._steps[batch, number, layer] = self._expect(source, layer, "step", batch, number)
        if self._defers_steps or self._arriving:
            deferred.add(batch, number, settings_of(optimizer), gradients if self._defers_steps else {})
        if self._defers_steps:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None

    def end(self, deferred: DeferredSteps, gradients: bool = True) -> None:
        """Finish the transfer: move the layers to their new places, and take the deferred steps. No window may be open.

        Args:
            deferred: the steps to take.
            gradients: whether the current gradients of the parameters travel, too.

        Raises:
            PlanError: a layer has content that can't be sent.
            PeerFailure: another rank has failed.
        """
        local_layers, kept = (
            self._local_layers,
            {layer: self._local_layers.state_of(layer, gradients) for layer in self._leaving},
        )
        for layer, target in self._leaving.items():
            what, state = "state", vars(kept[layer])
            if self._has_left:
                what, state = "rest", {"state": kept[layer].other_state, "sum": kept[layer].state_checksum()}
            self._send(target, layer, what, (state, local_layers.changing_buffers(layer)))
        arrived, sums = {}, {}
        for layer, source in self._arriving.items():
            content = self._states[layer].content
            if self._has_left:
                rest, changing = self._expect(source, layer, "rest").content
                sums[layer] = rest["sum"]
                arrived[layer] = LayerState(**content).with_other_state(rest["state"]), changing
            else:
                arrived[layer] = LayerState(**content[0]), content[1]
        steps = {key: handle.content for key, handle in self._steps.items()}
        for handle in self._sent:
            handle.wait()
        fault_point("move.arrived")
        local_layers.take_layers(self._layers, arrived)
        fault_point("move.taken")
        if self._defers_steps:
            self._compare(sums, kept)
        for (batch, number, layer), own in steps.items():
            parameters = local_layers.parameters_of(layer)
            deferred.add_gradients(
                batch, number, {parameters[name]: g.to(local_layers.device) for name, g in own.items()}
            )
        deferred.apply(local_layers.optimizers)
        if not self._defers_steps:
            self._compare(sums, kept)
        fault_point("move.ended")

    def _compare(self, sums: dict[int, int], kept: dict[int, LayerState]) -> None:
        """Compare the states of the layers with their states at the source, and wait until they are equal."""
        if not self._has_left:
            return
        local_layers = self._local_layers
        for layer, source in self._arriving.items():
            same = local_layers.state_of(layer).state_checksum() == sums[layer]
            self.n_resent += not same
            self._send(source, layer, "same", same)
        for layer, target in self._leaving.items():
            if not self._expect(target, layer, "same").content:
                _log.warning(
                    "a hook changed layer %d while its state was on the way to another rank; it is sent again while "
                    "all ranks wait",
                    layer,
                )
                self._send(target, layer, "again", vars(kept[layer])).wait()
        for layer, source in self._arriving.items():
            if local_layers.state_of(layer).state_checksum() != sums[layer]:
                state = LayerState(**self._expect(source, layer, "again").content)
                state.put_values(local_layers.cut.full[layer], local_layers.device)
                state.put_optimizer_states(local_layers.cut.full[layer], local_layers.optimizers, local_layers.device)

    def _send(self, target: int, layer: int, what: str, content: Any, *step: int) -> TransferHandle:
        handle = self._local_layers.bulk_transfer.send(target, (self._number, what, layer, *step), content)
        self._sent.append(handle)
        return handle

    def _expect(self, source: int, layer: int, what: str, *step: int) -> TransferHandle:
        return self._local_layers.bulk_transfer.receive(source, (self._number, what, layer, *step))


def move_layers(local_layers: LocalLayers, layers: Sequence[Span], gradients: bool = True) -> None:
    """Move layers to the ranks of these stages, while no window is open and all ranks wait. Collective.

    Args:
        local_layers: the layers of this rank.
        layers: the new layers of each stage.
        gradients: whether the current gradients of the parameters travel, too.

    Raises:
        PlanError: see `LocalLayers.check_placement`; or a layer has content that can't be sent.
        PeerFailure: another rank has failed.
    """
    if layers != local_layers.holdings.layers:
        LayerTransfer(local_layers, layers).end(DeferredSteps(), gradients)


def move_layers_back(local_layers: LocalLayers) -> None:
    """Move the layers back to their places at the beginning of the run, where the next run expects them."""
    move_layers(local_layers, local_layers.initial_layers)
