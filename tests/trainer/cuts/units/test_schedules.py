"""Tests of schedules with stages of units, compared with one process, whose weights may be equally late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PipelineError, PlanError, Span
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
    ("v", {"k": 2}),
    ("deep", {}),
    ("per_link", {}),
    ("jap", {}),
    ("umpipe", {}),
    ("um1f1b", {}),
    ("csp", {}),
]
UNEQUAL: list[tuple[str, dict[str, Any]]] = [
    ("umpipe", {"forward": (2, 4)}),
    ("umpipe", {"forward": (4, 2), "backward": (2, 4)}),
    ("um1f1b", {"forward": (2, 1)}),
    ("um1f1b", {"forward": (3, 5), "backward": (2, 8), "forward_links": (4,), "backward_links": (1,)}),
]
"""Schedules whose stages and links cut a batch into different numbers of micro-batches."""
LATE = {
    "pipedream": (Streamed("pipedream", 2, 2, {"max_steps": 11}), 11, {9, 11}),
    "pipedream_2bw": (Streamed("pipedream_2bw", 2, 2, {"max_epochs": 1, "accumulate_grad_batches": 3}), 9, {9}),
}


class Prepares(Lit):
    """A step that changes its batch in place, counts, skips over a stage, and calls a recurrent layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.steps += 1
        x.mul_(2).add_(batch_idx)
        skip = self.model[0](x)
        h = self.recurrent(skip.unsqueeze(1))[0].squeeze(1)
        for layer in self.model[1:-1]:
            h = layer(h)
        loss = F.cross_entropy(self.model[-1](h + skip), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("prepared", batch[0].sum())


class Axes(Prepares):
    """A step that holds values of many forms over the border.

    Samples are on axis 1, in two views, or in two entries for each sample. A mask and a product of weights have no
    samples, and as many rows as some micro-batches have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.linspace(0, 1, 16).view(4, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.steps += 1
        h = self.model[0](x)
        views, mask = torch.cat([h, 2 * h]), self.mask.tril()
        sequence = torch.stack([h, 3 * h, h.tanh(), h])
        entries = torch.stack([h, h.tanh()], 1).flatten(0, 1)
        placed = torch.zeros_like(x)
        placed[:] = h.sin()
        for layer in self.model[1:-1]:
            h = layer(h)
        one, two = views.chunk(2)
        h = h + one * two + (mask @ sequence.transpose(0, 1)).sum(1) + entries.view(len(x), 2, -1).prod(1) + placed
        loss = F.cross_entropy(self.model[-1](h + sequence.view(-1, WIDTH).view(4, -1, WIDTH).mean(0)), y)
        self.log("loss", loss)
        return loss


class Means(Prepares):
    """A step that holds a mean over samples over the border."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mean = self.model[0](batch[0]).mean()
        return super().training_step(batch, batch_idx) + mean


class Numbers(Prepares):
    """A step that reads a value of its samples in front of the border."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        total = self.model[0](batch[0]).sum().item()
        return super().training_step(batch, batch_idx) + total


class Draws(Prepares):
    """A step that draws random numbers on both sides of a border in front of the recurrent layer."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        one = torch.rand(len(batch[0]), 1).to(batch[0])
        h = self.recurrent((self.model[0](batch[0]) + one).unsqueeze(1))[0].squeeze(1)
        two = torch.rand(len(batch[0]), 1).to(batch[0])
        for layer in self.model[1:]:
            h = layer(h)
        self.log("repeated", (one == two).double().mean())
        return F.cross_entropy(h + two, batch[1])


class Recomputes(Lit):
    """A module whose layers run again in backward, with the weights that forward has used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, layer in enumerate(self.model):
            x = layer(x) if n in (3, 4) else checkpoint(layer, x, use_reentrant=False)
        return x


class Remembers(nn.Module):
    """Adds a mean of earlier samples, which is stored in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return x + self.mean.clone()


class Buffers(Prepares):
    """A module with buffers that move with their units."""

    def __init__(self) -> None:
        super().__init__()
        for n in (1, 5):
            self.model[n] = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(WIDTH), Remembers())


class Moves(pl.Callback):
    """Adopts another cut before each of the given batches."""

    def __init__(self, cuts: dict[int, int]) -> None:
        self.cuts = cuts

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        strategy, start = trainer.strategy, self.cuts.get(trainer.fit_loop.total_batch_idx + 1)
        if start is not None:
            plan = strategy.current_run.engine.plan
            layers = Span(0, start), Span(start, plan.layers[-1].stop)
            strategy.adopt(strategy.schedule, plan=replace(plan, layers=layers))


class Keeps(pl.Callback):
    """Records the layers of `model` whose weights this rank had in each batch."""

    def __init__(self) -> None:
        self.layers: list[set[int]] = []

    def on_train_batch_end(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        here = [name.split(".") for name, p in module.named_parameters() if not p.is_meta]
        self.layers.append({int(number) for owner, number, *_ in here if owner == "model"})


def fit(strategy: Any, devices: int, module: type[Lit] = Prepares, epochs: int = 1, callbacks: Any = ()) -> Any:
    """Train and return the weights and metrics, and the number of counted steps."""
    torch.manual_seed(0)
    made = module().double()
    trainer = make_trainer(
        devices=devices, strategy=strategy, max_epochs=epochs, num_sanity_val_steps=0, callbacks=[*callbacks]
    )
    trainer.fit(made, DataLoader(data(), batch_size=8), DataLoader(data(5), batch_size=5))
    return plain_values({**made.state_dict(), **trainer.callback_metrics}), made.steps


def fit_all(rank: int) -> list[Any]:
    quiet()
    options: dict[str, Any] = {"microbatches": 4, "module": "", "partition": "parameters", "loss": "microbatch"}
    found = [fit(PipelineStrategy(name, schedule_args=args, **options), 2) for name, args in FLUSHING]
    keeps = Keeps()
    fit(PipelineStrategy("1f1b", **options | {"partition": [2]}), 2, callbacks=[keeps])
    assert keeps.layers == [{0} if rank else {2, 4, 6, 8}] * len(keeps.layers)
    return found


def fit_unequal(rank: int) -> list[Any]:
    quiet()
    options: dict[str, Any] = {"module": "", "loss": "microbatch", "partition": ["model.4"]}
    given = [(name, args, module) for module in (Prepares, Axes) for name, args in UNEQUAL]
    found = [fit(PipelineStrategy(name, schedule_args=args, **options), 2, module) for name, args, module in given]
    recomputed = PipelineStrategy("umpipe", schedule_args={"forward": (2, 4)}, recompute=True, **options)
    found.append(fit(recomputed, 2, Axes))
    links = {"forward": (2, 2), "forward_links": (4,)}  # the stages have the same micro-batches
    drawing = PipelineStrategy("um1f1b", schedule_args=links, **options | {"partition": ["recurrent"]})
    assert fit(drawing, 2, Draws)[0]["repeated"] == 0
    return found


def fit_late(rank: int, folder: str) -> list[Any]:
    found = []
    for name, (case, *_) in LATE.items():
        pl.seed_everything(3, verbose=False)  # the same seed as in `stale`
        found.append(fit_streamed(case, f"{folder}/{name}", module=Recomputes(), partition=["model.4"]))
    return found


def fit_moving(rank: int, folder: str) -> tuple[list[Any], tuple[Any, list[set[int]]]]:
    """Return the results of trainings whose units move, and the layers of this rank in each batch."""
    quiet()
    found = []
    for way in ("blocking", "overlapped"):
        strategy = PipelineStrategy("1f1b", microbatches=1, module="", replan={"every": 99}, relocation=way)
        keeps = Keeps()
        values, _ = fit(strategy, 2, Buffers, 3, [keeps, Moves({2: 1, 3: 6, 5: 2, 8: 4})])
        found.append((values, keeps.layers))
    keeps = Keeps()
    case = Streamed("dynpipe", 2, 2, {"max_steps": 11}, lambda _: [keeps, Moves({4: 2, 9: 6})])
    return found, (fit_streamed(case, folder, partition=["model.4"]), keeps.layers)


class Names(Prepares):
    def layers_of_batch(self, batch: Any) -> list[str]:
        return ["0"]


UNEQUAL_CUT: dict[str, Any] = {"schedule": "umpipe", "schedule_args": {"forward": (2, 4)}, "partition": ["model.4"]}
REFUSED: list[tuple[dict[str, Any], type[Lit], str]] = [
    ({"replan": True, "loss": "batch"}, Prepares, "replan moves units"),
    ({"partition": [9]}, Prepares, "must have numbers from 1 to 8"),
    ({"schedule": "csp"}, Names, "recurrent.bias_hh_l0: several ranks train these parameters"),
    (UNEQUAL_CUT, Means, "sends a tensor of shape () from 'mean', which is called at"),
    (UNEQUAL_CUT, Numbers, "'item', which is called at"),
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
            assert counted == steps or name == "csp"  # csp counts micro-batches, because its batches may overlap


def test_unequal_micro_batches_are_one_process() -> None:
    expected = {module: fit("auto", 1, module) for module in (Prepares, Axes)}
    for rank, found in enumerate(run_ranks(fit_unequal, 2, timeout=200)):
        for n, (values, counted) in enumerate(found):
            whole, steps = expected[Prepares if n < len(UNEQUAL) else Axes]
            assert differences(whole, values, 1e-10, f"case {n}, rank {rank}") == []
            assert counted == steps


def test_late_weights_are_those_of_one_process_that_is_as_late(tmp_path: Any) -> None:
    for found in run_ranks(fit_late, 2, str(tmp_path), timeout=120):
        for (name, (case, batches, flushes)), values in zip(LATE.items(), found, strict=True):
            expected = stale(case, batches, flushes)
            for what in ("weights", "rates", "steps"):
                assert differences(expected[what], values[what], 1e-10, f"{name}, {what}") == []


def test_units_move_with_all_that_is_theirs(tmp_path: Any) -> None:
    expected, _ = fit("auto", 1, Buffers, 3)
    ranks = run_ranks(fit_moving, 2, str(tmp_path), timeout=120)
    _, (_, first) = ranks[1]  # the rank of the first stage
    late = stale(Streamed("pipedream", 2, 2), 11, {4, 9, 11}, first)
    for moved, (streamed, layers) in ranks:
        for of_batches in (layers, *(each for _, each in moved)):
            assert len({frozenset(each) for each in of_batches}) > 1, "units have moved"
        for values, _ in moved:
            assert differences(expected, values, 1e-10, "moved") == []
        for what in ("weights", "rates", "steps"):
            assert differences(late[what], streamed[what], 1e-10, what) == []


def test_features_that_units_do_not_support_are_refused_by_name() -> None:
    for found in run_ranks(refuse, 2, timeout=120):
        for (_, _, part), text in zip(REFUSED, found, strict=True):
            assert part in text
