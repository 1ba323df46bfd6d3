"""Checkpoints are those of one process: they load and resume on any number of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import Case, Lit, LitHooked, LitOutside, LitTied, differences, plain_values, train, train_cases

STRATEGY = {"schedule": "1f1b", "microbatches": 4}


def continued(module: type[Lit], ranks: int, folder: Path, strategy: Any, **more: Any) -> dict[str, Any]:
    case = Case(module, strategy=strategy, **more)
    if strategy is None:
        return train(case, 1, folder)
    return run_ranks(train_cases, ranks, [case], ranks, str(folder))[0][0]


@pytest.mark.parametrize("module", [LitHooked, LitTied])
def test_resume_on_other_numbers_of_stages(module, tmp_path):
    """Plain, then 4 stages, then 2, then one rank, then plain again; one epoch each."""
    whole = train(Case(module, trainer={"max_epochs": 5}), 1, tmp_path / "whole")
    previous = None
    for epoch, (ranks, strategy) in enumerate([(1, None), (4, STRATEGY), (2, STRATEGY), (1, STRATEGY), (1, None)]):
        path = str(tmp_path / f"{epoch}.ckpt")
        more = {"trainer": {"max_epochs": epoch + 1}, "resume": previous, "save": path}
        found = continued(module, ranks, tmp_path / f"run {epoch}", strategy, **more)
        assert differences(found["outputs"], whole["outputs"][3 * epoch : 3 * epoch + 3]) == []
        assert differences(found["rates"], whole["rates"][3 * epoch : 3 * epoch + 3]) == []
        previous = path
    assert differences(found["weights"], whole["weights"]) == []


@pytest.mark.parametrize("module", [LitHooked, LitOutside])
def test_the_file_is_that_of_one_process(module, tmp_path):
    plain, spread = str(tmp_path / "plain.ckpt"), str(tmp_path / "spread.ckpt")
    for path, ranks, strategy in [(plain, 1, None), (spread, 4, STRATEGY)]:
        callbacks = [_Saver(path)]
        continued(module, ranks, tmp_path / "run", strategy, trainer={"callbacks": callbacks})
    a, b = (torch.load(path, weights_only=False) for path in (plain, spread))
    assert list(a) == list(b)
    assert list(a["state_dict"]) == list(b["state_dict"])
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "norms"):
        assert differences(plain_values(a.get(key)), plain_values(b.get(key))) == []
    assert a["loops"] == b["loops"]
    loaded = module.load_from_checkpoint(spread, weights_only=False)
    assert differences(plain_values(dict(loaded.state_dict())), plain_values(a["state_dict"]), 1e-6) == []


class _Saver(Callback):
    """Saves in the middle of training, when the optimizer has state."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)
