"""The values of one training batch that are compared between a pipeline and one plain process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_pipes.engine.private_torch import NoFunctionModes
from lightning_pipes.ir import Span

OUTSIDE = -1
"""The number that stands for all parts of the module outside of the layers."""


class Phase(IntEnum):
    """Kinds of values, in the order in which a batch produces them."""

    BATCH = 0
    MODE = 1
    FROZEN = 2
    INPUT = 3
    OUTPUT = 4
    LOSS = 5
    GRADIENT = 6
    STEP_GRADIENT = 7
    SETTING = 8
    WEIGHT = 9
    BUFFER = 10
    LOG = 11


class ValueKey(NamedTuple):
    """The key of a value: its kind, the number of its layer, and its name."""

    phase: Phase
    layer: int
    name: str


@dataclass
class Record:
    """The values of one batch.

    Attributes:
        number: the number of the batch since the beginning of training.
        values: tensors, numbers and strings. The input of a layer is a dict with the spans of its samples as keys.
        complete: whether an optimizer step may follow the batch.
    """

    number: int
    values: dict[ValueKey, Any] = field(default_factory=dict)
    complete: bool = True

    def add(self, phase: Phase, layer: int, name: str, value: Any) -> None:
        """Add a value. A tensor is copied to the CPU."""
        self.values[ValueKey(phase, layer, name)] = copy_value(value)

    def layers(self) -> list[int]:
        """Return the numbers of the layers that have values, `OUTSIDE` first."""
        return sorted({key.layer for key in self.values})

    def of_layer(self, layer: int) -> dict[ValueKey, Any]:
        """Return the values of one layer."""
        return {key: value for key, value in self.values.items() if key.layer == layer}


def copy_value(value: Any) -> Any:
    """Return a copy of a tensor on the CPU without its graph, and any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach()
    return (plain.to_dense() if plain.is_sparse else plain).to("cpu", copy=True)


def tensors_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with which a layer is called, with their position in the call."""
    for path, leaf in pytree.tree_flatten_with_path((args, dict(kwargs)))[0]:
        if isinstance(leaf, torch.Tensor):
            yield "input" + pytree.keystr(path[1:]), leaf


class ModuleParts:
    """The layers of a module and the rest of it, by the names of its state dict.

    Args:
        module: the whole module, or a module that has been cut.
        path: the path of the container of the layers, or None if `names` contains complete paths.
        layers: the layers to record, by number.
        names: the names of all layers.
    """

    def __init__(
        self,
        module: nn.Module,
        path: str | None,
        layers: Mapping[int, nn.Module],
        names: Iterable[str],
    ) -> None:
        self.module, self.path, self.layers, self.names = module, path, layers, list(names)

    def add_modes(self, record: Record) -> None:
        """Record which parts are in training mode, and which parameters are trained."""
        for layer, part in self._modules():
            for name, inner in part.items():
                record.add(Phase.MODE, layer, name, "training" if inner.training else "evaluation")
                for parameter_name, parameter in inner.named_parameters(recurse=False):
                    record.add(Phase.FROZEN, layer, join_names(name, parameter_name), _trained(parameter))

    def add_gradients(self, record: Record, phase: Phase) -> None:
        """Record the gradient of each parameter that has one."""
        for layer, name, parameter in self.parameters():
            if parameter.grad is not None:
                record.add(phase, layer, name, parameter.grad)

    def add_weights(self, record: Record, has_buffer: Callable[[str], bool]) -> None:
        """Record the weights and buffers.

        Args:
            record: the record to which they are added.
            has_buffer: returns whether a buffer outside of the layers is recorded, given its name in the module.
        """
        for layer, name, parameter in self.parameters():
            record.add(Phase.WEIGHT, layer, name, parameter)
        for layer, part in self._modules():
            for name, inner in part.items():
                for buffer_name, buffer in inner.named_buffers(recurse=False):
                    whole_name = join_names(name, buffer_name)
                    if layer != OUTSIDE or has_buffer(whole_name):
                        record.add(Phase.BUFFER, layer, whole_name, buffer)

    def parameters(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Yield the layer, the name and the tensor of each parameter."""
        for layer, part in self._modules():
            for name, inner in part.items():
                for parameter_name, parameter in inner.named_parameters(recurse=False):
                    yield layer, join_names(name, parameter_name), parameter

    def layer_name(self, layer: int) -> str:
        """Return the name of a layer in the module."""
        return self.names[layer] if self.path is None else f"{self.path}.{self.names[layer]}"

    def _modules(self) -> Iterator[tuple[int, dict[str, nn.Module]]]:
        inside = {id(inner) for layer in self.layers.values() for inner in layer.modules()}
        outside = {name: inner for name, inner in self.module.named_modules() if id(inner) not in inside}
        if self.path is not None:
            prefix = f"{self.path}."
            outside = {name: inner for name, inner in outside.items() if not f"{name}.".startswith(prefix)}
        yield OUTSIDE, outside
        for number, layer in self.layers.items():
            prefix = self.layer_name(number)
            yield number, {join_names(prefix, name): inner for name, inner in layer.named_modules()}


def _trained(parameter: nn.Parameter) -> str:
    return "trained" if parameter.requires_grad else "frozen"


def join_names(*names: str) -> str:
    """Return the non-empty names, joined by dots."""
    return ".".join(name for name in names if name)


def add_settings(record: Record, number: int, optimizer: Optimizer) -> None:
    """Record the numerical settings with which an optimizer is about to step."""
    for group, settings in enumerate(optimizer.param_groups):
        for name, value in settings.items():
            if name != "params" and isinstance(value, (int, float, torch.Tensor)):
                place = f"{name} of optimizer {number}, group {group}"
                record.add(Phase.SETTING, OUTSIDE, place, value if isinstance(value, torch.Tensor) else float(value))


def add_results(record: Record, out: Any) -> None:
    """Record the loss of a training step, and other tensors, numbers and strings that the step returns."""
    if not isinstance(out, dict):
        out = {"loss": out}
    for name, value in out.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, (int, float, str, torch.Tensor)):
                record.add(Phase.LOSS, OUTSIDE, f"{name}{pytree.keystr(path)}", leaf)


class LayerInputs:
    """Record the inputs of each layer with hooks on the layers.

    Args:
        layers: the layers, by number.
        where: returns the record and the span of the samples that are currently processed, or None if nothing is
            recorded.
    """

    def __init__(self, layers: Mapping[int, nn.Module], where: Callable[[], tuple[Record, Span] | None]) -> None:
        self._where = where
        self._handles = [
            layer.register_forward_pre_hook(self._keeper(number), with_kwargs=True, prepend=True)
            for number, layer in layers.items()
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _keeper(self, number: int) -> Callable[..., None]:
        def keep_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = self._where()
            if found is None:
                return
            record, span = found
            for name, tensor in tensors_of_call(args, kwargs):
                parts = record.values.setdefault(ValueKey(Phase.INPUT, number, name), {})
                with NoFunctionModes():  # the user's step runs in a function mode, which must not see the copies
                    if span not in parts and not tensor.is_meta:  # meta: a placeholder for a value of another rank
                        parts[span] = copy_value(tensor)

        return keep_inputs
