"""Tests of data that each rank would load differently.

One rank loads it for all ranks, and training must equal one process with the same batches.
"""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import InputError
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from tests.trainer.lit import WIDTH, Lit, differences
from tests.trainers import make_trainer

ROWS = 16


class Unseeded(Dataset[Any]):
    """Samples that differ between processes, with noise that is drawn when they are loaded."""

    def __init__(self, rank: int, fails_at: int | None = None) -> None:
        self._x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank)).double()
        self._fails_at = fails_at

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, row: int) -> Any:
        if row == self._fails_at:
            raise OSError("the disk is gone")
        noise = torch.rand(WIDTH) + float(np.random.rand()) + random.random()
        return self._x[row] + noise, row % 3


class Drawing(Lit):
    """Records its batches and the random numbers drawn in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: list[Any] = []
        self.validated: list[Any] = []
        self.drawn: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trained.append([part.numpy().copy() for part in batch])
        self.drawn.append(float(torch.rand(())) + random.random() + float(np.random.rand()))

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.validated.append([part.numpy().copy() for part in batch])


def train(rank: int, how: str, workers: int = 0, fails_at: int | None = None, split: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    module, unseeded = Drawing().double(), Unseeded(rank, fails_at)
    sampler = DistributedSampler(unseeded, 2, rank) if split else None
    loader = DataLoader(unseeded, batch_size=4, shuffle=None if split else True, sampler=sampler, num_workers=workers)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy=PipelineStrategy(data=how), max_epochs=2)  # type: ignore[arg-type]
        trainer.fit(module, loader, DataLoader(unseeded, batch_size=8))
    return {
        "batches": (module.trained, module.validated),
        "drawn": module.drawn,
        "weights": {name: value.numpy() for name, value in module.state_dict().items()},
        "said": sum("load different batches, so from now on rank 0 loads" in str(w.message) for w in said),
    }


def train_alone(batches: list[Any]) -> dict[str, Any]:
    """Return the weights of one plain process after training on these batches."""
    torch.manual_seed(0)
    module = Lit().double()
    make_trainer(devices=1, max_epochs=1).fit(
        module, DataLoader([list(map(torch.from_numpy, b)) for b in batches], batch_size=None)
    )
    return {name: value.numpy() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("how", "workers", "warned"), [("auto", 0, 2), ("one", 2, 0)])
def test_one_rank_loads_for_all(how, workers, warned):
    """Check that both ranks train on the batches of rank 0, as one plain process does with these batches.

    With "auto", the loading rank warns of each loader whose first batches differ.
    """
    first, second = run_ranks(train, 2, how, workers)
    assert [first.pop("said"), second.pop("said")] == [warned, 0]
    assert differences(first, second, 0.0) == []
    trained = first["batches"][0]
    assert len(trained) == 8
    assert not np.array_equal(trained[0][0], trained[4][0])
    assert differences(train_alone(trained), first["weights"]) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"how": "each"}, "loaded different batches"),
        ({"how": "auto", "split": True}, "gives each of 2 processes another part .* run has 1 pipeline. Leave the"),
        ({"how": "one", "split": True}, "gives each of 2 processes another part"),
        ({"how": "one", "fails_at": 3}, "rank 0 loads the data of all ranks, and failed: OSError: the disk is gone"),
    ],
)
def test_invalid_arguments_are_refused(settings, said):
    with pytest.raises(RanksFailedError, match=said):
        run_ranks(partial(train, **settings), 2)


def test_tensor_parallel_ranks_are_several_pipelines():
    with pytest.raises(InputError, match="data='one' can't be combined with tensor_parallel=2"):
        PipelineStrategy(data="one", tensor_parallel=2)


def test_loops_have_their_data_before_anything_runs():
    trainer, module = make_trainer(strategy=PipelineStrategy(), devices=1, limit_train_batches=3), Lit()
    module.trainer = trainer
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, train_dataloaders=DataLoader(Unseeded(0), batch_size=4))
    trainer.fit_loop.setup_data()
    assert trainer.num_training_batches == 3
