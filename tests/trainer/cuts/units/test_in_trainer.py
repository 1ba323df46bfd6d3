"""Tests of the plain modules of the zoo through `Trainer` on two processes, against plain Lightning on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PlanError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.setup import prepare
from tests.cases import selected_values
from tests.trainer.cuts.units.lit_zoo import ALL, draws, read_result, settings_of, train_many, train_zoo
from tests.trainer.lit import WIDTH, Lit, data, differences, plain_values, quiet
from tests.trainer.refused import BareExcept, OwnForward, Penalty, Twice
from tests.trainers import make_trainer

ALIKE = [
    *("nine linears", "multi-task heads", "cell in a time loop", "tied by functions", "dense skips in a dataclass"),
    *("autograd.Function and complex numbers", "experts by hand", "resnet by hand", ".item() control flow"),
    *("graph network", "llama padded", "clip", "mixtral router loss"),
]
DRAWING = ["lstm and gru", "nn.Transformer", "train mode mix", "gan with one backward", "t5"]
DRAWING += ["bart layerdrop", "wav2vec2 layerdrop"]  # in a step, these may leave out layers that are in the record
"""Cases that draw random numbers, which plain Lightning draws from a single stream."""
PARTS = ("losses", "val", "weights", "saved", "optimizer")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of both ranks for each case."""
    folder = str(tmp_path_factory.mktemp("two"))
    drawing = selected_values(test_random_numbers_do_not_depend_on_the_borders, "name")
    names = dict.fromkeys(["nine linears", *selected_values(test_two_stages_are_one_process, "name"), *drawing])
    ranks = run_ranks(train_many, 2, [(name, settings_of(name)) for name in names], 2, folder, timeout=300)
    return [dict(zip(names, map(read_result, found), strict=True)) for found in ranks]


def compare(found: list[dict[str, Any]], name: str, expected: dict[str, Any]) -> None:
    for rank, of_rank in enumerate(found):
        for part in PARTS if rank == 0 else PARTS[:3]:
            assert differences(expected[part], of_rank[name][part], 1e-10, f"{name}, rank {rank}, {part}") == []


@pytest.mark.parametrize("name", ALIKE)
def test_two_stages_are_one_process(name: str, trained: list[dict[str, Any]], tmp_path: Path) -> None:
    compare(trained, name, train_zoo(name, 0, str(tmp_path)))


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of a pipeline of one rank for each case."""
    folder = str(tmp_path_factory.mktemp("one"))
    names = selected_values(test_random_numbers_do_not_depend_on_the_borders, "name")
    (paths,) = run_ranks(train_many, 1, [(name, settings_of(name)) for name in names], 1, folder, timeout=300)
    return dict(zip(names, map(read_result, paths), strict=True))


@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_do_not_depend_on_the_borders(
    name: str, trained: list[dict[str, Any]], trained_alone: dict[str, Any]
) -> None:
    compare(trained, name, trained_alone[name])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_models_are_one_process(ranks: int, tmp_path: Path) -> None:
    cases = [(name, settings_of(name)) for name in ALL]
    of_ranks = run_ranks(train_many, ranks, cases, ranks, str(tmp_path), timeout=1800)
    (alone,) = run_ranks(train_many, 1, [case for case in cases if draws(case[0])], 1, str(tmp_path), timeout=1800)
    same = dict(zip([name for name in ALL if draws(name)], map(read_result, alone), strict=True))
    for number, name in enumerate(ALL):
        found = [{name: read_result(of_rank[number])} for of_rank in of_ranks]
        compare(found, name, same[name] if name in same else train_zoo(name, 0, str(tmp_path)))


def test_stages_have_their_own_weights_only(trained: list[dict[str, Any]]) -> None:
    first, last = (found["nine linears"]["here"] for found in reversed(trained))
    assert set(first) & set(last) == set()
    assert {name.split(".")[1] for name in first} == {f"fc{n}" for n in range(1, len(first) // 2 + 1)}
    assert len(first) + len(last) == 18


def refused(rank: int, folder: str) -> list[str]:
    """Return the errors for invalid partitions."""
    texts = []
    for places in (["net.fc99"], ["net.fc2", "net.fc3"]):
        with pytest.raises(PlanError) as error:
            train_zoo("nine linears", 2, folder, partition=places, microbatches=2)
        texts.append(str(error.value))
    return texts


def test_stages_begin_at_modules_that_partition_names(tmp_path: Path) -> None:
    cases = [("nine linears", {"partition": ["net.fc3"], "microbatches": 2})]
    found = run_ranks(train_many, 2, cases, 2, str(tmp_path), timeout=120)
    ranks = [{"nine linears": read_result(of_rank)} for (of_rank,) in found]
    compare(ranks, "nine linears", train_zoo("nine linears", 0, str(tmp_path)))
    assert {name.split(".")[1] for name in ranks[1]["nine linears"]["here"]} == {"fc1", "fc2"}


def test_partitions_that_can_not_be_had(tmp_path: Path) -> None:
    for unknown, number in run_ranks(refused, 2, str(tmp_path), timeout=120):
        assert "partition names 'net.fc99', which the step does not call. Did you mean 'net.fc" in unknown
        assert "makes 3 stages, and the run has 2. Name 1 module, at which" in number


class Between(Lit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [self.model[n] for n in range(len(self.model))]:
            x = layer(x).tanh()
        return x


class Stream(IterableDataset[Any]):
    """Samples without a known length. The first batch is None."""

    def __init__(self) -> None:
        self._collated = 0

    def __iter__(self) -> Iterator[Any]:
        return iter(data())

    def collate(self, samples: list[Any]) -> Any:
        self._collated += 1
        return default_collate(samples) if self._collated > 1 else None


class OwnLoader:
    """An iterable of batches that is not a DataLoader."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(DataLoader(data(), batch_size=8))


def train_own_loader(rank: int, devices: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module, loader = Between().double(), OwnLoader()
    strategy: Any = PipelineStrategy(module="", microbatches=2) if devices > 1 else "auto"
    make_trainer(devices=devices, strategy=strategy, max_epochs=2).fit(module, loader)
    return {"passes": loader.passes, "weights": plain_values(module.state_dict())}


def train_stream(rank: int, devices: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module, stream = Between().double(), Stream()
    strategy: Any = PipelineStrategy(module="", microbatches=2) if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(module, DataLoader(stream, batch_size=8, collate_fn=stream.collate))
    return {"steps": trainer.global_step, "weights": plain_values(module.state_dict())}


def test_a_stream_is_cut_by_units() -> None:
    alone = train_stream(0, 1)
    assert alone["steps"] == 5
    for found in run_ranks(train_stream, 2, 2):
        assert differences(alone, found) == []


def test_iterable_that_is_not_a_data_loader_is_cut_by_units() -> None:
    alone = train_own_loader(0, 1)
    assert alone["passes"]
    for found in run_ranks(train_own_loader, 2, 2):
        assert differences(alone, found) == []


class Around(Lit):
    """A module with 162 multiplications per sample in its layers, and 768 in two modules around them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 64), nn.Linear(64, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(self.narrow(self.wide(x)))


class LargeHead(Lit):
    """A module with most multiplications in one module after the layers, which no cut can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(x))


def train_misused(rank: int, devices: int) -> list[tuple[dict[str, Any], list[str]]]:
    """Train modules that should be cut by units, and one that should not. Return the weights and log lines of each."""
    quiet()
    found = []
    for kind in (Twice, Penalty, OwnForward, BareExcept, Between, Around, LargeHead):
        torch.manual_seed(0)
        module, said = kind().double(), []
        strategy = PipelineStrategy("kfkb", microbatches=2) if devices else "auto"
        trainer = make_trainer(devices=devices or 1, strategy=strategy, max_epochs=2, precision="64-true")
        with mock.patch.object(prepare, "rank_zero_info", said.append):
            trainer.fit(module, DataLoader(data(), batch_size=8), DataLoader(data(5), batch_size=5))
        found.append((plain_values(module.state_dict()), [text for text in said if "cut by units" in text]))
    return found


def test_units_are_chosen_where_a_step_misuses_its_container_or_works_around_it() -> None:
    alone, ranks = train_misused(0, 0), run_ranks(train_misused, 2, 2, timeout=120)
    for found in ranks:
        for (expected, _), (weights, _) in zip(alone, found, strict=True):
            assert differences(expected, weights, 1e-10, "weights") == []
    logs = [said for _, said in ranks[0]]
    assert [len(said) for said in logs] == [1, 1, 1, 1, 1, 1, 0]
    assert "Twice is cut by units, not in the layers of self.model: training_step calls" in logs[0][0]
    assert logs[5][0].endswith("not in the layers of self.model: only 17% of the operations of a step are in these")


class Drawing(pl.LightningModule):
    """Layers that draw random numbers, called at once or in a loop, between other code that does."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh()) for _ in range(5)]
        self.layers = nn.ModuleList(layers) if loop else nn.Sequential(*layers)
        self.drop = nn.Dropout(0.2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.drop(self.inlet(batch[0])) + 0.1 * torch.randn_like(batch[0])
        if isinstance(self.layers, nn.Sequential):
            x = self.layers(x)
        else:
            for layer in self.layers:
                x = layer(x)
        return nn.functional.cross_entropy(self.head(self.drop(self.drop(x))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


def fit_drawing(rank: int, devices: int) -> list[dict[str, Any]]:
    """Return the weights after training by layers and by units."""
    quiet()
    cuts: list[dict[str, Any]] = [{"module": "layers"}, {"module": "", "verify": 1}]
    if devices > 1:
        borders: list[Any] = [[2], [4], ["layers.2.1"], ["head"], "parameters"]
        cuts = [{"partition": [2], **cuts[0]}, *({**cuts[1], "partition": border} for border in borders)]
    found = []
    for loop in (False, True):
        for settings in cuts:
            module = Drawing(loop).double()
            strategy = PipelineStrategy("1f1b", microbatches=2, **settings)
            make_trainer(devices=devices, max_epochs=1, strategy=strategy).fit(module, DataLoader(data(), 8))
            found.append(plain_values(module.state_dict()))
    return found


def test_random_numbers_are_those_of_a_cut_in_layers_wherever_stages_begin() -> None:
    (alone,), two = run_ranks(fit_drawing, 1, 1, timeout=300), run_ranks(fit_drawing, 2, 2, timeout=300)
    for loop in (0, 1):
        expected = alone[2 * loop]
        others = [alone[2 * loop + 1], *(found for of_rank in two for found in of_rank[6 * loop : 6 * loop + 6])]
        for number, found in enumerate(others):
            assert differences(expected, found, 0.0, f"{'loop' if loop else 'call'}, run {number}") == []
