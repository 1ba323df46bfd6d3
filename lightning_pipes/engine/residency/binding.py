"""Binds a model and its optimizers to tensors that move between host and device.

Parameters keep their identity, so that optimizers, schedulers, callbacks and users can continue to use the same
objects. Only the content of these objects changes: `torch.utils.swap_tensors` replaces it by a view of another slab,
with the version counter of this slab. Therefore, autograd detects a slab that is overwritten between forward and
backward, and a parameter can't be moved while an autograd graph refers to it. Assigning to `param.data` instead would
keep the old counter and silently give wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from lightning_pipes.engine.private_torch import has_accumulate_hooks, has_gradient_hooks, is_copy_on_write
from lightning_pipes.engine.residency.swap import Key, Swap
from lightning_pipes.ir import PipelineError, PlanError


class OptimizerLike(Protocol):
    """The attributes of an optimizer that contain tensors."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, each with its parameters under "params"."""

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The optimizer's state of each parameter."""


class _TensorHolder(Protocol):
    """A place that holds a tensor."""

    def get(self) -> torch.Tensor:
        """Return the current tensor."""

    def bind_tensor(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by another one of the same shape and values."""

    def is_held(self, tensor: torch.Tensor) -> bool:
        """Return whether the place still holds `tensor`, which was passed to `bind_tensor`."""


@dataclass
class _Parameter:
    parameter: nn.Parameter
    aside: torch.Tensor | None = None  # the gradient, while the parameter is on another device

    def get(self) -> torch.Tensor:
        return self.parameter

    def bind_tensor(self, tensor: torch.Tensor) -> None:
        p = self.parameter
        gradient = p.grad if self.aside is None else self.aside
        if gradient is not None:
            p.grad = None
        other = nn.Parameter(tensor, requires_grad=p.requires_grad)
        other.__dict__.update(p.__dict__)  # the attributes are swapped, too
        torch.utils.swap_tensors(p, other)  # type: ignore[no-untyped-call]
        if gradient is not None:
            there = gradient.device == tensor.device
            p.grad, self.aside = (gradient, None) if there else (None, gradient)

    def is_held(self, tensor: torch.Tensor) -> bool:
        return self.parameter.data_ptr() == tensor.data_ptr()


@dataclass
class _Entries:
    """Entries of dictionaries that hold the same tensor, which is a buffer or a state of an optimizer."""

    of_module: bool
    places: list[tuple[MutableMapping[str, Any], str]] = field(default_factory=list)

    def get(self) -> torch.Tensor:
        mapping, name = self.places[0]
        tensor: torch.Tensor = mapping[name]
        return tensor

    def bind_tensor(self, tensor: torch.Tensor) -> None:
        held = _with_own_counter(tensor) if self.of_module else tensor
        for mapping, name in self.places:
            mapping[name] = held

    def is_held(self, tensor: torch.Tensor) -> bool:
        held = [mapping.get(name) for mapping, name in self.places]
        return all(each is held[0] for each in held) and held[0] is not None and held[0].data_ptr() == tensor.data_ptr()


def _with_own_counter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that uses the same memory but has its own version counter.

    With a shared counter, a forward that changes running statistics would count as a change of weights in the same
    slab.
    """
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class Binding:
    """The tensors of a model and its optimizers that are initially on one device.

    Args:
        module: the module whose parameters and buffers are bound.
        optimizers: the optimizers whose states are bound, and also their parameters that don't belong to the module.
        device: the device of the tensors to bind. Tensors on other devices, such as step counters on the host, stay
            there. So do copies on write, whose memory several modules share.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[OptimizerLike], device: torch.device) -> None:
        self._holders = _holders(module, optimizers, device)
        self._shape = _shape(module, optimizers)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, nn.Parameter], device: torch.device) -> Binding:
        """Bind parameters that belong to no module, such as a weight version.

        Args:
            parameters: the parameters by name.
            device: the device of the parameters to bind.
        """
        made = cls(nn.Module(), (), device)
        made._holders.update({name: _Parameter(p) for name, p in parameters.items() if p.device == device})
        return made

    def check(self) -> None:
        """Check that each tensor can be moved separately.

        Raises:
            PlanError: two tensors share memory, or a parameter is of a subclass or has hooks.
        """
        _check(self._holders)

    @property
    def has_buffers(self) -> bool:
        """Whether any of the tensors is a buffer, which a forward may change."""
        return any(isinstance(holder, _Entries) and holder.of_module for holder in self._holders.values())

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        return {name: holder.get().detach() for name, holder in self._holders.items()}

    def has_same_tensors(self, other: Binding) -> bool:
        """Return whether both bindings have the same tensors in the same places, regardless of their values."""
        return self._described == other._described

    def still_holds(
        self, tensors: Mapping[str, torch.Tensor], module: nn.Module, optimizers: Sequence[OptimizerLike]
    ) -> bool:
        """Return whether `module` and `optimizers` still hold exactly these tensors.

        This takes a quarter of the time of a new search for all tensors.
        """
        return self._shape == _shape(module, optimizers) and all(
            holder.is_held(tensors[name]) for name, holder in self._holders.items()
        )

    def bind_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the model use `tensors`, which already have the current values.

        Raises:
            PipelineError: an autograd graph refers to a parameter. The tensors before this parameter are bound.
        """
        with torch.inference_mode(False):
            for name, holder in self._holders.items():
                try:
                    holder.bind_tensor(tensors[name])
                except RuntimeError as error:
                    raise PipelineError(
                        f"{name} can't be moved between host and device: a graph still refers to it, as of a loss that "
                        "was kept. Keep detached tensors: loss.detach()"
                    ) from error

    def rebind_replaced(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the model use `tensors` again if it has replaced some of them, with the values of the replacements."""
        with torch.inference_mode(False), torch.no_grad():
            for name, holder in self._holders.items():
                found = holder.get()
                if found.data_ptr() != tensors[name].data_ptr():
                    tensors[name].copy_(found)
                    holder.bind_tensor(tensors[name])

    @cached_property
    def _described(self) -> list[tuple[object, ...]]:
        return [
            (name, id(t) if isinstance(holder, _Parameter) else 0, t.dtype, t.shape)
            for name, holder in self._holders.items()
            for t in (holder.get(),)
        ]


def still_bound(
    swap: Swap[Key], key: Key, module: nn.Module, optimizers: Sequence[OptimizerLike], device: torch.device
) -> bool:
    """Return whether `module` and `optimizers`, which are bound to `key`, still have the same tensors.

    Values that are in other memory are copied back. If the function returns False, the tensors must be added to the
    swap again.
    """
    known = swap.bound_tensors(key)
    if not isinstance(known, Binding):
        return False
    there = swap.on_device(key)
    if there is not None and known.still_holds(there, module, optimizers):
        return True
    found = Binding(module, optimizers, device)
    if not known.has_same_tensors(found):
        return False
    swap.rebind(key, found)
    if there is not None:
        found.rebind_replaced(there)
    return True


def _shape(module: nn.Module, optimizers: Iterable[OptimizerLike]) -> list[object]:
    """Return a list that differs after tensors were added or removed.

    It detects only changes that are visible without looking at each tensor.
    """
    modules = [(id(child), *map(id, child._parameters.values()), len(child._buffers)) for child in module.modules()]
    states = [(id(o), *(len(state) for state in o.state.values())) for o in optimizers]
    groups = [tuple(map(id, group["params"])) for o in optimizers for group in o.param_groups]
    return [modules, states, groups]


def _holders(module: nn.Module, optimizers: Iterable[OptimizerLike], device: torch.device) -> dict[str, _TensorHolder]:
    holders: dict[str, _TensorHolder] = {}
    entries: dict[int, _Entries] = {}
    names: dict[int, str] = {}
    for name, p in _parameters(module, optimizers):
        if id(p) not in names:
            names[id(p)] = name
            if p.device == device and not is_copy_on_write(p):
                holders[name] = _Parameter(p)
    buffers = {id(child._buffers) for child in module.modules()}
    for name, mapping, key in _entries(module, optimizers, names):
        tensor = mapping[key]
        if not isinstance(tensor, torch.Tensor) or is_copy_on_write(tensor):
            continue
        if tensor.device == device and id(tensor) not in names:
            if id(tensor) not in entries:
                holders[name] = entries[id(tensor)] = _Entries(id(mapping) in buffers)
            entries[id(tensor)].places.append((mapping, key))
    return holders


def _parameters(module: nn.Module, optimizers: Iterable[OptimizerLike]) -> Iterator[tuple[str, nn.Parameter]]:
    yield from module.named_parameters()
    for number, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for k, p in enumerate(group["params"]):
                yield f"parameter {k} in group {g} of optimizer {number}", p


def _entries(
    module: nn.Module, optimizers: Iterable[OptimizerLike], names: Mapping[int, str]
) -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
    for path, child in module.named_modules():
        for key in child._buffers:
            yield f"{path}.{key}", child._buffers, key
    for number, optimizer in enumerate(optimizers):
        for p, state in optimizer.state.items():
            if isinstance(state, dict):
                for key in state:
                    yield f"{key} of {names.get(id(p), p)} in optimizer {number}", state, key


def _check(holders: Mapping[str, _TensorHolder]) -> None:
    memory: dict[int, str] = {}
    for name, holder in holders.items():
        tensor = holder.get()
        if isinstance(holder, _Parameter):
            if type(tensor) is not nn.Parameter:
                raise PlanError(
                    f"{name} is a {type(tensor).__name__}; only plain parameters can be moved between host and "
                    "device. Keep all states on the device: leave MemorySwap out"
                )
            if has_gradient_hooks(tensor) or has_accumulate_hooks(tensor):
                raise PlanError(
                    f"{name} has hooks, as from data_parallel > 1 or register_hook; they would stay behind when it is "
                    "moved between host and device. Remove them, or leave MemorySwap out"
                )
        address = tensor.untyped_storage().data_ptr()
        if address and memory.setdefault(address, name) != name:
            raise PlanError(
                f"{name} and {memory[address]} share memory, which moving them to the host would end. "
                "Make one of them a copy, or leave MemorySwap out"
            )
