"""Who holds which layer, and which parameters."""

from __future__ import annotations

from itertools import pairwise

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipes.ir import Span
from lightning_pipes.trainer.ranks.grid import Grid
from lightning_pipes.trainer.ranks.holdings import Holdings


def made(place: int, *sizes: int) -> tuple[pl.LightningModule, Holdings]:
    """Five layers, of which two are the same, and a parameter outside of them; a stage a rank."""
    module, activation = pl.LightningModule(), nn.PReLU()
    module.model = nn.Sequential(nn.Linear(1, 1), activation, nn.Linear(1, 1), activation, nn.Linear(1, 1))
    module.outside = nn.Parameter(torch.ones(1))
    ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    spans = [Span(a, b) for a, b in pairwise(ends)]
    holdings = Holdings(Grid(1, len(sizes), place), range(len(sizes)), spans)
    holdings.look_at(module, "model")
    return module, holdings


def test_the_last_stage_is_on_the_first_process():
    _, holdings = made(2, 2, 2, 1)
    assert (holdings.rank, holdings.local, holdings.global_ranks) == (0, [0, 1], [2, 1, 0])
    assert holdings.stage_of_layer == [0, 0, 1, 1, 2]
    assert holdings.place_of_layer == holdings.rank_of_layer == [2, 2, 1, 1, 0]
    assert dict(holdings.stages_of_processes()) == {0: (2,), 1: (1,), 2: (0,)}


def test_a_parameter_is_held_where_its_layers_are():
    module, holdings = made(1, 2, 2, 1)
    named = dict(module.named_parameters())
    who = {name: holdings.holders[id(p)] for name, p in named.items()}
    assert list(who) == list(named)
    assert who["outside"] == (0, 1, 2)
    assert who["model.1.weight"] == (1, 2)
    assert [who[f"model.{n}.weight"] for n in (0, 2, 4)] == [(2,), (1,), (0,)]
    assert [name for name, p in named.items() if holdings.counts_here(p)] == [
        *("model.1.weight", "model.2.weight", "model.2.bias")
    ]
    assert [name for name, p in named.items() if not holdings.in_one_stage(p)] == ["outside", "model.1.weight"]
