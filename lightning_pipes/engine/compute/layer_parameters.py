"""The parameters and buffers of a stage, by the layer names that batches use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from lightning_pipes.engine.residency.mirrors import Mirrors
from lightning_pipes.ir import LayerUse, PlanError


class LayerParameters:
    """Parameters by name: "5" are those of layer number 5, "5.2" those of its child "2".

    Args:
        stage: its number.
        layers: its layers, by their number in the whole model.
        mirrors: the copies of other ranks' layers that batches run here, if any.
    """

    def __init__(self, stage: int, layers: Mapping[int, nn.Module], mirrors: Mirrors | None = None) -> None:
        self._stage = stage
        self._mirrors = mirrors
        self._layers = dict(layers)
        self._modules: dict[str, nn.Module] = {}
        self._found: dict[str, tuple[nn.Parameter, ...]] = {}

    def check(self, use: LayerUse) -> None:
        """Refuse names of layers that are not on this stage.

        Raises:
            PlanError: there is one.
        """
        for name in use.layers[self._stage] if len(use.layers) > self._stage else ():
            self._module(name)

    def modules(self, names: Iterable[str]) -> dict[str, nn.Module]:
        """Return the modules under these names."""
        return {name: self._module(name) for name in sorted(names)}

    def parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        """Return the parameters under these names on this rank, each once."""
        return list({id(p): p for name in sorted(names) for p in self._parameters_of(name)}.values())

    def named_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers under this name on this rank, by their name within it."""
        mirrors = self._mirrors_of(name)
        own = self._module(name).named_parameters() if mirrors is None else mirrors.copies[name].parameters.items()
        return {**dict(own), **dict(self._buffers(name))}

    def read_only_ids(self, use: LayerUse | None) -> frozenset[int]:
        """Return the ids of trainable parameters that a batch uses and does not step."""
        if use is None or use.steps is None:
            return frozenset()
        stepped = {id(p) for p in self.parameters(use.stepped_layers(self._stage))}
        read = self.parameters(use.layers[self._stage])
        return frozenset(id(p) for p in read if p.requires_grad and id(p) not in stepped)

    def read_only_buffers(self, use: LayerUse | None) -> dict[str, torch.Tensor]:
        """Return the buffers of layers that a batch only reads, or reads late, so that it must not change them."""
        if use is None or (use.steps is None and not use.delays):
            return {}
        here, late = use.layers[self._stage], {name for name, _ in use.delays}
        names = sorted((here - use.stepped_layers(self._stage)) | (here & late))
        return {f"{name}.{at}": buffer for name in names for at, buffer in self._buffers(name)}

    def _buffers(self, name: str) -> Iterable[tuple[str, torch.Tensor]]:
        mirrors = self._mirrors_of(name)
        return self._module(name).named_buffers() if mirrors is None else mirrors.copies[name].buffers.items()

    def _mirrors_of(self, name: str) -> Mirrors | None:
        """Return the mirrors of a layer that another rank owns; None for other layers."""
        return self._mirrors if self._mirrors is not None and self._mirrors.is_remote(name) else None

    def _parameters_of(self, name: str) -> tuple[nn.Parameter, ...]:
        mirrors = self._mirrors_of(name)
        if mirrors is not None:  # a batch under way may use what is not here yet
            return tuple(mirrors.copies[name].parameters.values()) if name in mirrors.copies else ()
        if name not in self._found:
            self._found[name] = tuple(self._module(name).parameters())
        return self._found[name]

    def _module(self, name: str) -> nn.Module:
        if name not in self._modules:
            number, _, part = name.partition(".")
            try:
                self._modules[name] = self._layers[int(number)].get_submodule(part)
            except (KeyError, ValueError, AttributeError):
                raise PlanError(
                    f"a batch uses layer {name!r} on stage {self._stage}, which has no such layer, or no such part of "
                    f"one: its layers are {', '.join(map(str, self._layers)) or 'none'}"
                ) from None
        return self._modules[name]
