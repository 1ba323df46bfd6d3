"""Tests for `lightning-pipes consolidate`, which writes the weights of a checkpoint for other libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_pipes.tune.cli import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weights = {f"net.{name}": value for name, value in nn.Linear(2, 3).state_dict().items()}
    torch.save({"state_dict": weights, "epoch": 1}, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def test_safetensors_below_a_prefix(checkpoint, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["consolidate", str(checkpoint), str(out), "--format", "safetensors", "--prefix", "net"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    expected = torch.load(checkpoint)["state_dict"]
    found = load_file(out / "model.safetensors")
    assert set(found) == {"weight", "bias"}
    assert all(torch.equal(value, expected[f"net.{name}"]) for name, value in found.items())


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--format", "onnx"], "--format is one of lightning and safetensors, not 'onnx'"),
        (["--prefix", "net"], "--prefix and --model belong to --format safetensors"),
        (["--format", "safetensors", "--model", "nowhere"], "nowhere"),
    ],
)
def test_mistakes(flags, text, checkpoint, tmp_path):
    with pytest.raises(SystemExit, match=text):
        main(["consolidate", str(checkpoint), str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()
