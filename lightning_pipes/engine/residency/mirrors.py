"""Mirrors: copies of other ranks' layers that batches run on this rank.

A mirror contains weights, buffers and optimizer states. `ir.stream.ledger` decides how long it is up to date. Mirrors
are stored outside the module, whose own layers are not changed. So checkpoints, hooks and optimizers find each layer
only once, on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_pipes.engine import trees
from lightning_pipes.engine.messages.bulk_transfer import BulkTransfer, Key
from lightning_pipes.engine.private_torch import has_accumulate_hooks, has_gradient_hooks, unsaved_buffers
from lightning_pipes.engine.residency.layer_memory import LayerMemory
from lightning_pipes.engine.residency.layer_state import ChangeMarks, LayerState, with_layout_of
from lightning_pipes.ir import LayerUse, PlanError


class PendingTree(Protocol):
    """A tree that may still be in flight."""

    def is_done(self) -> bool:
        """Return whether the tree has arrived.

        Raises:
            PeerFailure: a rank has failed before the tree arrived.
        """

    @property
    def content(self) -> Any:
        """The tree that was sent."""


class TreeTransport(Protocol):
    """Sends trees of tensors between the ranks of a pipeline."""

    def send(self, rank: int, key: Key, content: Any) -> None:
        """Start to send a tree. The caller may change `content` afterwards."""

    def receive(self, rank: int, key: Key, on_arrival: Callable[[], None]) -> PendingTree:
        """Return the tree that `rank` sends, or has already sent, with this key.

        Args:
            rank: the sender.
            key: the key of the tree.
            on_arrival: called on any thread when the tree has arrived.
        """


class BulkTreeTransport:
    """A tree transport that uses bulk transfers.

    Args:
        transfer: the bulk transfers of this process.
        ranks: the global rank of each rank of the pipeline.
    """

    def __init__(self, transfer: BulkTransfer, ranks: Sequence[int]) -> None:
        self._transfer, self._ranks = transfer, tuple(ranks)

    def send(self, rank: int, key: Key, content: Any) -> None:
        copies = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), content)
        self._transfer.send(self._ranks[rank], key, copies)

    def receive(self, rank: int, key: Key, on_arrival: Callable[[], None]) -> PendingTree:
        return self._transfer.receive(self._ranks[rank], key, on_arrival)


@dataclass
class Mirror:
    """A copy of one layer, or of a part of a layer.

    Attributes:
        parameters: the parameters by name.
        buffers: the buffers by name.
        states: for each optimizer, the states of the parameters, each with the names of the tensors that stay on the
            host.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    states: list[dict[str, tuple[dict[str, Any], Sequence[str]]]]

    def as_module(self) -> nn.Module:
        """Return a module with the tensors of the copy."""
        module = nn.Module()
        module._parameters.update(self.parameters)
        module.__dict__["_buffers"] = self.buffers
        return module


class _CopyOptimizer:
    """The states of one optimizer for a copy, with the attributes of an optimizer."""

    def __init__(self, mirror: Mirror, number: int) -> None:
        self._mirror, self._number = mirror, number
        self.param_groups: list[dict[str, Any]] = []

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        """The optimizer's state for the parameters of the copy."""
        parameters, states = self._mirror.parameters, self._mirror.states[self._number]
        return {parameters[at]: state for at, (state, _) in states.items()}


class Mirrors:
    """The copies on one rank of layers that other ranks own, and their transfers.

    Args:
        layers: all layers of the model by number. The weights of layers that other ranks own are not read.
        at_home: returns whether this rank owns the layer with a number.
        transport: sends layers to the other ranks and receives layers from them.
        optimizers: returns the optimizers of the training run, in the same order on every rank.
        group_of: returns the index of the parameter group to which a parameter belongs, or None if it belongs to none.
            Its arguments are the number of the optimizer, the number of the layer, and the name of the parameter in the
            layer.
        device: the device of the copies; the CPU by default.
        memory: loads and offloads layers, including the copies; None if all layers stay on the device.

    Attributes:
        copies: the copies of other ranks' layers by name.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        at_home: Callable[[int], bool],
        transport: TreeTransport,
        optimizers: Callable[[], Sequence[Optimizer]],
        group_of: Callable[[int, int, str], int | None],
        device: torch.device | None = None,
        memory: LayerMemory | None = None,
    ) -> None:
        self.layers = layers
        self._at_home, self._transport, self.optimizers, self._group_of = at_home, transport, optimizers, group_of
        self._device = device or torch.device("cpu")
        self.copies: dict[str, Mirror] = {}
        self.memory = memory
        self._marks: dict[str, ChangeMarks] = {}  # of own layers, when they were sent to other ranks

    def is_remote(self, name: str) -> bool:
        """Return whether another rank owns the layer with this name."""
        return not self._at_home(_number(name))

    def of_layer(self, number: int, names: Iterable[str]) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
        """Return the parameters and buffers of the parts `names` of a layer, by their names in the layer."""
        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, torch.Tensor] = {}
        for name in names:
            if _number(name) == number:
                mirror, at = self.copies[name], _part(name)
                parameters.update({_join(at, key): p for key, p in mirror.parameters.items()})
                buffers.update({_join(at, key): b for key, b in mirror.buffers.items()})
        return parameters, buffers

    def replace_buffers(self, number: int, names: Iterable[str], found: Mapping[str, torch.Tensor]) -> None:
        """Store buffers that a forward has replaced by other tensors.

        Args:
            number: the number of the layer.
            names: the parts of layers that the forward has used.
            found: the new buffers by their names in the layer.
        """
        for name in names:
            if _number(name) == number:
                buffers = self.copies[name].buffers
                buffers.update({key: found[_join(_part(name), key)] for key in buffers})

    def send(self, name: str, rank: int, key: Key) -> None:
        """Send the current state of a layer.

        Raises:
            PlanError: a parameter has a hook, which would not receive the gradients of the copy.
        """
        with nullcontext() if self.memory is None else self.memory.read_layer(name):
            if not self.is_remote(name):
                parameters = list(self._module(name).parameters())
                self._marks[name] = ChangeMarks(parameters, values=True, moved=self.memory is not None)
            self._transport.send(rank, key, vars(self._state(name)))

    def receive(self, rank: int, key: Key, on_arrival: Callable[[], None]) -> PendingTree:
        """Return the tree for `install_layer` that another rank sends with this key."""
        return self._transport.receive(rank, key, on_arrival)

    def install_layer(self, name: str, content: Any) -> None:
        """Install a received layer. If layers are offloaded, the layer is on the host afterwards.

        Raises:
            PlanError: the layer belongs to this rank, and a hook has changed it while it was on another rank.
        """
        state, module, memory = LayerState(**content), self._module(name), self.memory
        if self.is_remote(name):
            device = self._device
            self.drop_copy(name)
            for at, part in module.named_modules():
                part.training = state.training[at]
                if at in state.extra:
                    part.set_extra_state(state.extra[at])
            like = dict(module.named_parameters())
            mirror = self.copies[name] = Mirror(
                {
                    at: nn.Parameter(with_layout_of(p.to(device), like[at]), trained)
                    for at, (p, trained, _) in state.parameters.items()
                },
                {at: buffer.to(device) for at, buffer in state.buffers.items()},
                [state.states_on(n, device) for n in range(len(state.optimizers))],
            )
            if memory is not None:
                owns = [_CopyOptimizer(mirror, n) for n in range(len(mirror.states))]
                memory.add_layer(name, mirror.as_module(), owns)
            return
        took_turns = memory is not None and memory.remove_layer(name)
        device = self._device if memory is None else torch.device("cpu")
        found = self._marks.pop(name, ChangeMarks()).find_change()
        if found is not None:
            raise PlanError(
                f"a hook changes {found[1]} of layer {name!r} where the layer is at home, while a batch has it on "
                "another rank: the change would be lost. Change weights in "
                "on_train_epoch_start, or those that a batch steps by optimizer.register_step_post_hook; or remove "
                "the setting that gives each batch its own cut, such as balanced=True"
            )
        state.put(module, device)
        left_out = {_join(at, key) for at, part in module.named_modules() for key in unsaved_buffers(part)}
        with torch.no_grad():
            for at, p in module.named_parameters():
                p.copy_(state.parameters[at][0])
            for at, buffer in module.named_buffers():
                if at not in left_out:
                    buffer.copy_(state.buffers[at])
        state.put_optimizer_states(module, self.optimizers(), device)
        if memory is not None and took_turns:
            memory.enter({name: module})

    def drop_copy(self, name: str) -> None:
        """Drop the copy of a layer, if it exists."""
        if self.copies.pop(name, None) is not None and self.memory is not None:
            self.memory.remove_layer(name, needed=False)

    def clear(self) -> None:
        """Drop all copies, because every layer has returned to its owner."""
        for name in tuple(self.copies):
            self.drop_copy(name)

    @contextmanager
    def in_optimizers(self, names: Iterable[str]) -> Iterator[None]:
        """Add the copies of other ranks' layers, with their states, to the optimizers inside the block.

        The copies are added to the parameter groups of the parameters that they replace.
        """
        mirrors = {name: self.copies[name] for name in sorted(names) if self.is_remote(name)}
        optimizers = self.optimizers()
        own = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
        for name, mirror in mirrors.items():
            for number, optimizer in enumerate(optimizers):
                for at, p in mirror.parameters.items():
                    group = self._group_of(number, _number(name), _join(_part(name), at))
                    if group is not None:
                        optimizer.param_groups[group]["params"].append(p)
                        if at in mirror.states[number]:
                            optimizer.state[p] = mirror.states[number][at][0]
        try:
            yield
        finally:
            for number, optimizer in enumerate(optimizers):
                for mirror in mirrors.values():
                    found = {at: p for at, p in mirror.parameters.items() if p in optimizer.state}
                    mirror.states[number] = {
                        at: (state, LayerState.with_host(state, p)[1])
                        for at, p in found.items()
                        for state in (optimizer.state.pop(p),)
                    }
                for settings, count in zip(optimizer.param_groups, own[number], strict=True):
                    del settings["params"][count:]

    @contextmanager
    def in_module(self, names: Iterable[str]) -> Iterator[None]:
        """Replace the module's own parameters by the copies of other ranks' layers inside the block."""
        own: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]] = []
        for name in sorted(name for name in names if self.is_remote(name)):
            for at, p in self.copies[name].parameters.items():
                part, _, last = at.rpartition(".")
                table = self._module(name).get_submodule(part)._parameters
                own.append((table, last, table[last]))
                table[last] = p
        try:
            yield
        finally:
            for table, last, before in own:
                table[last] = before

    def _state(self, name: str) -> LayerState:
        module = self._module(name)
        if not self.is_remote(name):
            for at, p in module.named_parameters():
                if has_gradient_hooks(p) or has_accumulate_hooks(p):
                    raise PlanError(
                        f"layer {name!r} goes to another rank for a batch, and {at} in it has a hook for its gradient, "
                        "which would not run there. Remove the hook, or the setting that gives each batch its own cut, "
                        "such as balanced=True"
                    )
            return LayerState.from_layer(module, self.optimizers(), gradients=False)
        mirror, own = self.copies[name], LayerState.module_state(module)
        return LayerState(
            {at: (p.detach(), p.requires_grad, None) for at, p in mirror.parameters.items()},
            mirror.buffers,
            *own,
            mirror.states,
        )

    def _module(self, name: str) -> nn.Module:
        return self.layers[_number(name)].get_submodule(_part(name))


def _number(name: str) -> int:
    return int(name.partition(".")[0])


def _part(name: str) -> str:
    return name.partition(".")[2]


def _join(part: str, name: str) -> str:
    return f"{part}.{name}" if part else name


class MirroredLayers:
    """All layers of the model, as one stage runs them.

    Args:
        stage: the number of the stage.
        mirrors: the copies of other ranks' layers on this rank.
        layers: the layers by number, which may be wrappers around the layers of `mirrors`.
    """

    def __init__(self, stage: int, mirrors: Mirrors, layers: Mapping[int, nn.Module]) -> None:
        self._stage, self._mirrors, self._layers = stage, mirrors, layers

    def layers_of(self, use: LayerUse | None, own: Mapping[int, nn.Module]) -> Mapping[int, nn.Module]:
        """Return the layers that the stage runs for a batch; its `own` layers if the batch has no cut of its own."""
        if use is None or use.cut is None:
            return own
        return {number: self._layers[number] for number in range(*use.cut[self._stage])}

    def is_remote(self, number: int) -> bool:
        """Return whether another rank owns the layer."""
        return self._mirrors.is_remote(str(number))

    def buffers(self, use: LayerUse, number: int) -> dict[str, torch.Tensor]:
        """Return the buffers of those parts of another rank's layer that the batch uses."""
        return self._mirrors.of_layer(number, use.layers[self._stage])[1]

    def run(
        self,
        use: LayerUse,
        number: int,
        layer: nn.Module,
        x: Any,
        only_read: Set[int],
        changes: bool,
        before: Mapping[str, torch.Tensor],
    ) -> Any:
        """Run a copy of another rank's layer, with the parts of it that the batch uses.

        Args:
            use: the layers that the batch uses.
            number: the number of the layer.
            layer: the module of the layer.
            x: the input of the layer.
            only_read: the ids of parameters that receive no gradients.
            changes: whether the forward may change buffers.
            before: the buffers that are read instead of the current buffers, if they may not be changed.

        Returns:
            The output of the layer.

        Raises:
            PlanError: the layer uses weights that the batch does not specify.
        """
        names = sorted(use.layers[self._stage])
        parameters, buffers = self._mirrors.of_layer(number, names)
        prefix = self._prefix(number, layer)
        given = {f"{prefix}{at}": p.detach() if id(p) in only_read else p for at, p in parameters.items()}
        given |= {f"{prefix}{at}": b if changes else before.get(at, b).clone() for at, b in buffers.items()}
        out = functional_call(layer, given, (x,)) if given else layer(x)
        if changes and buffers:
            self._mirrors.replace_buffers(number, names, {at: given[f"{prefix}{at}"] for at in buffers})
        if any(tensor.is_meta for tensor in trees.tensors_in(out)):
            raise PlanError(
                f"layer {number} is on stage {self._stage} for this batch only, and used weights of layers that are "
                f"not listed for the batch. The list is: {', '.join(names) or 'none'}. Return all layers that a batch "
                "uses from layers_of_batch"
            )
        return out

    def _prefix(self, number: int, layer: nn.Module) -> str:
        inner = self._mirrors.layers[number]
        return next(f"{at}." if at else "" for at, module in layer.named_modules() if module is inner)
