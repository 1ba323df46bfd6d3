"""Optimizer steps that are taken later than their batches came, in the order of these."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

Settings = list[dict[str, Any]]
"""Learning rate and all else that an optimizer's groups are told, by group."""
Gradients = dict[torch.Tensor, torch.Tensor]
"""By parameter."""
_OF_THIS_RANK = ("params", "param_names")


def settings_of(optimizer: Optimizer) -> Settings:
    """Return a copy of the settings of an optimizer's groups."""
    return [
        {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items() if key not in _OF_THIS_RANK}
        for group in optimizer.param_groups
    ]


@contextmanager
def with_settings(optimizer: Optimizer, settings: Settings) -> Iterator[None]:
    """Within the block its groups are told this."""
    now = settings_of(optimizer)
    _put_settings(optimizer, settings)
    yield
    _put_settings(optimizer, now)


def _put_settings(optimizer: Optimizer, settings: Settings) -> None:
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)


def _keep_gradients() -> float:
    """Act as the closure of a late step with known gradients; its loss is unknown."""
    return math.nan


class DeferredSteps:
    """Steps by batch and optimizer: the gradients of some parameters, and what the optimizer was told then."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], tuple[Settings, Gradients]] = {}

    def add(self, batch: int, number: int, settings: Settings, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Have optimizer `number` step these parameters for a batch, too."""
        self._steps.setdefault((batch, number), (settings, {}))[1].update(gradients)

    def give(self, batch: int, number: int, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """More gradients of a step that was added."""
        self._steps[batch, number][1].update(gradients)

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Takes all steps, batch by batch; gradients that the parameters have stay."""
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        held = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        for (_, number), (settings, gradients) in sorted(self._steps.items(), key=lambda step: step[0]):
            optimizer = optimizers[number]
            for p, gradient in gradients.items():
                p.grad = gradient
            with with_settings(optimizer, settings):
                optimizer.step(_keep_gradients)
            for p in gradients:
                p.grad = None
        self._steps.clear()
        for p, gradient in zip(parameters, held, strict=True):
            p.grad = gradient
