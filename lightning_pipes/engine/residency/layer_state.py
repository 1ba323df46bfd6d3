"""The complete state of a layer, which another rank needs to continue with it, and detection of changed parameters."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_pipes.engine.private_torch import unsaved_buffers

_BLOCK_WORDS, _PRIME, _MODULUS = 2**18, 2**31 - 1, 2**61 - 1
"""Constants of checksums: the number of words that are summed at a time, the factor between sums, and the modulus."""
_STRIDE = 0x1E3779B97F4A7C15
"""The distance between the factors of a checksum. Multiples of the golden ratio are far apart from each other."""


@dataclass(frozen=True)
class LayerState:
    """Weights, buffers, gradients and optimizer states of one layer, by name, and the state of its modules.

    Attributes:
        parameters: each parameter with `requires_grad` and its gradient.
        buffers: all buffers, including buffers that checkpoints leave out.
        training: whether each module is in training mode.
        extra: the results of `get_extra_state` of the modules.
        optimizers: for each optimizer, the states of the parameters, each with the names of its tensors that stay on
            the host.
    """

    parameters: Mapping[str, tuple[torch.Tensor, bool, torch.Tensor | None]]
    buffers: Mapping[str, torch.Tensor]
    training: Mapping[str, bool]
    extra: Mapping[str, Any]
    optimizers: Sequence[Mapping[str, tuple[Mapping[str, Any], Sequence[str]]]]

    @classmethod
    def from_layer(cls, layer: nn.Module, optimizers: Sequence[Optimizer], gradients: bool = True) -> LayerState:
        """Return the state of a layer on this rank. It refers to the tensors of the layer and copies none of them."""
        return cls(
            {n: (p.detach(), p.requires_grad, p.grad if gradients else None) for n, p in layer.named_parameters()},
            {name: buffer.detach() for name, buffer in layer.named_buffers()},
            *cls.module_state(layer),
            [
                {n: cls.with_host(optimizer.state[p], p) for n, p in layer.named_parameters() if p in optimizer.state}
                for optimizer in optimizers
            ],
        )

    @staticmethod
    def module_state(layer: nn.Module) -> tuple[dict[str, bool], dict[str, Any]]:
        """Return `training` and `extra` of a layer, which may have its tensors on another rank."""
        modules = dict(layer.named_modules())
        extra = {name: module.get_extra_state() for name, module in modules.items() if _has_extra_state(module)}
        return {name: module.training for name, module in modules.items()}, extra

    @staticmethod
    def with_host(state: Mapping[str, Any], p: torch.Tensor) -> tuple[dict[str, Any], list[str]]:
        """Return the state of an optimizer for a parameter, in the form of `optimizers`.

        If the parameter itself is on the host, states of its shape are not listed, because they move together with it.
        """
        moved = p.shape if p.device.type == "cpu" else None
        tensors = ((key, value) for key, value in state.items() if isinstance(value, torch.Tensor))
        return dict(state), [key for key, v in tensors if v.device.type == "cpu" and v.shape != moved]

    @property
    def other_state(self) -> dict[str, Any]:
        """All state except weights and optimizer states, in a form that can be sent.

        Unlike these, it may change even without an optimizer step.
        """
        parameters = {name: (trained, gradient) for name, (_, trained, gradient) in self.parameters.items()}
        return {
            "parameters": parameters,
            "buffers": dict(self.buffers),
            "training": dict(self.training),
            "extra": dict(self.extra),
        }

    def with_other_state(self, rest: Mapping[str, Any]) -> LayerState:
        """Return these weights and optimizer states together with `other_state` of another state of the layer."""
        given = rest["parameters"]
        parameters = {name: (p, *given[name]) for name, (p, _, _) in self.parameters.items()}
        return replace(self, **{**rest, "parameters": parameters})

    def state_checksum(self) -> int:
        """Return a checksum of the layer's weights and optimizer states, which does not depend on their device."""
        states = [(n, *each) for o in self.optimizers for n, (s, _) in sorted(o.items()) for each in sorted(s.items())]
        total = 0
        for parts in (*((name, p) for name, (p, _, _) in sorted(self.parameters.items())), *states):
            for leaf in pytree.tree_leaves(parts):
                one = tensor_checksum(leaf) if isinstance(leaf, torch.Tensor) else zlib.crc32(repr(leaf).encode())
                total = (total * _PRIME + one) % _MODULUS
        return total

    def put_values(self, layer: nn.Module, device: torch.device) -> None:
        """Copy the values of the weights to a layer."""
        with torch.no_grad():
            for name, p in layer.named_parameters():
                p.copy_(self.parameters[name][0].to(device))

    def tensors_on(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and buffers by name, on `device`."""
        yield from ((name, p.to(device)) for name, (p, _, _) in self.parameters.items())
        yield from ((name, buffer.to(device)) for name, buffer in self.buffers.items())

    def put(self, layer: nn.Module, device: torch.device) -> None:
        """Restore gradients, `requires_grad`, training modes, extra states, and buffers that checkpoints leave out.

        The layer must already have the values of its weights and its other buffers.

        Args:
            layer: the layer whose state is restored.
            device: the device to which tensors are copied.
        """
        for name, p in layer.named_parameters():
            _, trained, gradient = self.parameters[name]
            p.requires_grad_(trained)
            p.grad = None if gradient is None else gradient.to(device)
        for name, module in layer.named_modules():
            module.training = self.training[name]
            if name in self.extra:
                module.set_extra_state(self.extra[name])
            for key in unsaved_buffers(module):
                buffer = module._buffers.get(key)
                if buffer is not None:
                    buffer.data = self.buffers[f"{name}.{key}" if name else key].to(device)

    def put_optimizer_states(self, layer: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """Restore the states of the optimizers for the layer's parameters."""
        for optimizer, states in zip(optimizers, self.optimizers, strict=True):
            for name, p in layer.named_parameters():
                if name in states:
                    optimizer.state[p] = _place_state(*states[name], device)

    def states_on(self, number: int, device: torch.device) -> dict[str, tuple[dict[str, Any], Sequence[str]]]:
        """Return the states of optimizer number `number` on `device`."""
        return {name: (_place_state(*each, device), each[1]) for name, each in self.optimizers[number].items()}


def tensor_checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the values and their order, which is computed on the tensor's device."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    words = plain[: len(plain) // 4 * 4].view(torch.int32)
    # Factors are odd, so that no bit is lost, and far apart, so that changes of two words do not cancel out.
    factors = (torch.arange(min(len(words), _BLOCK_WORDS), device=words.device) * _STRIDE & _MODULUS >> 1) | 1
    total = zlib.crc32(bytes(plain[4 * len(words) :].tolist()))
    for part in torch.split(words, _BLOCK_WORDS) if len(words) else ():
        total = (total * _PRIME + int((part * factors[: len(part)]).sum())) % _MODULUS
    return total


def with_layout_of(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the values in the memory layout of `like`, on which kernels may depend, if the shapes are equal."""
    strides = like.stride() if like.shape == values.shape and 0 not in like.stride() else None
    if strides is None or strides == values.stride():
        return values
    return torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)


def _place_state(state: Mapping[str, Any], on_host: Sequence[str], device: torch.device) -> dict[str, Any]:
    return {
        key: value if key in on_host else pytree.tree_map_only(torch.Tensor, _to(device), value)
        for key, value in state.items()
    }


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _to(device: torch.device) -> Any:
    return lambda tensor: tensor.to(device)


class ChangeMarks:
    """A record of the versions of parameters at one moment, from which later changes are detected.

    Args:
        parameters: the parameters.
        values: whether values are compared, too, because torch does not count changes of `p.data`.
        moved: whether the parameters move between host and device, which torch counts as changes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter] = (), values: bool = False, moved: bool = False) -> None:
        self._parameters, self._moved = parameters, moved
        self._seen = self._look()
        self._values = [_sums(p, moved) for p in parameters] if values else None

    def find_change(self) -> tuple[nn.Parameter, str] | None:
        """Return a parameter that has changed since the record was made, with the name of the changed property.

        Returns:
            The parameter and a description of the property, or None if no parameter has changed.
        """
        if (now := self._look()) != self._seen:
            at, (before, after) = next(
                (n, pair) for n, pair in enumerate(zip(self._seen, now, strict=True)) if pair[0] != pair[1]
            )
            return self._parameters[at], "the values" if before[1] == after[1] else "requires_grad"
        for p, sums in zip(self._parameters, self._values or (), strict=False):
            if not torch.equal(sums, _sums(p, self._moved)):
                return p, "the values"
        return None

    def _look(self) -> list[tuple[int, bool]]:
        return [(0 if self._moved else p._version, p.requires_grad) for p in self._parameters]


def _sums(p: nn.Parameter, on_host: bool) -> torch.Tensor:
    """Return two numbers that identify the values of a parameter. They depend on the device that computes them."""
    values = p.detach().cpu() if on_host else p.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values if values.is_floating_point() else values.double()
    return torch.nan_to_num(torch.stack((values.sum(), torch.linalg.vector_norm(values))))
