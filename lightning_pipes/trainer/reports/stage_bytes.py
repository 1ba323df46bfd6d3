"""Bytes that each stage holds: weights and states counted, activations seen in its first micro-batch."""

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
    """Bytes of one stage: weights with buffers, and gradients with optimizer states.

    Per sample it has the bytes kept from forward to backward, and those sent on.
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
    """Measures the bytes that the first micro-batch of every stage saves for its backward; later ones run as they are.

    Attributes:
        seen: by stage, what was measured.
    """

    def __init__(self) -> None:
        self.seen: dict[int, _Seen] = {}

    def watch_body(self, number: int, body: Body) -> Body:
        """Return the body of stage `number`, watched once."""

        def watch(stage: Stage, item: Item, span: Span, received: Any) -> Any:
            if number in self.seen or not torch.is_grad_enabled() or not item.training:
                return body(stage, item, span, received)
            there = {storage_of(t) for layer in stage.layers.values() for t in _state(layer)}
            there |= {storage_of(t) for t in tensors_in(item.data.batch)}  # whole, whatever is saved of it
            with saved_for_backward() as found:
                out = body(stage, item, span, received)
            there |= {storage_of(t) for layer in stage.layers.values() for t in _state(layer)}  # FSDP2 has gathered it
            self.seen[number] = _Seen(
                sum(size for _, size in found.keys() - there) / span.rows,
                sum(t.nbytes for t in tensors_in(out)) / span.rows,
            )
            return out

        return watch

    def forget_stages(self) -> None:
        """Stages have other layers now."""
        self.seen.clear()

    def of_a_sample(self, number: int) -> float | None:
        """Return the bytes that stage `number` keeps from forward to backward of one sample; None before it was
        seen."""
        seen = self.seen.get(number)
        return None if seen is None else seen.activations

    def measured_stages(
        self, stages: Mapping[int, Iterable[nn.Module]], optimizers: Iterable[Optimizer]
    ) -> dict[int, StageBytes]:
        """Return the bytes of stages with a measured first micro-batch, by number."""
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
    """`costs` with those bytes, if they are known of every stage."""
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
