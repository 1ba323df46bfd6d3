"""Tests of Lightning's callbacks that average weights.

Each rank averages its own layers, and checkpoints contain the whole average.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as cb
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.setup.weight_callbacks import check_callbacks
from tests.trainer.lit import LitOutside, data, plain_values, quiet
from tests.trainers import make_trainer

STEPS = 3  # per epoch
KINDS: dict[str, Any] = {
    "ema": lambda: cb.EMAWeightAveraging(decay=0.5, use_buffers=False),
    "swa": lambda: cb.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
}


class LitNormed(LitOutside):
    """A module whose first stage has a layer with buffers that training changes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "ema":
            self.model[1] = nn.BatchNorm1d(6)


def train(path: Path, kind: str, strategy: Any, devices: int, resume: Path | None, rank: int) -> dict[str, Any]:
    """Train, save and validate with an averaging callback, and return the results."""
    quiet()
    pl.seed_everything(3 + rank, verbose=False)  # all ranks use the first rank's weights
    module = LitNormed(kind)
    epochs = 2 if resume is None else 4
    trainer = make_trainer(
        devices=devices, strategy=strategy, precision="64-true", max_epochs=epochs, callbacks=[KINDS[kind]()]
    )
    pl.seed_everything(5, verbose=False)
    batches = [DataLoader(data(), batch_size=8), DataLoader(data(13), batch_size=5)]
    trainer.fit(module, *batches, ckpt_path=resume)
    found = {"metrics": plain_values(dict(trainer.callback_metrics)), "state": plain_values(module.state_dict())}
    trainer.save_checkpoint(path)
    average = private.find_average(next(c for c in trainer.callbacks if isinstance(c, private.Averaging)))
    assert average is not None
    names = [f"module.{name}" if kind == "ema" else name for name, _ in module.named_parameters()]
    assert [name for name, _ in average.named_parameters() if name in names] == names
    assert all(isinstance(p, nn.Parameter) for p in average.parameters())
    found["validated"] = plain_values(trainer.validate(module, batches[1], verbose=False))
    return found


def train_all(folder: Path, strategy: Any, devices: int, rank: int) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        first = folder / f"{kind}-{devices}.ckpt"
        strategies = [PipelineStrategy(**strategy) if isinstance(strategy, dict) else strategy for _ in range(2)]
        found[kind] = train(first, kind, strategies[0], devices, None, rank)
        resumed = folder / f"{kind}-1.ckpt"  # the checkpoint of one process
        found[f"{kind}, resumed"] = train(
            folder / f"{kind}-{devices}-2.ckpt", kind, strategies[1], devices, resumed, rank
        )
    return found


def on_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    return train_all(folder, {"schedule": "1f1b", "microbatches": 1}, 2, rank)


def test_two_stages_average_and_resume_as_one_process(tmp_path):
    plain = train_all(tmp_path, "auto", 1, 0)
    for found in run_ranks(on_a_rank, 2, tmp_path):
        for case, values in plain.items():
            torch.testing.assert_close(found[case], values, rtol=1e-10, atol=1e-10, msg=lambda m, c=case: f"{c}: {m}")
    for kind in KINDS:
        for number in ("", "-2"):
            ours, one = (torch.load(tmp_path / f"{kind}-{n}{number}.ckpt", weights_only=False) for n in (2, 1))
            for key in ("state_dict", "current_model_state", "averaging_state"):
                if key in one:
                    torch.testing.assert_close(dict(ours[key]), dict(one[key]), rtol=1e-10, atol=1e-10)
            states = [next(v for k, v in c["callbacks"].items() if "Averag" in k) for c in (ours, one)]
            if kind == "swa":
                averages = [dict(state["average_model_state"]) for state in states]
                torch.testing.assert_close(*averages, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("setting", "way_out"),
    [
        ({"asynchronous_schedule": "pipedream"}, "use one that flushes"),
        ({"saves_parts": True}, "use checkpoint='full'"),
        ({"is_sharded": True}, "leave the shards out"),
    ],
)
def test_averages_that_no_rank_can_keep_are_refused(setting, way_out):
    allowed: dict[str, Any] = {"asynchronous_schedule": None, "saves_parts": False, "is_sharded": False, "stays": True}
    check_callbacks([cb.WeightAveraging()], pl.LightningModule(), **allowed)
    with pytest.raises(PipelineError, match=f"WeightAveraging can't .*{way_out}"):
        check_callbacks([cb.WeightAveraging()], pl.LightningModule(), **{**allowed, **setting})
    with nullcontext() if "saves_parts" in setting else pytest.raises(PipelineError, match="set requires_grad in"):
        check_callbacks([cb.BackboneFinetuning()], pl.LightningModule(), **{**allowed, **setting})
    pruning: dict[str, Any] = {"pruning_fn": "l1_unstructured", "use_global_unstructured": False}
    check_callbacks([cb.ModelPruning(**pruning)], pl.LightningModule(), **allowed)
    for others in (setting, {"stays": False}):
        with pytest.raises(PipelineError, match=r"ModelPruning can't prune weights .*or prune them after training"):
            check_callbacks([cb.ModelPruning(**pruning)], pl.LightningModule(), **{**allowed, **others})
    for argument, wish in {
        ("use_global_unstructured", True): "use_global_unstructured=False",
        ("pruning_fn", "random_unstructured"): "take an 'l1' or 'ln' function",
        ("resample_parameters", True): "resample_parameters=False",
        ("make_pruning_permanent", False): "make_pruning_permanent=True",
        ("prune_on_train_epoch_end", False): "prune_on_train_epoch_end=True",
    }.items():
        with pytest.raises(PipelineError, match=f"ModelPruning prunes each layer separately .*{wish}"):
            check_callbacks([cb.ModelPruning(**pruning | dict([argument]))], pl.LightningModule(), **allowed)
    normed: Any = nn.BatchNorm1d(1)
    with pytest.raises(PipelineError, match="Use WeightAveraging"):
        check_callbacks([cb.StochasticWeightAveraging(0.1)], normed, **allowed)
