"""Check that 'csp' on two replicas gives the weights of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from tests.strategies.csp.supernets import BATCHES, Batches, Lit, choices, new_module
from tests.trainer.lit import plain_values, quiet
from tests.trainers import make_trainer


class Halves(Batches):
    """A dataset in which each of two replicas has half of the samples of a batch."""

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y, whole = super().__getitem__(number // 2)
        half = slice(number % 2, None, 2)
        return x[half].double(), y[half].double(), whole


class Logs(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss


def fit_halves(rank: int, ranks: int, kind: type[Lit]) -> dict[str, np.ndarray]:
    quiet()
    module = new_module(kind).double()
    strategy = PipelineStrategy("csp", partition=[2] if ranks == 4 else [], data_parallel=2)
    data = Halves()
    sampler = DistributedSampler(data, 2, 2 * rank // ranks, shuffle=False)
    trainer = make_trainer(devices=ranks, strategy=strategy, max_epochs=1)
    trainer.fit(module, DataLoader(data, batch_size=None, sampler=sampler))
    return plain_values(dict(module.state_dict()))


def test_two_replicas_train_as_one_process_on_whole_batches() -> None:
    module = new_module().double()
    optimizer = module.configure_optimizers()
    for x, y, number in (Batches()[n] for n in range(BATCHES)):
        F.mse_loss(module.net((x.double(), choices(number))), y.double()).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = plain_values(dict(module.state_dict()))
    found = run_ranks(fit_halves, 4, 4, Lit, timeout=100)
    for weights in found:
        for name, value in wanted.items():
            np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-12)
            assert np.array_equal(weights[name], found[0][name])


def test_collective_calls_of_replicas_in_different_orders_are_refused() -> None:
    errors = [outcome.error for outcome in watch_ranks(fit_halves, 2, 2, Logs, timeout=60)]
    assert any("each replica runs batches in an order of its own" in error for error in errors)
