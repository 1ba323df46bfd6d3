"""Checks that modules written in unusual ways train, log and save as on one process."""

from __future__ import annotations

import copy
import pickle
from functools import cache, partial
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks
from tests.cases import selected_values
from tests.trainer.lit import WIDTH, Case, Lit, data, differences, plain_values, quiet, train, train_cases
from tests.trainers import make_trainer


class LitNoOptimizer(Lit):
    """A module that runs without an optimizer, for example to collect statistics."""

    def configure_optimizers(self) -> None:
        return None


class LitPartial(Lit):
    """A module whose evaluation steps are attributes instead of methods."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.validation_step = partial(self._evaluate, "val")
        self.test_step = partial(self._evaluate, "test")

    def _evaluate(self, prefix: str, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.log(f"{prefix}_sum", logits.sum(), reduce_fx="sum")
        self.seen.append(logits)


class LitLogsAtOnce(Lit):
    """A module whose hooks read values that they have just logged, and log values computed from them."""

    def on_validation_epoch_end(self) -> None:
        self.log("val_norm", torch.cat(self.seen).norm())
        self.seen.clear()
        self.log("twice", 2 * self.trainer.callback_metrics["val_norm"])

    def on_train_epoch_end(self) -> None:
        self.log("at_end", 3.0)
        self.log("found", self.trainer.callback_metrics["at_end"] + self.trainer.logged_metrics["at_end"])


class Dense(nn.ModuleDict):
    """A dict of layers with its own `forward`, as in the DenseNet of torchvision."""

    def __init__(self) -> None:
        super().__init__({name: nn.Linear(WIDTH, WIDTH) for name in ("a", "b")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.values():
            x = x + layer(x).tanh()
        return x


class LitDense(Lit):
    """A module with two such blocks among its layers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model.insert(0, Dense())
        self.model.insert(4, Dense())


class Peak(nn.Module):
    """A layer that divides by the largest value seen in training, which is kept in a buffer that checkpoints omit."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("peak", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x / (1 + self.peak)
        self.peak.copy_(torch.maximum(self.peak, x.detach().abs().max()))
        return x


class LitUnsaved(Lit):
    """A module whose first and last layers need buffers that are not saved to validate after training."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = nn.Sequential(Peak(), *self.model, Peak())


@cache
def in_a_pipeline() -> dict[type[Lit], tuple[dict[str, Any], ...]]:
    """Return the results of both ranks for each selected module. All modules share processes."""
    modules = selected_values(test_as_on_one_process, "module")
    cases = [Case(each, strategy={"microbatches": 3, "module": "model"}, evaluate=True) for each in modules]
    return dict(
        zip(modules, zip(*run_ranks(train_cases, 2, cases, 2, mkdtemp(), timeout=120), strict=True), strict=True)
    )


@pytest.mark.parametrize("module", [LitPartial, LitLogsAtOnce, LitDense, LitUnsaved])
def test_as_on_one_process(module, tmp_path):
    """Results, weights and metrics equal the results of one process."""
    plain = train(Case(module, evaluate=True), 1, tmp_path / "plain")
    for found in in_a_pipeline()[module]:
        for what in plain.keys() - {"rows", "gradients"}:
            assert differences(found[what], plain[what], at=what) == []


def collected(rank: int, path: str, strategy: dict[str, Any] | None, resume: str | None = None) -> Any:
    """Return the metrics and weights of a run without an optimizer, and save a checkpoint."""
    quiet()
    pl.seed_everything(3, verbose=False)
    trainer = make_trainer(
        devices=1 if strategy is None else 2,
        strategy="auto" if strategy is None else PipelineStrategy(**strategy),
        precision="64-true",
        max_epochs=2 if resume else 1,
    )
    module = LitNoOptimizer()
    trainer.fit(module, DataLoader(data(), 8), ckpt_path=resume, weights_only=False)
    trainer.save_checkpoint(path)
    return plain_values(dict(trainer.callback_metrics)), plain_values(dict(module.state_dict()))


def test_without_an_optimizer(tmp_path):
    """A run without an optimizer logs, saves and resumes as on one process, with whole and sharded checkpoints."""
    plain, paths = collected(0, str(tmp_path / "plain"), None), [str(tmp_path / name) for name in ("full", "sharded")]
    for path, form in zip(paths, ("full", "sharded"), strict=True):
        for found in run_ranks(collected, 2, path, {"checkpoint": form}, timeout=120):
            assert differences(found, plain) == []
    saved, wanted = (torch.load(path, weights_only=False) for path in (paths[0], str(tmp_path / "plain")))
    assert saved["optimizer_states"] == wanted["optimizer_states"]
    again = collected(0, str(tmp_path / "again"), None, paths[0])
    for path in paths:
        for found in run_ranks(collected, 2, str(tmp_path / "resumed"), {}, path, timeout=120):
            assert differences(found, again) == []


class Copying(Callback):
    """A callback that copies the module while its layers are distributed over ranks."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        copied = copy.deepcopy(module)
        local = dict(module.named_parameters())
        inside = dict(copied.named_parameters())
        assert copied is not module
        assert type(copied.model) is nn.Sequential
        assert all(torch.equal(inside[name], p) and inside[name] is not p for name, p in local.items() if not p.is_meta)
        averaged = AveragedModel(module)
        for copy_ in (copied, averaged.module):
            with pytest.raises(PipelineError, match=r"a copy of self.model.* holds this rank's layers only"):
                copy_(torch.zeros(1, WIDTH))
        with pytest.raises(PipelineError, match=r"self.model can't be pickled .*trainer.save_checkpoint"):
            pickle.dumps(module)
        self.found.append((list(inside), [name for name, p in local.items() if not p.is_meta]))


def copying(rank: int) -> list[Any]:
    """Return the parameter names of the copy, and of the parameters on this rank, for each batch."""
    found = Copying()
    with TemporaryDirectory() as folder:
        train(Case(strategy={}, trainer={"callbacks": [found]}), 2, folder)
    return found.found


def test_copies_of_a_spread_module_hold_the_layers_of_their_rank_and_say_so():
    """A copy of a distributed module has the layers of its rank only, and raises an error if it is called."""
    whole = [name for name, _ in Lit().named_parameters()]
    found = run_ranks(copying, 2, timeout=120)
    assert all(names == whole for of_rank in found for names, _ in of_rank)
    last, first = (of_rank[0][1] for of_rank in found)
    assert sorted([*first, *last]) == sorted(whole)
