"""Training in one process with weights that are as old as in a pipeline with overlapping batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback


class ReadsOldWeights(Callback):
    """A callback that computes batch n in stage s of p with the weights after n - (p - 1 - s) updates.

    No weights are older than the last flush. Batches are flushed before validation, before layers move, and at the end
    of an epoch.

    Args:
        cut: the first layers of stages 1, 2, ....
        moved: new cuts, by the number of the batch before which layers moved.
    """

    def __init__(self, cut: Sequence[int], moved: Mapping[int, Sequence[int]]) -> None:
        self._cut, self._moved = cut, moved
        self._versions: list[list[torch.Tensor]] = []
        self._parameters: list[tuple[torch.nn.Parameter, int]] = []
        self._present: list[torch.Tensor] = []
        self._since = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._use(module, self._cut)
        self._keep()

    def _use(self, module: Any, cut: Sequence[int]) -> None:
        layers = list(module.layers)
        stages = [layers[a:b] for a, b in pairwise([0, *cut, len(layers)])]
        self._parameters = [
            (p, len(stages) - 1 - s) for s, stage in enumerate(stages) for layer in stage for p in layer.parameters()
        ]

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        now = len(self._versions) - 1
        if now in self._moved:
            self._use(module, self._moved[now])
            self._since = now
        if now == self._since:  # hooks may have changed weights since the last step
            self._versions.pop()
            self._keep()
        self._present = [p.data for p, _ in self._parameters]
        for number, (p, delay) in enumerate(self._parameters):
            p.data = self._versions[max(self._since, now - delay)][number].clone()

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        for (p, _), present in zip(self._parameters, self._present, strict=True):
            p.data = present

    def on_train_batch_end(self, *_: Any) -> None:
        self._keep()

    def on_validation_start(self, *_: Any) -> None:
        self._since = max(0, len(self._versions) - 1)

    def on_train_epoch_end(self, *_: Any) -> None:
        self._since = len(self._versions) - 1

    def _keep(self) -> None:
        self._versions.append([p.detach().clone() for p, _ in self._parameters])
