"""Schedules by which stages of units run: the weights of one process, or of one that is as late."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import WIDTH, Lit, data, differences, plain_values, quiet
from tests.trainer.loop.streamed import Streamed, stale
from tests.trainer.loop.streamed import fit as fit_streamed
from tests.trainers import make_trainer

FLUSHING: list[tuple[str, dict[str, Any]]] = [
    ("zero_bubble", {"extra": [1]}),
    ("ready", {"slack": 1, "split": True}),
    ("interleaved", {}),
    ("hanayo", {}),
    ("deep", {}),
    ("per_link", {}),
    ("jap", {}),
    ("umpipe", {}),
    ("um1f1b", {}),
    ("csp", {}),
]
LATE = {
    "pipedream": (Streamed("pipedream", 2, 2, {"max_steps": 11}), 11, {9, 11}),
    "pipedream_2bw": (Streamed("pipedream_2bw", 2, 2, {"max_epochs": 1, "accumulate_grad_batches": 3}), 9, {9}),
}


class Prepares(Lit):
    """A step that changes its batch in place, counts, skips over a stage, and normalises in a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.steps += 1
        x.mul_(2).add_(batch_idx)
        skip = self.model[0](x)
        h, _ = self.recurrent(skip.unsqueeze(1))
        for layer in self.model[1:-1]:
            h = layer(h)
        loss = F.cross_entropy(self.model[-1](h.squeeze(1) + skip), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("prepared", batch[0].sum())


class Recomputes(Lit):
    """Layers that run once more in backward, with the weights that forward has read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, layer in enumerate(self.model):
            x = layer(x) if n in (3, 4) else checkpoint(layer, x, use_reentrant=False)
        return x


def fit(strategy: Any, devices: int, module: type[Lit] = Prepares) -> Any:
    torch.manual_seed(0)
    made = module().double()
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(made, DataLoader(data(), batch_size=8), DataLoader(data(5), batch_size=5))
    return plain_values({**made.state_dict(), **trainer.callback_metrics}), made.steps


def fit_all(rank: int) -> list[Any]:
    quiet()
    options: dict[str, Any] = {"microbatches": 4, "module": "", "partition": "parameters", "loss": "microbatch"}
    return [fit(PipelineStrategy(name, schedule_args=args, **options), 2) for name, args in FLUSHING]


def fit_late(rank: int, folder: str) -> list[Any]:
    found = []
    for name, (case, *_) in LATE.items():
        pl.seed_everything(3, verbose=False)  # as `stale` does
        found.append(fit_streamed(case, f"{folder}/{name}", module=Recomputes(), partition=["model.4"]))
    return found


class Names(Prepares):
    def layers_of_batch(self, batch: Any) -> list[str]:
        return ["0"]


REFUSED: list[tuple[dict[str, Any], type[Lit], str]] = [
    ({"schedule": "dynpipe"}, Prepares, "schedule 'dynpipe', which moves layers ('pipedream' does"),
    ({"schedule": "csp"}, Names, "layers_of_batch with schedule 'csp', for units are not"),
    ({"schedule": "umpipe", "schedule_args": {"forward": (2, 4)}}, Prepares, "'umpipe' is to cut a batch into"),
    ({"schedule": "hanayo", "loss": "batch"}, Prepares, "schedule 'hanayo' has several stages on a rank"),
]


def refuse(rank: int) -> list[str]:
    found = []
    for settings, module, _ in REFUSED:
        with pytest.raises((PipelineError, PlanError)) as error:
            fit(PipelineStrategy(**settings, module=""), 2, module)
        found.append(str(error.value))
    return found


def test_orders_of_one_batch_are_one_process() -> None:
    expected, steps = fit("auto", 1)
    for rank, found in enumerate(run_ranks(fit_all, 2, timeout=120)):
        for (name, _), (values, counted) in zip(FLUSHING, found, strict=True):
            assert differences(expected, values, 1e-10, f"{name}, rank {rank}") == []
            assert counted == steps or name == "csp"  # which counts micro-batches, for batches may overlap


def test_late_weights_are_those_of_one_process_that_is_as_late(tmp_path: Any) -> None:
    for found in run_ranks(fit_late, 2, str(tmp_path), timeout=120):
        for (name, (case, batches, flushes)), values in zip(LATE.items(), found, strict=True):
            expected = stale(case, batches, flushes)
            for what in ("weights", "rates", "steps"):
                assert differences(expected[what], values[what], 1e-10, f"{name}, {what}") == []


def test_what_units_can_not_have_is_refused_by_name() -> None:
    for found in run_ranks(refuse, 2, timeout=120):
        for (_, _, part), text in zip(REFUSED, found, strict=True):
            assert part in text
