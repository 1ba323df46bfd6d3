"""Tests of the cut that modules and policies choose for a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
from torch import nn

from lightning_pipes.ir import LayerUse, PipelineError, Plan, PlanError, Span
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.trainer.loop.layer_copies import Cuts

LAYERS = (Span(0, 2), Span(2, 4), Span(4, 6))
PLAN = Plan.even(3, 2, layers=LAYERS)


class Says(pl.LightningModule):
    def layers_of_batch(self, batch: Any) -> list[str]:
        return []


class SaysCut(Says):
    cut: Sequence[int] | None = (1, 5)

    def cut_of_batch(self, batch: Any) -> Sequence[int] | None:
        return self.cut


class OnlyCut(pl.LightningModule):
    def cut_of_batch(self, batch: Any) -> Sequence[int] | None:
        return None


def full() -> nn.Sequential:
    blocks = [nn.ModuleList(nn.Linear(2, 2**c) for c in range(8)) for _ in range(4)]
    return nn.Sequential(nn.Linear(2, 2), *blocks, nn.Linear(2, 2))


def cuts(
    module: pl.LightningModule, policy: CSP, costs: dict[str, float] | None = None
) -> Callable[[LayerUse], LayerUse]:
    """Return a function that cuts the layers of a batch."""
    made = Cuts(module, full(), policy, costs)
    return lambda use: made.apply(None, use, PLAN)


USE = LayerUse.from_names(["0", "1.0", "2.1", "3.7", "4.0", "5"], LAYERS, steps=["0", "2.1"])


def test_a_module_says_the_cut() -> None:
    module = SaysCut()
    found = cuts(module, CSP())(USE)
    assert found.cut == (Span(0, 1), Span(1, 5), Span(5, 6))
    assert found.layers == ({"0"}, {"1.0", "2.1", "3.7", "4.0"}, {"5"})
    assert found.steps == USE.steps
    for cut in (None, (2, 4)):
        module.cut = cut
        assert cuts(module, CSP())(USE) is USE
    for cut in ((1,), (4, 2), (1, 7)):
        module.cut = cut
        with pytest.raises(PlanError, match="first layer of each stage but the first, 2 numbers that do not fall"):
            cuts(module, CSP())(USE)


def test_a_policy_goes_by_parameters_or_by_what_the_module_says() -> None:
    policy = CSP(balanced=True)
    # layer 3.7 has 384 parameters, the other layers at most 6
    assert cuts(Says(), policy)(USE).cut == (Span(0, 3), Span(3, 4), Span(4, 6))
    costs = {"0": 1.0, "1.0": 5.0, "2.1": 1.0, "3.7": 1.0, "4.0": 1.0, "5": 1.0}
    assert cuts(Says(), policy, costs)(USE).cut == (Span(0, 1), Span(1, 2), Span(2, 6))


def test_when_batches_are_cut() -> None:
    assert not Cuts.are_needed(Says(), CSP())
    assert Cuts.are_needed(Says(), CSP(balanced=True))
    assert Cuts.are_needed(SaysCut(), CSP())
    assert not Cuts.are_needed(pl.LightningModule(), CSP(balanced=True))
    with pytest.raises(PipelineError, match=r"OnlyCut has cut_of_batch, .* and no layers_of_batch"):
        Cuts.are_needed(OnlyCut(), CSP())
