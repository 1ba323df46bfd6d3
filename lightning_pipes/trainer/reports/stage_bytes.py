"""Determines the bytes of each stage.

Weights and states are counted, and activations are measured in the first micro-batch of the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.cost import CostModel
from lightning_pipes.engine.compute.footprint import count_bytes, saved_for_backward, storage_of
from lightning_pipes.engine.compute.reducer import local_part
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Body, Stage
from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.ir import Span


class StageBytes(NamedTuple):
    """The bytes of one stage.

    Attributes:
        weights: the size of parameters and buffers.
        states: the size of gradients and optimizer states.
        activations: the bytes per sample that are kept from the forward to the backward.
        output: the bytes per sample that are sent to the next stage.
    """

    weights: int
    states: int
    activations: float
    output: float


@dataclass(frozen=True)
class _Seen:
    activations: float
    output: float


class SavedBytes:
    """Measures the bytes that the first micro-batch of each stage saves for its backward.

    Later micro-batches are not affected.

    Attributes:
        seen: the measured values by stage.
    """

    def __init__(self) -> None:
        self.seen: dict[int, _Seen] = {}

    def watch_body(self, number: int, body: Body) -> Body:
        """Wrap the body of a stage, so that its first micro-batch in training is measured.

        Args:
            number: the number of the stage.
            body: the function that runs the stage.
        """

        def watch(stage: Stage, item: Item, span: Span, received: Any) -> Any:
            if number in self.seen or not torch.is_grad_enabled() or not item.training:
                return body(stage, item, span, received)
            there = {storage_of(t) for layer in stage.layers.values() for t in _state(layer)}
            there |= {storage_of(t) for t in tensors_in(item.data.batch)}  # the batch is kept as a whole anyway
            with saved_for_backward() as found:
                out = body(stage, item, span, received)
            # FSDP2 has gathered the parameters by now.
            there |= {storage_of(t) for layer in stage.layers.values() for t in _state(layer)}
            self.seen[number] = _Seen(
                sum(size for _, size in found.keys() - there) / span.rows,
                sum(t.nbytes for t in tensors_in(out)) / span.rows,
            )
            return out

        return watch

    def forget_stages(self) -> None:
        """Discard all measured values, because stages have different layers now."""
        self.seen.clear()

    def of_a_sample(self, number: int) -> float | None:
        """Return the bytes that a stage keeps from forward to backward for one sample.

        The result is None if the stage has not been measured yet.
        """
        seen = self.seen.get(number)
        return None if seen is None else seen.activations

    def measured_stages(
        self, stages: Mapping[int, Iterable[nn.Module]], optimizers: Iterable[Optimizer]
    ) -> dict[int, StageBytes]:
        """Return the bytes of the stages that have been measured, by stage number.

        Args:
            stages: the layers of each stage of this rank, by stage number.
            optimizers: the optimizers, whose states are counted.
        """
        states: dict[torch.Tensor, int] = {}
        for optimizer in optimizers:
            for parameter, values in optimizer.state.items():
                kept = [local_part(t) for t in values.values() if isinstance(t, torch.Tensor)]
                states[parameter] = sum(map(count_bytes, kept))
        found = {}
        for number, layers in stages.items():
            if number not in self.seen:
                continue
            tensors = {id(t): t for layer in layers for t in _state(layer)}.values()
            trained = [t for t in tensors if isinstance(t, nn.Parameter) and t.requires_grad]
            found[number] = StageBytes(
                sum(local_part(t).nbytes for t in tensors),
                sum(local_part(p).nbytes + states.get(p, 0) for p in trained),
                self.seen[number].activations,
                self.seen[number].output,
            )
        return found


def with_bytes(costs: CostModel, stages: Mapping[int, StageBytes]) -> CostModel:
    """Return `costs` with the bytes of the stages, or unchanged if the bytes of a stage are unknown."""
    if set(stages) != set(range(costs.n_stages)):
        return costs
    ordered = [stages[number] for number in range(costs.n_stages)]
    edges = tuple(stage.output for stage in ordered[:-1])
    return replace(
        costs,
        weight_bytes=tuple(stage.weights for stage in ordered),
        state_bytes=tuple(stage.states for stage in ordered),
        activation_bytes=tuple(round(stage.activations) for stage in ordered),
        forward_bytes=edges,
        backward_bytes=edges,
    )


def _state(layer: nn.Module) -> list[torch.Tensor]:
    return [*layer.parameters(), *layer.buffers()]
