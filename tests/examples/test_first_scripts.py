"""Run scripts from Lightning's documentation in which only the strategy is changed."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import differences, plain_values, quiet

SCRIPTS = Path(__file__).parent / "scripts"


def run(rank: int, script: str, options: str, dropout: bool, folder: str) -> dict[str, Any]:
    """Return the results of the script with `options` added to its Trainer.

    The weights start from random numbers that depend on the rank.
    """
    quiet()
    os.chdir(folder)
    torch.manual_seed(rank)
    torch.set_default_dtype(torch.float64)
    text = (SCRIPTS / script).read_text()
    changed = text.replace("L.Trainer(", f'L.Trainer(accelerator="cpu", {options}, ')
    assert changed != text
    path = Path(folder) / f"rank{rank}.py"
    path.write_text(f"from lightning_pipes import PipelineStrategy\n{changed}")
    with pytest.MonkeyPatch.context() as patch:
        if not dropout:
            switch_dropout_off(patch)
        names = runpy.run_path(str(path), run_name="__main__")
    return {
        "weights": plain_values(dict(names["model"].state_dict())),
        "metrics": plain_values(dict(names["trainer"].callback_metrics)),
        "steps": names["trainer"].global_step,
    }


def switch_dropout_off(patch: pytest.MonkeyPatch) -> None:
    attention = nn.functional.scaled_dot_product_attention
    patch.setattr(nn.functional, "dropout", lambda x, *args, **kwargs: x)
    patch.setattr(
        nn.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, mask=None, dropout_p=0.0, is_causal=False: attention(q, k, v, mask, 0.0, is_causal),
    )


@pytest.mark.parametrize(
    ("script", "dropout"), [("autoencoder.py", False), ("transformer.py", False), ("transformer.py", True)]
)
def test_script(script: str, dropout: bool, tmp_path: Path) -> None:
    """Compare with one process; with dropout, compare with a pipeline of one stage, which draws the same masks."""
    pipeline = 'strategy=PipelineStrategy("1f1b", microbatches=2)' if dropout else 'strategy="pipeline_1f1b"'
    alone = f"devices=1, {pipeline}" if dropout else "devices=1"
    (expected,) = run_ranks(run, 1, script, alone, dropout, str(tmp_path))
    ranks = run_ranks(run, 2, script, f"devices=2, {pipeline}", dropout, str(tmp_path))
    assert expected["steps"] > 3
    for found in ranks:
        assert differences(found, expected) == []
