"""Check that 'csp' trains supernets whose own step chooses the layers of a batch, and which are cut by units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import MemorySwap, PipelineStrategy
from lightning_pipes.ir import Delayed, PlanError
from lightning_pipes.testing.ranks import run_ranks
from tests.strategies.csp.supernets import BATCHES, BLOCKS, WIDTH, Batches, Lit, choices, new_module
from tests.trainer.lit import differences, plain_values, quiet
from tests.trainers import make_trainer

EPOCHS = 2


class ByHand(Lit):
    """A supernet without a container that works alone: its step chooses candidates, and adds a skip over all blocks."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        candidates = (
            nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)) for _ in range(BLOCKS)
        )
        self.blocks = nn.ModuleList(candidates)

    def layers_of_batch(self, batch: Any) -> Any:
        return [f"{block}.{choice}" for block, choice in enumerate(choices(batch[2]))]

    def forward(self, batch: Any) -> torch.Tensor:
        x, y, number = batch
        skip = None
        for block, choice in zip(self.blocks, choices(number), strict=True):
            x = block[choice](x)  # type: ignore[index]
            skip = x if skip is None else skip
        return F.mse_loss(x + skip, y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch)  # type: ignore[no-any-return]


class ReadsOnly(ByHand):
    """A supernet of whose layers each batch steps every second one."""

    def layers_of_batch(self, batch: Any) -> Any:
        return {name: n % 2 == batch[2] % 2 for n, name in enumerate(super().layers_of_batch(batch))}


class ReadsLate(ByHand):
    """A supernet with blocks on both stages whose weights are read two batches late."""

    def layers_of_batch(self, batch: Any) -> Any:
        return {name: Delayed(2) if n in (1, 2) else True for n, name in enumerate(super().layers_of_batch(batch))}


class Cuts(ByHand):
    def cut_of_batch(self, batch: Any) -> list[int]:
        return [1]


class Doubles(Batches):
    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y, number = super().__getitem__(number)
        return x.double(), y.double(), number


KINDS = (ByHand, ReadsOnly, ReadsLate)
REFUSED: list[tuple[type[ByHand], dict[str, Any], tuple[Any, ...], str]] = [
    (Cuts, {}, (), "a cut of each batch with schedule 'csp', which sends layers between ranks does not work"),
    (ByHand, {"recompute": True}, (MemorySwap(10**6),), "MemorySwap with schedule 'csp'"),
    (ByHand, {"partition": ["blocks.1.0"]}, (), "names layers of 'blocks', so stages begin at these"),
]


def fit(kind: type[Lit], ranks: int, callbacks: Any = (), **settings: Any) -> dict[str, Any]:
    module = new_module(kind).double()
    strategy = PipelineStrategy("csp", module="", **{"partition": list(range(1, ranks)), **settings})
    trainer = make_trainer(devices=ranks, strategy=strategy, max_epochs=EPOCHS, callbacks=[*callbacks])
    trainer.fit(module, DataLoader(Doubles(), batch_size=None))
    return plain_values(dict(module.state_dict()))


def fit_all(rank: int, ranks: int) -> tuple[list[dict[str, Any]], list[str]]:
    quiet()
    found = [fit(kind, ranks) for kind in (*KINDS, Lit)]
    if ranks == 3:
        return found, []
    found.append(fit(ByHand, ranks, partition=["blocks.3"], recompute=True))
    refused = []
    for kind, settings, callbacks, _ in REFUSED:
        with pytest.raises(PlanError) as error:
            fit(kind, ranks, callbacks, **settings)
        refused.append(str(error.value))
    return found, refused


def train_alone(kind: type[Lit]) -> dict[str, Any]:
    """Train one batch after another. Layers that a batch reads late have the weights of an earlier batch."""
    module = new_module(kind).double()
    optimizer = module.configure_optimizers()
    named = dict(module.named_parameters())
    for _ in range(EPOCHS):
        left = [{name: p.detach().clone() for name, p in named.items()}]
        for n in range(BATCHES):
            batch = Doubles()[n]
            uses = module.layers_of_batch(batch)
            steps: Mapping[str, Any] = uses if isinstance(uses, Mapping) else dict.fromkeys(uses, True)
            late = [f"blocks.{name}." for name, how in steps.items() if isinstance(how, Delayed)]
            only = [f"blocks.{name}." for name, how in steps.items() if not how]
            read = {name: left[max(n - 1, 0)] if name.startswith(tuple(late)) else left[n] for name in named}
            weights = {name: values[name].clone().requires_grad_() for name, values in read.items()}
            if kind is Lit:
                optimizer.zero_grad()
                module.training_step(batch, n).backward()
            else:
                grads = torch.autograd.grad(
                    functional_call(module, weights, (batch,)), list(weights.values()), allow_unused=True
                )
                for (name, p), grad in zip(named.items(), grads, strict=True):
                    p.grad = None if name.startswith(tuple(only)) else grad
            optimizer.step()
            left.append({name: p.detach().clone() for name, p in named.items()})
    return plain_values(dict(module.state_dict()))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_batches_that_name_their_layers_are_trained_one_after_another(ranks: int) -> None:
    alone = [train_alone(kind) for kind in (*KINDS, Lit, ByHand)]
    for found, refused in run_ranks(fit_all, ranks, ranks, timeout=200):
        for values, expected, kind in zip(found, alone, (*KINDS, Lit, ByHand), strict=False):
            assert differences(expected, values, 1e-10, kind.__name__) == []
        for (*_, part), text in zip(REFUSED, refused, strict=False):
            assert part in text
