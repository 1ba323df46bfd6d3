"""Comparison of each layer of a stage with the same layer on the whole batch.

It is used if no process has room for the whole module.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.ir import Span
from lightning_pipes.trainer.data.batches import join
from lightning_pipes.trainer.verify.record import Phase, ValueKey, copy_value
from lightning_pipes.trainer.verify.sample_draws import SampleDraws


class LayerSlices:
    """Record the inputs, outputs and output gradients of each layer with hooks on the layers.

    Args:
        layers: the layers of this rank, by number.
        where: returns the span of the samples that are currently processed, also during recomputation, or None if
            nothing is recorded.
        device: the device of the layers.
    """

    def __init__(self, layers: Mapping[int, nn.Module], where: Callable[[], Span | None], device: torch.device) -> None:
        self._layers, self._where, self._device = layers, where, device
        self._inputs: dict[int, dict[Span, Any]] = defaultdict(dict)
        self._outputs: dict[int, dict[Span, Any]] = defaultdict(dict)
        self._gradients: dict[int, dict[Span, dict[int, torch.Tensor]]] = defaultdict(dict)
        self._handles: list[Any] = []
        for number, layer in layers.items():
            keep_input, keep_output = self._keepers(number)
            self._handles.append(layer.register_forward_pre_hook(keep_input, with_kwargs=True, prepend=True))
            self._handles.append(layer.register_forward_hook(keep_output))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin_batch(self) -> None:
        """Drop the values of the previous batch."""
        for table in (self._inputs, self._outputs, self._gradients):
            table.clear()

    def compare_with(
        self, draws: SampleDraws, rows: int, gradients: Mapping[ValueKey, torch.Tensor], prefix: Callable[[int], str]
    ) -> tuple[dict[ValueKey, Any], dict[ValueKey, Any]]:
        """Return the values of the layers in the pipeline, and the values of the same layers on the whole batch.

        Args:
            draws: the random streams, which have been started for the batch.
            rows: number of samples in the batch.
            gradients: the gradients of the weights on this rank.
            prefix: returns the name of a layer in the module.
        """
        ours: dict[ValueKey, Any] = {}
        theirs: dict[ValueKey, Any] = {}
        whole = Span(0, rows)
        for number, layer in self._layers.items():
            spans = sorted(self._inputs[number])
            if not spans:
                continue
            alone = copy.deepcopy(layer)
            for parameter in alone.parameters():
                parameter.grad = None
            args, kwargs = self._joined([self._inputs[number][span] for span in spans], spans)
            with torch.enable_grad(), draws.draw_by_sample():
                draws.enter(number, spans)
                out = alone(*args, **kwargs)
                outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
                self._differentiate(outputs, self._gradients[number])
            for place, leaf in enumerate(outputs):
                key = ValueKey(Phase.OUTPUT, number, f"output {place}")
                ours[key] = {span: self._outputs[number][span][place] for span in spans}
                theirs[key] = {whole: copy_value(leaf)}
            for name, parameter in alone.named_parameters():
                key = ValueKey(Phase.GRADIENT, number, f"{prefix(number)}.{name}")
                if key in gradients and parameter.grad is not None:
                    ours[key], theirs[key] = gradients[key], copy_value(parameter.grad)
        return ours, theirs

    def _joined(self, trees: Sequence[Any], spans: Sequence[Span]) -> Any:
        tree = trees[0] if len(trees) == 1 else join(trees, spans, "what a layer gets")
        return pytree.tree_map_only(torch.Tensor, lambda t: t.to(self._device), tree)

    def _differentiate(self, outputs: Sequence[torch.Tensor], found: Mapping[Span, Mapping[int, torch.Tensor]]) -> None:
        spans = sorted(found)
        roots, gradients = [], []
        for place, leaf in enumerate(outputs):
            parts = [found[span][place] for span in spans if place in found[span]]
            if leaf.requires_grad and len(parts) == len(spans) and parts:
                roots.append(leaf)
                gradients.append(torch.cat(parts) if leaf.ndim and len(parts) > 1 else parts[0])
        if roots:
            torch.autograd.backward(roots, gradients)

    def _keepers(self, number: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def keep_input(_: nn.Module, args: Any, kwargs: Any) -> None:
            span = self._where()
            if span is not None and span not in self._inputs[number]:
                self._inputs[number][span] = pytree.tree_map(copy_value, (args, kwargs))

        def keep_output(_: nn.Module, args: Any, out: Any) -> None:
            span = self._where()
            if span is None:
                return
            leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            if span not in self._outputs[number]:
                self._outputs[number][span] = [copy_value(leaf) for leaf in leaves]
            for place, leaf in enumerate(leaves):
                if leaf.requires_grad:
                    leaf.register_hook(self._gradient_keeper(number, span, place))  # type: ignore[no-untyped-call]

        return keep_input, keep_output

    def _gradient_keeper(self, number: int, span: Span, place: int) -> Callable[[torch.Tensor], None]:
        def keep_gradient(gradient: torch.Tensor) -> None:
            self._gradients[number].setdefault(span, {})[place] = gradient.detach().clone()

        return keep_gradient
