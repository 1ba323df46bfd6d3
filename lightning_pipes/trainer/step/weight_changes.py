"""Refuses changes of weights by the code around the layers, if one process would make different changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.module.remote_tensors import RemoteTensor

_RUNS = 16
"""The runs of each stage in which weights are looked at; in the first one also for writes that torch does not count, as
those to `weight.data`."""

Marks = dict[str, tuple[Any, ...]]
"""What shows a change of each weight, by its name."""


class WeightChangeCheck:
    """Looks at the weights before and after the user's code in `training_step`, which runs on the first stage up to the
    layers, and on the last one as a whole.

    Args:
        container: the path of the pipelined module in the user's.
        layers: all layers of it, by number.
    """

    def __init__(self, module: nn.Module, container: str, layers: Mapping[int, nn.Module]) -> None:
        self._module, self._container, self._layers = module, container, layers
        self._runs: Counter[int] = Counter()

    def look(self, stage: Stage) -> Marks | None:
        """Begin a run of `training_step`: return marks of the present weights, or None if enough runs were seen, or
        layers take turns on the device."""
        self._runs[stage.number] += 1
        return self._read_marks(stage) if self._runs[stage.number] <= _RUNS and stage.offload is None else None

    def look_again(self, before: Marks | None, stage: Stage) -> Marks | None:
        """Return marks of the present weights within a run, after code that may change them."""
        return None if before is None else self._read_marks(stage)

    def refuse_changes(self, before: Marks | None, stage: Stage, span: Span, rows: int, why: str) -> None:
        """Refuse a change since `before` that would be another one than in one process.

        Args:
            span: the samples of the micro-batch.
            rows: the samples of the batch.
            why: why weights around the layers may not change either, if the batch is not cut; empty if they may.

        Raises:
            PipelineError: the step has changed a weight.
        """
        if before is None:
            return
        after, inside = self._read_marks(stage), f"{self._container}."
        for name in before:
            if name not in after or after[name] == before[name]:
                continue
            if name.startswith(inside):
                reason = "The layers are on several processes, which would have different weights"
            elif span.rows < rows:
                reason = "One process makes this change once for a batch, and here the step runs for each micro-batch"
            elif why:
                reason = why
            else:
                continue
            raise PipelineError(
                f"{type(self._module).__name__}.training_step changes self.{name}. {reason}. Make this change in "
                "on_train_batch_start or on_train_batch_end, where each rank changes its weights once for a batch"
            )

    def _named_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by name; those that layers and code around them share have their name in the layers."""
        found = {
            f"{self._container}.{number}.{name}": p
            for number, layer in self._layers.items()
            for name, p in layer.named_parameters()
        }
        known, left = set(map(id, found.values())), [("", self._module)]
        while left:
            prefix, part = left.pop()
            normalizes = getattr(part, "max_norm", None) is not None  # an embedding, which may do so many times
            for name, p in part._parameters.items():
                if not normalizes and p is not None and id(p) not in known:
                    known.add(id(p))
                    found[prefix + name] = p
            for name, child in part._modules.items():
                if child is not None and prefix + name != self._container:
                    left.append((f"{prefix}{name}.", child))
        return found

    def _read_marks(self, stage: Stage) -> Marks:
        every = self._named_weights()
        marks: Marks = {name: (p.writes,) for name, p in every.items() if isinstance(p, RemoteTensor)}
        weights = {name: p for name, p in every.items() if type(p) is nn.Parameter}
        marks |= {name: (p._version,) for name, p in weights.items()}
        if self._runs[stage.number] == 1:
            read = [name for name, p in weights.items() if _can_be_summed(p)]
            with torch.no_grad():
                sums = [torch.stack([weights[name].sum(), weights[name].abs().sum()]).tolist() for name in read]
            marks |= {name: tuple(each) for name, each in zip(read, sums, strict=True)}
        return marks


def _can_be_summed(p: torch.Tensor) -> bool:
    return p.is_floating_point() and p.layout is torch.strided
