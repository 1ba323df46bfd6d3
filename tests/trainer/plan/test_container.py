"""Tests of the choice of the container to cut: the one that does most of the work, measured in time if possible."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.cuts.layers.pipelined import find_pipelined
from lightning_pipes.trainer.plan.container import ContainerTimer, warn_about_outside
from lightning_pipes.trainer.setup import prepare
from tests.trainer.lit import differences, quiet
from tests.trainers import make_trainer
from tests.virtual_clock import VirtualClock

WIDTH = 6


TIME = VirtualClock()


class Slow(nn.Module):
    """A layer that takes a given time on the virtual clock, independent of the machine."""

    def __init__(self, seconds: float, width: int = WIDTH) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(WIDTH, width)
        self.back = nn.Linear(width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TIME.sleep(self.seconds)
        return self.back(self.linear(x))


class Loop(nn.Module):
    """A module with layers that are called in a loop, and with larger layers that are called in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Slow(0.01) for _ in range(4))
        self.backwards = nn.ModuleList(Slow(0.03, 200) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.backwards):
            x = layer(x)
        for layer in self.layer:
            x = layer(x)
        return x


class LitHeads(pl.LightningModule):
    """A module whose child, the largest container that runs in order, takes almost no time."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = Loop()
        self.head = nn.Sequential(nn.Linear(WIDTH, 50), nn.Dropout(0.2), nn.Linear(50, WIDTH))
        self.steps = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        loss = self.head(self.bert(batch)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trainer(devices: int, **settings: Any) -> pl.Trainer:
    return make_trainer(devices=devices, max_epochs=settings.pop("max_epochs", 1), **settings)


def data() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.arange(48.0).reshape(8, WIDTH) / 48, batch_size=4)


CONTAINER: dict[str, Any] = {"partition": "parameters", "microbatches": 1}


def keep_container() -> None:
    """Make the strategy cut a container, as if a setting did not work with units.

    Otherwise, units would be cut, because most operations are outside of the container.
    """
    pytest.MonkeyPatch().setattr(prepare, "find_refused", lambda context: ["a setting"])


def chosen(rank: int, folder: str) -> dict[str, Any]:
    """Train and return the container that was cut, the weights, the number of steps, and the warnings."""
    quiet()
    TIME.patch(pytest.MonkeyPatch())
    keep_container()
    pl.seed_everything(3, verbose=False)
    module = LitHeads()
    fit = trainer(2, strategy=PipelineStrategy(**CONTAINER))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit.fit(module, data())
    fit.save_checkpoint(f"{folder}/last.ckpt")
    path = torch.load(f"{folder}/last.ckpt", weights_only=False)["lightning_pipes"]["module"]
    weights = {name: value.numpy() for name, value in module.state_dict().items()}
    return {"path": path, "weights": weights, "steps": module.steps, "said": [str(w.message) for w in said]}


@cache
def runs() -> list[dict[str, Any]]:
    return run_ranks(chosen, 2, mkdtemp(), timeout=120)


def test_by_time() -> None:
    """Check that neither the largest container, which runs in reverse order, nor the module's child is cut."""
    assert [found["path"] for found in runs()] == ["bert.layer"] * 2
    module = LitHeads()
    assert find_pipelined(module, None) == "bert.backwards"  # only the numbers of parameters are known
    assert find_pipelined(module, None, {"head": 0.001, "bert.layer": 0.04}) == "bert.layer"
    assert find_pipelined(module, None, {"head": 0.03, "bert.layer": 0.04}) == "head"  # the difference may be chance
    assert find_pipelined(module, None, {"bert.layer": 0.04}) == "bert.layer"


def test_work_outside_of_the_container_is_reported() -> None:
    """Check the warning about work outside of the container.

    The share is a share of parameters, because the layers outside are not measured.
    """
    first, second = (found["said"] for found in runs())
    (text,) = [line for line in first if "of the parameters, embeddings aside, is in the layers of self" in line]
    assert "PipelineStrategy(module=...), such as 'bert.backwards' or 'head'" in text
    assert (
        "all layers that run one after another into one nn.Sequential, for example nn.Sequential(*self.bert.layer, *"
        in text
    )
    assert not any("of the parameters" in line for line in second)


def test_training_sees_nothing_of_it() -> None:
    """Check that measuring leaves no trace in training.

    Steps are counted for two batches only, and a layer that one rank holds has equal weights on all ranks.
    """
    first, second = runs()
    assert [found["steps"] for found in runs()] == [2, 2]
    assert differences(first["weights"], second["weights"]) == []


def resumed(rank: int, path: str) -> list[str]:
    """Return the containers that a run and its resumed run cut.

    `train_dataloader` is called late in the resumed run, so that nothing can be measured.
    """
    quiet()
    TIME.patch(pytest.MonkeyPatch())
    keep_container()

    class WithData(LitHeads):
        def train_dataloader(self) -> Any:
            return data()

    first = trainer(2, strategy=PipelineStrategy(**CONTAINER))
    first.fit(WithData())
    first.save_checkpoint(path)
    second = trainer(2, strategy=PipelineStrategy(**CONTAINER), max_epochs=2)
    second.fit(WithData(), ckpt_path=path)
    second.save_checkpoint(f"{path}.second")
    return [torch.load(p, weights_only=False)["lightning_pipes"]["module"] for p in (path, f"{path}.second")]


def test_resumed_run_has_the_same_cut(tmp_path: Path) -> None:
    for found in run_ranks(resumed, 2, str(tmp_path / "last.ckpt"), timeout=120):
        assert found == ["bert.layer"] * 2


class TestByParameters:
    def module(self, **parts: nn.Module) -> pl.LightningModule:
        module = pl.LightningModule()
        for name, part in parts.items():
            setattr(module, name, part)
        return module

    def test_small_head_next_to_a_large_model(self) -> None:
        head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        bert = nn.Module()
        bert.encoder = nn.Module()
        bert.encoder.layer = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        assert find_pipelined(self.module(head=head, bert=bert), None) == "bert.encoder.layer"

    def test_embeddings_do_not_count_as_work(self) -> None:
        tables = nn.Sequential(nn.Embedding(5000, 8), nn.Linear(8, 8))
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        assert find_pipelined(self.module(tables=tables, layers=layers), None) == "layers"

    def test_lists_of_lists_are_not_candidates(self) -> None:
        pairs = nn.ModuleList(nn.ModuleList(nn.Linear(40, 40) for _ in range(n)) for n in (2, 6))
        assert find_pipelined(self.module(pairs=pairs), None) == "pairs.1"


@pytest.mark.parametrize(("outside", "said"), [(0.3, True), (0.1, False)])
def test_the_share_of_time(outside: float, said: bool) -> None:
    """Check that the warning appears only if most of the measured time is spent outside of the container."""
    layers = tuple(LayerProfile(str(n), ((2, 0.1),), ((2, 0.1),)) for n in range(2))
    ends = [LayerProfile("end", ((2, outside),), ((2, outside),)) for _ in range(2)]
    module = LitHeads()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_about_outside(module, "head", ModelProfile(layers, *ends))
    assert [("Only 25% of the time of a step" in str(w.message)) for w in found] == [True] * said


def test_layers_in_order() -> None:
    """Check that layers count as called in order only if each is called once and in order."""
    layers = [nn.Linear(2, 2) for _ in range(3)]
    x = torch.ones(1, 2)
    found = []
    for order in ([0, 1, 2], [2, 1, 0], [0, 1], [0, 1, 2, 0, 1, 2]):
        clock = ContainerTimer("", layers, torch.device("cpu"))
        with clock.time_step():
            for n in order:
                layers[n](x)
        found.append(clock.in_order)
    assert found == [True, False, False, False]


def test_pauses_of_a_busy_machine_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the time of a container has no pause that comes at different layers in different steps."""
    now, took = 0.0, 0.0

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal now
            now += took
            return x

    monkeypatch.setattr("lightning_pipes.trainer.plan.container.read_seconds", lambda: now)
    layers = [Layer(), Layer()]
    timer = ContainerTimer("", layers, torch.device("cpu"))
    for durations in ([100.0, 1.0], [2.0, 100.0]):
        with timer.time_step():
            for layer, took in zip(layers, durations, strict=True):  # noqa: B007 - read in forward
                layer(torch.ones(1))
    assert timer.least == 3.0
