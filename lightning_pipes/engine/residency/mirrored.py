"""The layers that a stage runs for a batch with a cut of its own, with copies of other ranks' weights."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from lightning_pipes.engine.residency.mirrors import Mirrors
from lightning_pipes.ir import LayerUse, PlanError


class MirroredLayers:
    """All layers of the model as one stage runs them.

    Args:
        stage: its number.
        layers: by number, which may be wrapped around those of `mirrors`.
    """

    def __init__(self, stage: int, mirrors: Mirrors, layers: Mapping[int, nn.Module]) -> None:
        self._stage, self._mirrors, self._layers = stage, mirrors, layers

    def layers_of(self, use: LayerUse | None, own: Mapping[int, nn.Module]) -> Mapping[int, nn.Module]:
        """Return the layers that the stage runs for a batch; its `own` where the batch has no cut of its own."""
        if use is None or use.cut is None:
            return own
        return {number: self._layers[number] for number in range(*use.cut[self._stage])}

    def is_remote(self, number: int) -> bool:
        """Return whether another rank owns the layer."""
        return self._mirrors.is_remote(str(number))

    def run(self, use: LayerUse, number: int, layer: nn.Module, x: Any, only_read: Set[int], changes: bool) -> Any:
        """Return the output of an `is_remote` layer for `x`, using the parts of it that the batch uses.

        Args:
            only_read: ids of parameters that get no gradients.
            changes: whether buffers may change.

        Raises:
            PlanError: it needs weights that the batch does not name.
        """
        names = sorted(use.layers[self._stage])
        parameters, buffers = self._mirrors.of_layer(number, names)
        before = self._prefix(number, layer)
        given = {f"{before}{at}": p.detach() if id(p) in only_read else p for at, p in parameters.items()}
        given |= {f"{before}{at}": buffer if changes else buffer.clone() for at, buffer in buffers.items()}
        out = functional_call(layer, given, (x,)) if given else layer(x)
        if changes and buffers:
            self._mirrors.replace_buffers(number, names, {at: given[f"{before}{at}"] for at in buffers})
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(out)):
            raise PlanError(
                f"layer {number} ran on stage {self._stage}, where it is for this batch only, and used weights that "
                f"the batch does not name: it names {', '.join(names) or 'none'}. Let layers_of_batch name all that a "
                "batch uses"
            )
        return out

    def _prefix(self, number: int, layer: nn.Module) -> str:
        inner = self._mirrors.layers[number]
        return next(f"{at}." if at else "" for at, module in layer.named_modules() if module is inner)
