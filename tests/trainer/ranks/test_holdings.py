"""Tests of `Holdings`, which stores the rank of each layer and the owners of each parameter."""

from __future__ import annotations

from itertools import pairwise

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_pipes.ir import PlanError, Span
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.ranks import Grid


def made(place: int, *sizes: int) -> tuple[pl.LightningModule, Holdings]:
    """Return five layers in stages of the given sizes, one per rank.

    Two of the layers are the same object, and one parameter is outside of the layers.
    """
    module, activation = pl.LightningModule(), nn.PReLU()
    module.model = nn.Sequential(nn.Linear(1, 1), activation, nn.Linear(1, 1), activation, nn.Linear(1, 1))
    module.outside = nn.Parameter(torch.ones(1))
    ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    spans = [Span(a, b) for a, b in pairwise(ends)]
    holdings = Holdings(Grid(1, len(sizes), place), range(len(sizes)), spans)
    holdings.index_parameters(module, "model")
    return module, holdings


def test_the_last_stage_is_on_the_first_process():
    _, holdings = made(2, 2, 2, 1)
    assert (holdings.rank, holdings.local, holdings.global_ranks) == (0, [0, 1], [2, 1, 0])
    assert holdings.stage_of_layer == [0, 0, 1, 1, 2]
    assert holdings.position_of_layer == holdings.global_rank_of_layer == [2, 2, 1, 1, 0]
    assert dict(holdings.stages_of_processes()) == {0: (2,), 1: (1,), 2: (0,)}


def test_a_parameter_is_held_where_its_layers_are():
    module, holdings = made(1, 2, 2, 1)
    named = dict(module.named_parameters())
    who = {name: holdings.holders[id(p)] for name, p in named.items()}
    assert list(who) == list(named)
    assert who["outside"] == (0, 1, 2)
    assert who["model.1.weight"] == (1, 2)
    assert [who[f"model.{n}.weight"] for n in (0, 2, 4)] == [(2,), (1,), (0,)]
    assert [name for name, p in named.items() if holdings.is_owner(p)] == [
        *("model.1.weight", "model.2.weight", "model.2.bias")
    ]
    assert [name for name, p in named.items() if not holdings.in_one_stage(p)] == ["outside", "model.1.weight"]


def test_layers_that_share_a_parameter_are_named() -> None:
    """Check that tied layers are named, except those tied to the code around the layers.

    All ranks hold a weight of that code, wherever layers move.
    """
    module, holdings = made(1, 2, 2, 1)
    assert holdings.tied == ((1, 3),)
    module.outside = module.model[4].weight
    holdings.index_parameters(module, "model")
    assert holdings.tied == ((1, 3),)


def spans(*ends: int) -> tuple[Span, ...]:
    return tuple(Span(a, b) for a, b in pairwise((0, *ends)))


def test_layers_that_move_are_named_with_where_they_go():
    _, holdings = made(0, 1, 3, 1)
    assert holdings.list_moves(spans(1, 4, 5)) == []
    assert holdings.list_moves(spans(4, 4, 5)) == [(1, 1, 2), (2, 1, 2), (3, 1, 2)]  # tied layers move together
    assert holdings.list_moves(spans(0, 5, 5)) == [(0, 2, 1), (4, 0, 1)]
    holdings.place_layers(spans(4, 4, 5))
    assert holdings.local == [4]
    assert holdings.list_moves(spans(1, 4, 5)) == [(1, 2, 1), (2, 2, 1), (3, 2, 1)]


@pytest.mark.parametrize(
    "layers", [spans(2, 4, 5), spans(1, 3, 5), spans(1, 4, 6), (Span(0, 5), Span(0, 5), Span(5, 5))]
)
def test_impossible_holdings_are_refused(layers: tuple[Span, ...]):
    _, holdings = made(0, 1, 3, 1)
    with pytest.raises(
        PlanError, match=r"model.1.weight is shared by layers 1 and 3|every layer has to be in one stage"
    ):
        holdings.list_moves(layers)
