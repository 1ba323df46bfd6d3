"""Tests for `lightning-pipes verify`."""

from __future__ import annotations

import os

import pytest

from lightning_pipes.testing.ranks import run_environment
from lightning_pipes.tune.cli import main

SCRIPT = """
import sys
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_pipes import PipelineStrategy

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        if "--mean" in sys.argv:
            x = x - x.mean(0)
        return self.layers(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    pl.seed_everything(1)
    strategy = PipelineStrategy(partition="parameters", microbatches=2)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=9, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8))
    print("steps", trainer.global_step)
"""


def test_verify_runs_a_script_as_it_is(tmp_path, capfd, monkeypatch):
    """Check that the command verifies an unchanged script, passes on its arguments, and finds a difference."""
    monkeypatch.setattr(os, "environ", run_environment("verify", tmp_path))  # Trainers of other tests leave LOCAL_RANK
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["verify", "--batches", "3", str(script), "--json", "key=value"]) == 0
    said = capfd.readouterr().out
    assert "PipelineStrategy(verify=3): equal to one process over 3 batches" in said
    assert "steps 3" in said
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(script), "--mean"])
    assert ended.value.code == 1
    assert "The first difference is in the input of layer 0" in capfd.readouterr().out


def test_verify_refuses_what_trains_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('nothing')")
    for words, error in (
        (["verify", str(script)], "did not train a batch"),
        (["verify", str(tmp_path / "none.py")], "there is no such script"),
        (["verify", "--batches", "none", str(script)], "--batches"),
    ):
        with pytest.raises(SystemExit, match=error):
            main(words)
