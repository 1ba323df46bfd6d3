"""Tests that layers are measured under the conditions of the run, and that training is not affected by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_pipes import JobArray, PipelineStrategy
from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.testing.ranks import run_ranks, wait_until
from lightning_pipes.trainer.data import sample
from lightning_pipes.trainer.data.sample import example_batch
from lightning_pipes.trainer.plan import decider, layer_profiler
from tests.trainer.lit import differences, quiet
from tests.trainers import make_trainer
from tests.virtual_clock import VirtualClock

WIDTH = 6


class Numbers(Dataset[Any]):
    """A dataset that counts the samples taken from it, and reads from a file that stays open."""

    def __init__(self, folder: str, first: int = 0) -> None:
        path = Path(folder) / "numbers"
        path.write_bytes(bytes(range(first, first + 64)))
        self.file = path.open("rb", buffering=0)
        self.taken = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        self.taken += 1
        return torch.full((WIDTH,), 0.01 * index + 0.001 * self.taken + 0.1 * self.file.read(1)[0])


class Collate:
    """A collate function that returns another batch of the same samples in each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        return torch.stack(samples) + 0.1 * self.calls


class Packs(nn.Module):
    """Packs each sample as a sequence of one element."""

    def forward(self, x: torch.Tensor) -> PackedSequence:
        return pack_sequence([*x[:, None]])


class InPacked(nn.Module):
    """Applies a layer to the elements of packed sequences."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: PackedSequence) -> PackedSequence:
        return PackedSequence(self.layer(x.data), x.batch_sizes)


class Unpacks(nn.Module):
    def forward(self, x: PackedSequence) -> torch.Tensor:
        return pad_packed_sequence(x)[0][0]


class LitSeeing(pl.LightningModule):
    """Records the batches of its steps. Its layers work in place and return objects with tensors."""

    def __init__(self, data: tuple[Any, Any]) -> None:
        super().__init__()
        self.data = data
        inner = nn.ReLU(True), nn.Linear(WIDTH, WIDTH), nn.ReLU(True), nn.Linear(WIDTH, WIDTH)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Packs(), *map(InPacked, inner), Unpacks())
        self.seen: list[tuple[str, float]] = []

    def step(self, name: str, batch: torch.Tensor) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.seen.append((name, float(batch.double().sum())))
        return loss

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.step("train", batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.step("validate", batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data[0], batch_size=8, shuffle=True, collate_fn=Collate())

    def val_dataloader(self) -> Any:
        return DataLoader(self.data[1], batch_size=8, collate_fn=Collate())


def fitted(folder: str, devices: int, trainer: dict[str, Any]) -> dict[str, Any]:
    """Train and return the batches of steps, the counters of the data, and whether layers were measured."""
    quiet()
    pl.seed_everything(3, verbose=False)
    Path(folder, "val").mkdir(parents=True, exist_ok=True)
    train, val = Numbers(folder), Numbers(f"{folder}/val", 100)
    module = LitSeeing((train, val))
    settings: dict[str, Any] = {"strategy": PipelineStrategy(microbatches=1)} if devices > 1 else {}
    fit = make_trainer(devices=devices, max_epochs=2, num_sanity_val_steps=0, **settings, **trainer)
    fit.fit(module)
    return {
        "seen": module.seen,
        "weights": {name: value.numpy() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in fit.callback_metrics.items()},
        "data": (train.taken, train.file.tell(), val.taken),
        "profile": fit.strategy.decision.profile is not None if devices > 1 else None,
    }


TRAINERS: dict[str, dict[str, Any]] = {"all": {}, "overfit": {"overfit_batches": 1}}


def measured(rank: int, folder: str) -> dict[str, Any]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_profiler, "MIN_MEASURED_SECONDS", 0.0)
        for name, trainer in TRAINERS.items():
            decider._profiles.clear()
            found[name] = fitted(f"{folder}/{rank}/{name}", 2, trainer)
    return found


@cache
def runs() -> list[dict[str, Any]]:
    return run_ranks(measured, 2, mkdtemp(), timeout=120)


@pytest.mark.parametrize("name", TRAINERS)
def test_training_sees_the_same(name: str, tmp_path: Path) -> None:
    """Check that training and validation see the same data as in one process that measures nothing.

    This includes counters of the dataset and of its collate function, and the position in an open file.
    """
    alone = fitted(str(tmp_path), 1, TRAINERS[name])
    for found in runs():
        same = {"weights", "metrics", "data"}
        assert differences({k: found[name][k] for k in same}, {k: alone[k] for k in same}) == []
    last = runs()[0][name]["seen"]  # the steps of the last stage run to their end
    assert differences(last, alone["seen"]) == []


def test_layers_that_work_in_place_are_measured() -> None:
    assert all(found[name]["profile"] for found in runs() for name in TRAINERS)


class LitPartlyFrozen(pl.LightningModule):
    """Layers of which the first one is frozen, after a layer of the step that may be frozen too."""

    def __init__(self, trains_before: bool) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH).requires_grad_(trains_before)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH + n, WIDTH + n + 1) for n in range(4)))
        self.layers[0].requires_grad_(False)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layers(self.before(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def measured_gradients(rank: int) -> dict[bool, list[bool]]:
    """Return whether the gradient of the input was measured with each layer."""
    quiet()
    found: dict[bool, list[bool]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_profiler, "MIN_MEASURED_SECONDS", 0.0)
        real = layer_profiler.profile_layers
        for trains_before in (False, True):
            wanted = found[trains_before] = []

            def record(*args: Any, wanted: list[bool] = wanted, **settings: Any) -> ModelProfile:
                wanted.append({*settings["flags"].values()} == {(True,)})
                return real(*args, **settings)

            patch.setattr(layer_profiler, "profile_layers", record)
            loader = DataLoader(TensorDataset(torch.ones(8, WIDTH)), batch_size=4)
            fit = make_trainer(devices=2, max_epochs=1, strategy=PipelineStrategy("zero_bubble", microbatches=2))
            fit.fit(LitPartlyFrozen(trains_before), loader)
    return found


def test_gradients_of_inputs_are_measured_where_training_needs_them() -> None:
    for found in run_ranks(measured_gradients, 2, timeout=120):
        assert found == {False: [False, False, True, True], True: [True] * 4}


def test_a_file_that_a_sample_is_read_from_stays_where_it_is(tmp_path: Path) -> None:
    data = Numbers(str(tmp_path))
    collate = Collate()
    loader = DataLoader(data, batch_size=8, collate_fn=collate)
    first, again = example_batch(loader, 3), example_batch(loader, 3)
    assert first.shape == (3, WIDTH)
    assert torch.equal(first, again)
    assert (data.taken, data.file.tell(), collate.calls) == (0, 0, 0)


def test_rows_of_plain_tensors_are_copied_without_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> tuple[torch.Tensor, ...]:
            return tuple(2 * t for t in super().__getitem__(index))

    tensors = torch.randn(8, WIDTH), torch.arange(8)
    plain = Subset(TensorDataset(*tensors), [5, 2, 7, 1])
    expected = next(iter(DataLoader(plain, batch_size=3, num_workers=1, multiprocessing_context="fork")))
    state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(sample, "_load", lambda *_: "by another process")
        found = example_batch(DataLoader(plain, batch_size=4), 3)
        others = [
            DataLoader(Doubled(*tensors)),
            DataLoader(plain, collate_fn=len),
            DataLoader(plain, worker_init_fn=print),
        ]
        assert [example_batch(other, 3) for other in others] == ["by another process"] * 3
    assert all(map(torch.equal, found, expected))
    assert torch.equal(torch.get_rng_state(), state)
    found[0].zero_()
    assert tensors[0].all(), "the batch is no copy"


# ---- under the conditions of the run

TIME = VirtualClock()
TOGETHER = 12


class Slow(nn.Module):
    """A layer that takes some time on the virtual clock."""

    met: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.met()
        TIME.sleep(0.01)
        return self.linear(x)


class LitSlow(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Slow() for _ in range(6)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def meeting(rank: int, folder: Path) -> Callable[[], None]:
    """Return a function that makes the first forwards of layers wait for the same forward on the other rank."""
    forwards = iter(range(TOGETHER))

    def met() -> None:
        if (number := next(forwards, None)) is not None:
            (folder / f"{rank} {number}").touch()
            other = folder / f"{1 - rank} {number}"
            assert wait_until(other.exists, 120, 0.001), "the other rank does not measure meanwhile"

    return met


def slow(rank: int, wrong: bool, folder: Path) -> tuple[list[int], Any]:
    """Return the cut and the decision of a run, with a measured or a wrong profile.

    In the wrong profile, the first layer takes twenty times as long as in fact.
    """
    quiet()

    def profile(self: Any, pieces: int | None, split: bool) -> ModelProfile:
        def layer(n: int) -> LayerProfile:
            return LayerProfile(str(n), ((2, 0.2 if n == 0 else 0.01),), ((2, 0.0001),), output=((2, 48.0),))

        return ModelProfile(tuple(map(layer, range(6))))

    with pytest.MonkeyPatch.context() as patch:
        TIME.patch(patch)
        if wrong:
            patch.setattr(layer_profiler.LayerProfiler, "profile", profile)
        else:
            patch.setattr(Slow, "met", staticmethod(meeting(rank, folder)))
        module = LitSlow()
        trainer = make_trainer(strategy=PipelineStrategy(microbatches=4), max_steps=2)
        trainer.fit(module, DataLoader(torch.ones(8, WIDTH), batch_size=8))
    strategy = trainer.strategy
    assert isinstance(strategy, PipelineStrategy)
    return [span.start for span in strategy.decision.layers[1:]], strategy.decision


def test_all_ranks_measure_at_once(tmp_path: Path) -> None:
    for cut, decision in run_ranks(slow, 2, False, tmp_path, timeout=120):
        assert cut == [3]
        assert decision.rows == 8


def test_a_profile_that_a_trial_contradicts_is_corrected(tmp_path: Path) -> None:
    """Check that the cut changes after a trial. The wrong profile would let the second stage begin at layer 1."""
    for cut, decision in run_ranks(slow, 2, True, tmp_path, timeout=120):
        assert cut == [3]
        assert "A trial step with stages that begin at layers [1] took" in decision.why
        assert "The layer times were corrected" in decision.why


def measured_array(rank: int) -> list[tuple[Any, bool, int]]:
    """Run two siblings of an array and return their weights, whether they have a profile, and their threads."""
    quiet()
    found = []

    def sibling() -> tuple[Any, bool, int]:
        pl.seed_everything(3, verbose=False)
        module = LitSlow()
        trainer = make_trainer(strategy=PipelineStrategy("jap", microbatches=4), max_steps=2)
        trainer.fit(module, DataLoader(torch.ones(8, WIDTH), batch_size=8))
        strategy = trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        state = {name: value.numpy() for name, value in module.state_dict().items()}
        return state, strategy.decision.profile is not None, torch.get_num_threads()

    with pytest.MonkeyPatch.context() as patch:
        TIME.patch(patch)
        outcomes = [*JobArray(2).run([sibling, sibling])]
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.value is not None
        found.append(outcome.value)
    return found


def test_the_first_sibling_of_an_array_measures_for_all() -> None:
    """Check that both siblings have the profile of the first one, use one thread each, and get equal weights."""
    for (first, measured, threads), (second, also, other) in run_ranks(measured_array, 2, timeout=120):
        assert measured
        assert also
        assert threads == other == 1
        assert differences(first, second) == []


def test_devices_with_neighbours_while_layers_are_measured_do_not_count() -> None:
    """Check that measurements next to busy neighbors do not slow down the mean profile.

    Three of five processes took 2.5 times as long. One took 5 % longer, which may be chance and therefore counts.
    """
    one = ModelProfile(tuple(LayerProfile(str(n), ((1, 1.0 + n),), ((1, 2.0 + n),)) for n in range(3)))

    def slowed(factor: float) -> ModelProfile:
        return one.scaled([factor] * 3)

    found = decider.undisturbed_profile([slowed(2.5), slowed(2.5), slowed(2.5), one, slowed(1.05)])
    for layer, wanted in zip(found.layers, one.layers, strict=True):
        assert layer.forward[-1][1] == pytest.approx(1.01 * wanted.forward[-1][1])
        assert layer.backward[-1][1] == pytest.approx(1.01 * wanted.backward[-1][1])


def test_collective_call_keeps_the_error_of_this_rank():
    """Check that the error is chained to the original one, whose traceback shows the line of the user's code."""
    control: Any = SimpleNamespace(size=1, all_gather=lambda value: [value])
    with pytest.raises(layer_profiler.NotMeasuredError, match=r"^ZeroDivisionError: ") as caught:
        layer_profiler.CollectiveCall(control)(lambda: 1 // 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
