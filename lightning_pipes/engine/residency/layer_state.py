"""A layer besides its code: what another rank needs to go on with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_pipes.engine.private_torch import unsaved_buffers


@dataclass(frozen=True)
class LayerState:
    """Weights, buffers, gradients and optimizer states of one layer, by name, and what its modules say of themselves.

    Attributes:
        parameters: with whether each is trained, and its gradient.
        buffers: also those that checkpoints leave out.
        training: whether each module is in training mode.
        extra: what modules give by `get_extra_state`.
        optimizers: for each optimizer the states of the parameters, and the names of those tensors in them that stay on
            the host.
    """

    parameters: Mapping[str, tuple[torch.Tensor, bool, torch.Tensor | None]]
    buffers: Mapping[str, torch.Tensor]
    training: Mapping[str, bool]
    extra: Mapping[str, Any]
    optimizers: Sequence[Mapping[str, tuple[Mapping[str, Any], Sequence[str]]]]

    @classmethod
    def of(cls, layer: nn.Module, optimizers: Sequence[Optimizer], gradients: bool = True) -> LayerState:
        """That of a layer on this rank. It refers to the tensors and copies none."""
        return cls(
            {n: (p.detach(), p.requires_grad, p.grad if gradients else None) for n, p in layer.named_parameters()},
            {name: buffer.detach() for name, buffer in layer.named_buffers()},
            *cls.around(layer),
            [
                {n: cls.with_host(optimizer.state[p]) for n, p in layer.named_parameters() if p in optimizer.state}
                for optimizer in optimizers
            ],
        )

    @staticmethod
    def around(layer: nn.Module) -> tuple[dict[str, bool], dict[str, Any]]:
        """`training` and `extra` of a layer, whose tensors may be elsewhere."""
        modules = dict(layer.named_modules())
        extra = {name: module.get_extra_state() for name, module in modules.items() if _says_more(module)}
        return {name: module.training for name, module in modules.items()}, extra

    @staticmethod
    def with_host(state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The state that an optimizer has of a parameter, as it is in `optimizers`."""
        return dict(state), [k for k, v in state.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"]

    def on(self, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers there, by name."""
        yield from ((name, p.to(device)) for name, (p, _, _) in self.parameters.items())
        yield from ((name, buffer.to(device)) for name, buffer in self.buffers.items())

    def put(self, layer: nn.Module, device: torch.device) -> None:
        """Gives a layer all but the values of its weights and saved buffers, which it has by now."""
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
        """The other direction for the optimizers, which have the layer's parameters by now."""
        for optimizer, states in zip(optimizers, self.optimizers, strict=True):
            for name, p in layer.named_parameters():
                if name in states:
                    optimizer.state[p] = _placed(*states[name], device)

    def states_on(self, number: int, device: torch.device) -> dict[str, tuple[dict[str, Any], Sequence[str]]]:
        """The states of optimizer `number` there."""
        return {name: (_placed(*each, device), each[1]) for name, each in self.optimizers[number].items()}


def laid_out(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """These values as `like` lies in memory, where the shapes are equal: kernels may go by that."""
    strides = like.stride() if like.shape == values.shape and 0 not in like.stride() else None
    if strides is None or strides == values.stride():
        return values
    return torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device).copy_(values)


def _placed(state: Mapping[str, Any], on_host: Sequence[str], device: torch.device) -> dict[str, Any]:
    return {
        key: value if key in on_host else pytree.tree_map_only(torch.Tensor, _to(device), value)
        for key, value in state.items()
    }


def _says_more(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _to(device: torch.device) -> Any:
    return lambda tensor: tensor.to(device)
