"""Tests that checkpoints equal the checkpoints of one process and can be loaded on any number of stages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy, consolidate
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.checkpoint.saving import Saver
from lightning_pipes.trainer.checkpoint.sharded import ShardedCheckpoint
from lightning_pipes.trainer.checkpointing import CHECKPOINT_KEY
from tests.trainer.checkpoint.runs import OneRank
from tests.trainer.lit import (
    Case,
    Lit,
    LitHooked,
    LitOutside,
    LitTied,
    data,
    differences,
    plain_values,
    quiet,
    train,
    train_cases,
)
from tests.trainers import make_trainer

STRATEGY = {"schedule": "1f1b", "microbatches": 4}


def continued(module: type[Lit], ranks: int, folder: Path, strategy: Any, **more: Any) -> dict[str, Any]:
    """Train a case on a number of ranks, or in plain Lightning without a strategy."""
    case = Case(module, strategy=strategy, **more)
    if strategy is None:
        return train(case, 1, folder)
    return run_ranks(train_cases, ranks, [case], ranks, str(folder))[0][0]


@pytest.mark.parametrize("module", [LitHooked, pytest.param(LitTied, marks=pytest.mark.slow)])
def test_resume_on_other_numbers_of_stages(module, tmp_path):
    """Check a training that resumes after each epoch against an uninterrupted training in plain Lightning.

    The epochs run in plain Lightning, on 4 stages, on 2, on one rank, and in plain Lightning again.
    """
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
def test_file_equals_one_process(module, tmp_path):
    plain, spread = str(tmp_path / "plain.ckpt"), str(tmp_path / "spread.ckpt")
    for path, ranks, strategy in [(plain, 1, None), (spread, 4, STRATEGY)]:
        callbacks = [_Saver(path)]
        continued(module, ranks, tmp_path / "run", strategy, trainer={"callbacks": callbacks})
    a, b = (torch.load(path, weights_only=False) for path in (plain, spread))
    assert [*a, CHECKPOINT_KEY] == list(b)
    assert list(a["state_dict"]) == list(b["state_dict"])
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "norms"):
        assert differences(plain_values(a.get(key)), plain_values(b.get(key))) == []
    assert a["loops"] == b["loops"]
    loaded = module.load_from_checkpoint(spread, weights_only=False)
    assert differences(plain_values(dict(loaded.state_dict())), plain_values(a["state_dict"]), 1e-6) == []


class LitStateful(Lit):
    """A module whose optimizer state contains more than tensors, and which has a layer with extra state."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.counter = Counter()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Counting(self.parameters(), lr=0.1)


class Counter(torch.nn.Module):
    """A layer with extra state that is not a tensor."""

    loaded = "nothing"

    def get_extra_state(self) -> Any:
        return {"saved": "something"}

    def set_extra_state(self, state: Any) -> None:
        self.loaded = state["saved"]


class Counting(torch.optim.SGD):
    """An optimizer whose steps depend on a number in its state that is not a tensor."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state.setdefault(p, {"steps": 0, "mean": torch.zeros_like(p)})
                    state["steps"] += 1
                    state["mean"].add_(p.grad)
                    p.sub_(0.1 * state["mean"] / state["steps"])
        return loss


FORMS: list[dict[str, Any]] = [
    {"checkpoint": "sharded"},
    {"checkpoint": "full", "async_checkpoint": True},
    {"checkpoint": "sharded", "async_checkpoint": True},
]


@pytest.mark.parametrize("module", [LitHooked, pytest.param(LitTied, marks=pytest.mark.slow), LitStateful])
def test_resume_between_forms(module, tmp_path):
    """Check that training can resume from a checkpoint of any form, against an uninterrupted training.

    Its checkpoints are a folder on 3 stages, a file on 2, and a folder on 1. The last one is consolidated into a file,
    from which plain Lightning continues.
    """
    whole = train(Case(module, trainer={"max_epochs": 4}), 1, tmp_path / "whole")
    previous = None
    for epoch, (ranks, form) in enumerate(zip((3, 2, 1), (FORMS[2], FORMS[1], FORMS[0]), strict=True)):
        folder = tmp_path / f"{epoch}"
        saver = ModelCheckpoint(folder, "last", every_n_epochs=1, enable_version_counter=False)
        options = {"max_epochs": epoch + 1, "callbacks": [saver], "enable_checkpointing": True}
        found = continued(module, ranks, folder, {**STRATEGY, **form}, trainer=options, resume=previous)
        assert differences(found["outputs"], whole["outputs"][3 * epoch : 3 * epoch + 3]) == []
        previous = str(folder / "last.ckpt")
        assert (folder / "last.ckpt").is_dir() == (form["checkpoint"] == "sharded")
    consolidate(previous, tmp_path / "whole.ckpt")
    found = train(Case(module, trainer={"max_epochs": 4}, resume=str(tmp_path / "whole.ckpt")), 1, tmp_path / "plain")
    assert differences(found["weights"], whole["weights"]) == []
    loaded = module.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=False)
    assert list(loaded.state_dict()) == list(torch.load(tmp_path / "whole.ckpt", weights_only=False)["state_dict"])
    if module is LitStateful:
        assert loaded.counter.loaded == "something"


def kept(rank: int, folder: str) -> list[Any]:
    """For each form, return the files that `ModelCheckpoint` keeps, its best paths, and their validation results."""
    quiet()
    found = []
    for number, form in enumerate([{}, *FORMS]):
        pl.seed_everything(3, verbose=False)
        own = Path(folder) / str(number)
        savers = [
            ModelCheckpoint(own, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True),
            ModelCheckpoint(own / "weights", "{epoch}", save_weights_only=True),
        ]
        trainer = make_trainer(
            strategy=PipelineStrategy(**STRATEGY, **form), max_epochs=4, precision="64-true", callbacks=savers
        )
        validation = DataLoader(data(13), batch_size=5)
        trainer.fit(Lit().double(), DataLoader(data(), batch_size=8), validation)
        paths = [saver.best_model_path for saver in savers]
        results = [trainer.validate(Lit().double(), validation, p, verbose=False, weights_only=False) for p in paths]
        names = [sorted(os.listdir(path)) for path in (own, own / "weights")]
        found.append((names, [Path(path).name for path in paths], results))
    return found


def test_model_checkpoint_keeps_the_same_in_every_form(tmp_path):
    full, *others = run_ranks(kept, 2, str(tmp_path), timeout=60)[0]
    assert [len(names) for names in full[0]] == [4, 1]
    assert others == [full] * len(FORMS)


def test_path_that_is_not_a_sharded_checkpoint(tmp_path):
    with pytest.raises(PipelineError, match=r"is not a complete sharded checkpoint: it has no .metadata"):
        consolidate(tmp_path, tmp_path / "a.ckpt")
    with pytest.raises(PipelineError, match=r"there is no .*nothere.ckpt; name the folder"):
        consolidate(tmp_path / "nothere.ckpt", tmp_path / "a.ckpt")
    (tmp_path / "whole.ckpt").write_bytes(b"PK")
    with pytest.raises(PipelineError, match=r"whole.ckpt is a single file, as written with checkpoint='full'"):
        consolidate(tmp_path / "whole.ckpt", tmp_path / "a.ckpt")


def test_a_hook_edits_the_state_dict_of_a_folder(tmp_path, monkeypatch):
    """Check that `on_load_checkpoint` can change the state dict of a folder before tensors are read."""
    saved = {"a": torch.ones(2), "b": torch.zeros(3), "c": "text", "d": torch.ones(1)}
    saver = Saver(OneRank())  # type: ignore[arg-type]
    saver.save_parts({"state_dict": saved}, list(saved), tmp_path / "x", background=False)
    parts = ShardedCheckpoint(tmp_path / "x")
    state = parts.checkpoint(None)["state_dict"]
    state["new"] = state.pop("a")
    state["d"] = torch.zeros(1)
    del state["c"]
    monkeypatch.setattr(state, "_read", None)  # no tensor is read after this line
    assert list(state) == ["b", "d", "new"]
    assert "b" in state
    assert "c" not in state
    assert state["new"].tolist() == [1, 1]
    assert state["d"].tolist() == [0]
    assert state.get("a") is state.pop("c", None) is None
    assert list(parts.checkpoint(None)["state_dict"]) == list(saved)


class _Saver(Callback):
    """Saves a checkpoint at the end of the epoch, when the optimizer has state."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)
