"""Layers on their way from rank to rank: all at once while all ranks wait, or ahead of the switch while batches go on.

    source   trains the layer:  its state as it is now --->   gradients of every step since --->   the rest ---> |
    target   trains without it                                                 takes those steps, when all is there |

Weights, buffers, gradients and optimizer states travel as parcels. They arrive before anything changes on any rank, so
a rank that fails meanwhile ends the run as it always does. Nothing random moves: random numbers depend on the layer.

The source keeps the state of a layer until the target has confirmed by a checksum that it has the same: weights may
have been changed by something else than steps. What differs is sent once more. Optimizer steps of a layer
that is under way may be taken later than their batches, in the order of these.
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
"""The learning rate and all other settings of an optimizer's groups, by group."""
Gradients = dict[torch.Tensor, torch.Tensor]
"""By parameter."""
_OF_THIS_RANK = ("params", "param_names")


def settings_of(optimizer: Optimizer) -> GroupSettings:
    """Return a copy of the settings of an optimizer's groups."""
    return [
        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items() if key not in _OF_THIS_RANK}
        for group in optimizer.param_groups
    ]


@contextmanager
def with_settings(optimizer: Optimizer, settings: GroupSettings) -> Iterator[None]:
    """Give the groups of an optimizer these settings in the block."""
    now = settings_of(optimizer)
    _put_settings(optimizer, settings)
    yield
    _put_settings(optimizer, now)


def _put_settings(optimizer: Optimizer, settings: GroupSettings) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def _keep_gradients() -> float:
    """Act as the closure of a late step with known gradients; its loss is unknown."""
    return math.nan


class DeferredSteps:
    """Optimizer steps that are taken later: by batch and optimizer, the gradients and the settings of that time."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], tuple[GroupSettings, Gradients]] = {}

    def add(
        self, batch: int, number: int, settings: GroupSettings, gradients: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        """Have optimizer `number` step these parameters for a batch, too."""
        self._steps.setdefault((batch, number), (settings, {}))[1].update(gradients)

    def add_gradients(self, batch: int, number: int, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Add more gradients to a step that was added."""
        self._steps[batch, number][1].update(gradients)

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Take all steps, batch by batch; gradients that the parameters have stay."""
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
    """The layers that change ranks for the stages to have `layers`, as one rank sees them.

    Collective: all ranks make one, and the same calls of it, each of `send_step` for the same batches.

    Args:
        defers_steps: the steps of all layers wait until the transfer ends; otherwise those that travel step at the
            source.
        number: of this transfer among those of the training.

    Attributes:
        moves: the layers that travel, with their target.
        n_resent: how many layers this rank was sent a second time.

    Raises:
        PlanError: see `LocalLayers.check_placement`, or this rank can't take a layer.
    """

    def __init__(self, part: LocalLayers, layers: Sequence[Span], defers_steps: bool = False, number: int = 0) -> None:
        part.check_placement(layers)
        self.n_resent = 0
        self._part, self._layers, self._defers_steps, self._number = part, layers, defers_steps, number
        self.moves = part.holdings.list_moves(layers)
        me = process_rank()
        self._leaving = {m.layer: m.target for m in self.moves if m.source == me}
        self._arriving = {m.layer: m.source for m in self.moves if m.target == me}
        self._has_left = False
        self._sent: list[TransferHandle] = []
        self._states: dict[int, TransferHandle] = {}
        self._steps: dict[tuple[int, int, int], TransferHandle] = {}
        if self.moves:
            fault_point("move")
            assert part.bulk_transfer, "asked for by all ranks"
            for layer in self._arriving:
                part.cut.check_arrival(layer)
            self._states = {layer: self._expect(source, layer, "state") for layer, source in self._arriving.items()}

    def send_states(self) -> None:
        """Send the states as they are now; `send_step` sends every step after this."""
        self._has_left = True
        for layer, target in self._leaving.items():
            state: Any = vars(self._part.state_of(layer, gradients=False))
            if not self._defers_steps:  # it changes while it travels
                state = pytree.tree_map_only(torch.Tensor, torch.clone, state)
            self._send(target, layer, "state", state)
        fault_point("move.launched")

    @property
    def has_left(self) -> bool:
        """Whether the states are on their way."""
        return self._has_left

    @property
    def has_arrived(self) -> bool:
        """Whether this rank has received all states and steps but the latest.

        Raises:
            PeerFailure: a rank has failed.
        """
        latest = max((batch for batch, _, _ in self._steps), default=-1)
        steps = (handle for (batch, _, _), handle in self._steps.items() if batch < latest)
        return all(handle.is_done() for handle in (*self._states.values(), *steps))

    def send_step(
        self, batch: int, number: int, optimizer: Optimizer, layers: Collection[int], deferred: DeferredSteps
    ) -> None:
        """Send the gradients by which optimizer `number` steps these `layers` of the rank for a batch.

        Where steps are deferred, the gradients are kept for later, and the parameters lose theirs.
        """
        fault_point("move.step")
        gradients = {p: p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for layer in self._leaving.keys() & layers:
            own = {n: gradients.pop(p) for n, p in self._part.parameters_of(layer).items() if p in gradients}
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
        """Finish the transfer: the layers are in their new places, and deferred steps are taken. No window is open.

        Args:
            gradients: whether those that parameters have now are to travel, too.

        Raises:
            PlanError: a layer has something that can't be sent.
            PeerFailure: a rank has failed.
        """
        part, kept = self._part, {layer: self._part.state_of(layer, gradients) for layer in self._leaving}
        for layer, target in self._leaving.items():
            what, state = "state", vars(kept[layer])
            if self._has_left:
                what, state = "rest", {"state": kept[layer].other_state, "sum": kept[layer].state_checksum()}
            self._send(target, layer, what, (state, part.changing_buffers(layer)))
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
        part.take_layers(self._layers, arrived)
        fault_point("move.taken")
        if self._defers_steps:
            self._compare(sums, kept)
        for (batch, number, layer), own in steps.items():
            parameters = part.parameters_of(layer)
            deferred.add_gradients(batch, number, {parameters[name]: g.to(part.device) for name, g in own.items()})
        deferred.apply(part.optimizers)
        if not self._defers_steps:
            self._compare(sums, kept)
        fault_point("move.ended")

    def _compare(self, sums: dict[int, int], kept: dict[int, LayerState]) -> None:
        """Wait until the states of the layers equal those at the source."""
        if not self._has_left:
            return
        part = self._part
        for layer, source in self._arriving.items():
            same = part.state_of(layer).state_checksum() == sums[layer]
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
            if part.state_of(layer).state_checksum() != sums[layer]:
                state = LayerState(**self._expect(source, layer, "again").content)
                state.put_values(part.cut.full[layer], part.device)
                state.put_optimizer_states(part.cut.full[layer], part.optimizers, part.device)

    def _send(self, target: int, layer: int, what: str, content: Any, *step: int) -> TransferHandle:
        handle = self._part.bulk_transfer.send(target, (self._number, what, layer, *step), content)
        self._sent.append(handle)
        return handle

    def _expect(self, source: int, layer: int, what: str, *step: int) -> TransferHandle:
        return self._part.bulk_transfer.receive(source, (self._number, what, layer, *step))


def move_layers(part: LocalLayers, layers: Sequence[Span], gradients: bool = True) -> None:
    """Move layers to the ranks of these stages, with no window open.

    All ranks wait for arrival. Collective.

    Raises:
        PlanError: see `LocalLayers.check_placement`, or a layer has something that can't be sent.
        PeerFailure: a rank has failed.
    """
    if layers != part.holdings.layers:
        LayerTransfer(part, layers).end(DeferredSteps(), gradients)


def move_layers_back(part: LocalLayers) -> None:
    """Move the layers back to where they were when the run began, where the next run expects them."""
    move_layers(part, part.initial_layers)
