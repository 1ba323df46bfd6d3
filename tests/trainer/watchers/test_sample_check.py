"""Tests of the comparison of a whole batch with its parts, without a pipeline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.ir import Span
from lightning_pipes.trainer.loop.watcher import is_due
from lightning_pipes.trainer.watchers.sample_check import _differ
from tests.trainer.watchers.checks import sample_check

SPANS = (Span(0, 3), Span(3, 6), Span(6, 8))


class Centred(nn.Module):
    def forward(self, x: Any) -> Any:
        return {**x, "x": x["x"] - x["x"].mean(0)}


class Noisy(nn.Module):
    """Drops entries at random in training, and records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls.append(len(x["x"]))
        self.count += 1
        return {**x, "x": nn.functional.dropout(x["x"], 0.5, self.training)}


class InPlace(nn.Module):
    def forward(self, x: Any) -> Any:
        x["x"].add_(1)
        return x


def outputs(layer: nn.Module) -> Any:
    """Return the outputs of a layer for a whole batch and its parts, and whether they can be compared."""
    check = sample_check()
    torch.manual_seed(0)
    parts = {s: {"x": torch.randn(s.rows, 4), "mask": torch.ones(4, 4)} for s in SPANS}
    return check._outputs(0, layer, parts)


@pytest.mark.parametrize("layer", [Noisy(), InPlace(), nn.Identity()])
def test_separate_samples_are_equal(layer):
    whole, parts, left, compared = outputs(layer)
    assert compared
    assert not left
    assert not _differ(whole, parts)
    assert layer.training
    if isinstance(layer, Noisy):
        assert not layer.calls
        assert layer.count == 0


def test_several_samples_together_differ():
    whole, parts, _, compared = outputs(Centred())
    assert compared
    assert _differ(whole, parts)


def test_what_differs():
    x = torch.randn(8, 3)
    parts = {s: x[s.start : s.stop] for s in SPANS}
    assert not _differ(x, parts)
    assert not _differ(x + 1e-7, parts)
    assert _differ(x + 1e-3, parts)
    # a number that differs between micro-batches
    assert _differ((x, x.mean()), {s: (p, p.mean()) for s, p in parts.items()})
    assert not _differ((x, 3.0), {s: (p, 3.0) for s, p in parts.items()})
    assert _differ(torch.arange(8), {s: torch.arange(s.rows) for s in SPANS})
    nan = x.clone()
    nan[3] = torch.nan
    assert not _differ(nan, {s: nan[s.start : s.stop] for s in SPANS})


def test_it_looks_at_first_batches_and_seldom_later():
    assert [n for n in range(70) if is_due(n)] == [0, 1, 2, 4, 8, 16, 32, 64]
    spans = [Span(0, 8)]
    check = sample_check(spans)
    data: list[Any] = [
        SimpleNamespace(rows=8, stage_inputs=None, loaded_copy=None, batch=torch.zeros(8), token_cut=None)
        for _ in range(5)
    ]
    for each in data:
        spans[:] = SPANS if each is not data[0] else [Span(0, 8)]
        check.around_batch(each)
    assert [each.stage_inputs is None for each in data] == [True, False, False, False, True]
