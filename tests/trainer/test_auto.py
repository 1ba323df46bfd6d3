"""Tests of partition='auto', schedule='auto' and `strategy.adopt`.

They check the decisions, that all ranks make the same decision, and that the measurements do not affect the training.
"""

from __future__ import annotations

import math
import random
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.cost import Cluster, Deployment, Device, LayerProfile, ModelProfile
from lightning_pipes.cost.profile import MIN_ROWS_NOTE
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.engine.compute.rng import random_state
from lightning_pipes.ir import Kind, Plan, PlanError
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.data.sample import NoSampleError, batch_rows, example_batch, expected_batches
from lightning_pipes.trainer.plan import decider, layer_profiler, profile_planner
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.trial import Trials
from lightning_pipes.trainer.setup.prepare import explain_choice
from lightning_pipes.trainer.user.unchanged import keep_unchanged
from tests.trainer.lit import (
    WIDTH,
    Case,
    Lit,
    LitOutside,
    LitTied,
    as_predicted,
    data,
    differences,
    plain_values,
    quiet,
    train,
)
from tests.trainers import make_trainer

LAYERS = 9
EVEN_CUT = 4
"""The first layer of the second of two stages of Lit if it is partitioned by parameters."""


class Decided(Callback):
    """A callback that records the decision of the strategy."""

    found: Any = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.strategy = trainer.strategy
        self.found = self.strategy.decision


class LitNormed(LitOutside):
    """A module that cannot run on a single sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            raise ValueError("more than one sample is needed")
        return super().forward(x)


class LitBefore(Lit):
    """A module in which a measurement could leave traces.

    It has dropout, running averages, a metric, counters, and random numbers from three generators, and it records calls
    of its hooks.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(dropout=0.3, **kwargs)
        self.inlet = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.model.insert(4, nn.BatchNorm1d(WIDTH))
        self.steps = 0
        self.history: list[int] = []
        self.hooks: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.history.append(self.steps)
        x, y = batch
        noise = torch.rand(1).item() + random.random() + np.random.rand()
        loss = F.cross_entropy(self.model(self.inlet(x * (1 + 0.01 * noise))), y, reduction="none")
        self.mean(loss.detach())
        self.log("train_metric", self.mean, on_step=True, on_epoch=True)
        self.log("train_loss", loss.mean(), on_step=True)
        return loss.mean()

    def train_dataloader(self) -> Any:
        self.hooks.append("train_dataloader")
        g = torch.Generator().manual_seed(int(torch.randint(1000, ())))
        return DataLoader(data(), batch_size=8, shuffle=True, generator=g, drop_last=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.model(self.inlet(batch[0])), batch[1]))

    def on_validation_epoch_end(self) -> None:
        pass


def faked(seconds: list[float], rank: int) -> Any:
    """Return a replacement for a measurement of the layers.

    Forwards take the given seconds and backwards twice as long, for any number of samples. Rank 1 is three times as
    fast if the devices have different names.
    """
    factor = 1 / 3 if rank == 1 and decider._name_device(torch.device("cpu")) == "another" else 1.0
    seconds = [factor * s for s in seconds]

    def profile(self: Any, pieces: int | None, split: bool) -> ModelProfile:
        return ModelProfile(
            tuple(
                LayerProfile(
                    str(n),
                    ((1, s),),
                    ((1, 2 * s),),
                    input_backward=((1, s),),
                    weight_backward=((1, s),),
                    saved=((1, 2.0**20),),
                    output=((1, 64.0),),
                )
                for n, s in enumerate(seconds)
            )
        )

    return profile


def constant(value: Any, *_: Any) -> Any:
    """Return `value` for any further arguments."""
    return value


def one_slow(at: int, factor: float = 10.0) -> list[float]:
    """Return the seconds of all layers. Layer `at` takes `factor` times as long as the others."""
    return [0.1 * (factor if n == at else 1.0) for n in range(LAYERS)]


def trained(rank: int, cases: dict[str, tuple[Case, dict[str, Any]]], folder: str) -> dict[str, Any]:
    """Train all cases and return their results.

    A case contains a run and the values that functions of `decider` and `profile_planner` return instead of their own.
    A tuple has one value for each rank.
    """
    results = {}
    for name, (case, replaced) in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            decider._profiles.clear()
            for where, value in replaced.items():
                owner = decider if hasattr(decider, where) else profile_planner
                patch.setattr(owner, where, partial(constant, value[rank] if isinstance(value, tuple) else value))
            if name == "tiny":
                patch.setattr(
                    layer_profiler, "MIN_MEASURED_SECONDS", 600.0
                )  # a slow machine may need long for this case
            if case.trainer.get("seconds"):
                patch.setattr(layer_profiler.LayerProfiler, "profile", faked(case.trainer.pop("seconds"), rank))
                patch.setattr(Trials, "run", as_predicted)
            decided = Decided()
            case.trainer["callbacks"] = [*case.trainer.get("callbacks", []), decided]
            results[name] = train(case, 2, Path(folder) / name)
            results[name]["decision"] = decided.found
            report = decided.strategy.report
            results[name]["report"] = str(report), report.record
    return results


MOVED = {"strategy": {"microbatches": 4}}
SLOW_RANK = {"_name_device": ("one", "another")}  # one name per global rank
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "slow first": (Case(LitOutside, **MOVED, trainer={"seconds": one_slow(0)}), {}),
    "slow last": (Case(Lit, **MOVED, trainer={"seconds": one_slow(8)}), {}),
    "tied": (Case(LitTied, **MOVED, trainer={"seconds": [1.0, 0.1, 0.1, 0.1, 0.1]}), {}),
    "little to gain": (Case(Lit, **MOVED, trainer={"seconds": [0.1] * 4 + [0.101] * 5}), {}),
    "slow rank": (Case(Lit, **MOVED, trainer={"seconds": [0.1] * 9}), SLOW_RANK),
    "memory": (Case(Lit, **MOVED, trainer={"seconds": one_slow(8)}), {"device_memory": 25 * 2**20}),
    "auto": (Case(LitOutside, strategy={"schedule": "auto"}, trainer={"seconds": one_slow(0)}), {}),
    "auto recompute": (
        Case(Lit, strategy={"schedule": "auto", "microbatches": 8}, trainer={"seconds": one_slow(0)}),
        {"device_memory": 4 * 2**20 + 2**18},
    ),
    "stale": (
        Case(
            Lit,
            strategy={"schedule": "auto", "microbatches": 2, "stale_gradients": True},
            trainer={"seconds": one_slow(0)},
        ),
        {},
    ),
    "stale by name": (Case(Lit, strategy={"schedule": "pipedream", "microbatches": 2, "partition": [1]}), {}),
    "measured": (Case(LitOutside, strategy={"schedule": "auto"}), {}),
    "not one row": (Case(LitNormed, strategy={"schedule": "auto"}), {}),
    "tiny": (Case(Lit, **MOVED), {}),
    "endless": (Case(Lit, strategy={"schedule": "pipedream", "microbatches": 4}), {}),
    "parameters": (Case(Lit, strategy={"partition": "parameters"}), {}),
}


@cache
def runs() -> list[dict[str, Any]]:
    """Return the results of all cases on both ranks."""
    return run_ranks(trained, 2, CASES, mkdtemp(), timeout=240)


@cache
def decided(name: str) -> Any:
    """Return the decision of a case, after checking that it is the same on both ranks."""
    first, second = (found[name]["decision"] for found in runs())
    assert (first.layers, first.schedule, first.microbatches, first.why) == (
        second.layers,
        second.schedule,
        second.microbatches,
        second.why,
    )
    return first


def cuts(name: str) -> list[int]:
    """Return the first layer of each stage, without the first stage."""
    return [span.start for span in decided(name).layers[1:]]


def test_the_cut_moves_to_the_slow_layer() -> None:
    assert cuts("parameters") == [EVEN_CUT] == cuts("tiny") == cuts("little to gain")
    assert cuts("slow first") == [1]
    assert cuts("slow last") == [8]
    assert "for the cut by parameters" in decided("slow first").why


def test_a_slower_device_gets_fewer_layers() -> None:
    """The last stage, on global rank 0, gets at most three layers because rank 1 is three times as fast."""
    (cut,) = cuts("slow rank")
    assert 6 <= cut <= 8


def test_the_cut_keeps_within_memory() -> None:
    """The first stage gets six layers because it has memory for no more.

    A layer keeps 4 MiB for two micro-batches of two samples, and 25 MiB are available.
    """
    assert cuts("memory") == [6]


def test_where_little_is_gained_nothing_is_said_to_be_won() -> None:
    """If a measured cut gains little, or layers are not measured, the decision names the reason."""
    assert "cut by parameters is kept" in decided("little to gain").why
    assert "too little to balance" in decided("tiny").why
    assert decided("parameters").why == ""
    assert "does not flush" in decided("endless").why


def test_auto_takes_what_the_planner_takes() -> None:
    """'auto' selects a schedule that flushes, with a finite predicted time, and describes its choice."""
    made = decided("auto")
    assert made.schedule.name not in ("pipedream", "pipedream_2bw")
    assert made.seconds < math.inf
    assert made.schedule.name in made.why
    assert made.table.count("\n") > 5


def test_auto_takes_stale_gradients_where_they_are_allowed() -> None:
    """With `stale_gradients=True`, 'auto' selects 'pipedream' and trains bitwise like 'pipedream' selected by name."""
    made = decided("stale")
    assert (made.schedule.name, cuts("stale")) == ("pipedream", [1])
    assert "stale gradients (x 1 batches)" in made.why
    for found in runs():
        same = {"weights", "rates", "steps"}
        one, other = ({k: found[name][k] for k in same} for name in ("stale", "stale by name"))
        assert differences(one, other, 0.0) == []
    settings: tuple[tuple[Any, str], ...] = ((True, "schedule '1f1b' is named"), (1.5, "stale_gradients"))
    for setting, said in settings:
        with pytest.raises(PlanError, match=said):
            PipelineStrategy("1f1b", stale_gradients=setting)


def test_an_error_of_a_chosen_schedule_says_why_it_could_be_chosen() -> None:
    schedule = make_schedule("pipedream")
    named = RunRequest(schedule, None, False, "auto")
    with pytest.raises(PlanError, match=r"^no scaler$"), explain_choice(named, schedule):
        raise PlanError("no scaler")
    chosen = RunRequest(schedule, None, False, "auto", chooses=True)
    why = r"'auto' took 'pipedream', which stale_gradients allows\. .* no scaler$"
    with pytest.raises(PlanError, match=why), explain_choice(chosen, schedule):
        raise PlanError("no scaler")


def test_auto_tries_numbers_of_microbatches_whose_size_can_be_run() -> None:
    """'auto' selects as many micro-batches as their smallest size allows.

    The times of the layers are proportional to the number of samples, so more micro-batches are always faster.
    """
    request = RunRequest(make_schedule("1f1b"), None, False, "auto", chooses=True)
    layers = tuple(LayerProfile(str(n), ((0, 0.0), (1, 1.0)), ((0, 0.0), (1, 2.0))) for n in range(4))
    place = Deployment(Cluster((Device(), Device())))
    plain = request.unmeasured([1] * 4, 2)
    assert request.measured(plain, ModelProfile(layers), 16, place).microbatches == 16
    assert request.measured(plain, ModelProfile(layers, notes={MIN_ROWS_NOTE: 3}), 16, place).microbatches == 4
    normalised = request.unmeasured([1] * 4, 2, least=2)  # normalization needs the statistics of two samples
    assert request.measured(normalised, ModelProfile(layers), 16, place).microbatches == 8
    assert request.measured(normalised, ModelProfile(layers), 16, place).problem().least == 2


def test_auto_keeps_to_sizes_that_can_be_run() -> None:
    assert decided("not one row").profile is not None
    assert decided("not one row").microbatches <= 4  # batches have 8 samples


def test_a_short_batch_keeps_to_sizes_that_can_be_run() -> None:
    """A batch of six samples is divided into micro-batches with at least the smallest size that the layers can run."""
    layers = tuple(LayerProfile(str(n), ((0, 0.0), (1, 1.0)), ((0, 0.0), (1, 2.0))) for n in range(4))
    wanted = RunRequest(make_schedule("1f1b"), 4, False, "auto")
    plain = wanted.unmeasured([1] * 4, 2)
    for least, sizes in ((1, [1, 2, 1, 2]), (2, [2, 2, 2])):
        notes = {MIN_ROWS_NOTE: least}
        made = wanted.measured(plain, ModelProfile(layers, notes=notes), 8, Deployment(Cluster((Device(), Device()))))
        assert [span.rows for span in made.plans().for_rows(6)[0].spans(Kind.F, 0)] == sizes


def test_report_has_the_prediction() -> None:
    for found in runs():
        text, record = found["auto"]["report"]
        made = found["auto"]["decision"]
        assert made.table in text
        assert made.why in record.choice
        predicted = f"Step time, excluding the optimizer: {seconds_text(1e9 * made.computing)} predicted, "
        assert predicted in record.choice
        assert record.profile == made.profile
        _, record = found["parameters"]["report"]
        assert (record.choice, record.profile) == ("", None)


def test_auto_recomputes_where_memory_is_short() -> None:
    assert decided("auto recompute").recompute
    assert decided("auto recompute").microbatches == 8
    assert not decided("auto").recompute


@pytest.mark.parametrize("name", sorted(set(CASES) - {"endless", "stale", "stale by name"}))
def test_parity_with_one_process(name: str) -> None:
    """Each automatically planned run has the outputs, metrics and weights of one process."""
    case, _ = CASES[name]
    trainer = {key: value for key, value in case.trainer.items() if key not in ("callbacks", "seconds")}
    alone = train(Case(case.module, case.settings, None, trainer), 1, Path(mkdtemp()))
    for found in runs():
        same = {"outputs", "metrics", "weights", "rates", "steps"}
        assert differences({k: found[name][k] for k in same}, {k: alone[k] for k in same}) == []


# ---- measurements without side effects


def watched(rank: int, strategies: list[dict[str, Any]], folder: str) -> list[Any]:
    """Train LitBefore with each set of arguments and return its state, metrics, counters and next random numbers.

    Layers are measured even though the runs are short.
    """
    quiet()
    found = []
    same: list[bool] = []

    class DrawingNothing(layer_profiler.LayerProfiler):
        def __enter__(self) -> Any:
            self.before = plain_values(random_state(torch.device("cpu")))
            return super().__enter__()

        def __exit__(self, *args: Any) -> None:
            super().__exit__(*args)
            after = plain_values(random_state(torch.device("cpu")))
            same.append(differences(self.before, after, 0.0) == [])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_profiler, "MIN_MEASURED_SECONDS", 0.0)
        patch.setattr(decider, "LayerProfiler", DrawingNothing)
        for settings in strategies:
            decider._profiles.clear()
            pl.seed_everything(3, verbose=False)
            module = LitBefore().double()
            decided = Decided()
            trainer = make_trainer(
                strategy=PipelineStrategy(microbatches=4, **settings), max_epochs=2, callbacks=[decided]
            )
            trainer.fit(module, val_dataloaders=DataLoader(data(13), batch_size=5))
            state = {name: value.numpy() for name, value in module.state_dict().items()}
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            counted = module.steps, module.history, module.hooks
            found.append((state, metrics, counted, torch.rand(3).tolist(), decided.found.profile is not None))
    assert same == [True]
    return found


def test_measuring_leaves_no_trace() -> None:
    """A measurement changes no weights, running averages, metrics, counters, random numbers, or calls of hooks."""
    settings: list[dict[str, Any]] = [{"partition": "parameters"}, {}]
    for plain, measured in run_ranks(watched, 2, settings, mkdtemp(), timeout=60):
        assert not plain[-1]
        assert measured[-1]
        assert differences(list(plain[:4]), list(measured[:4]), 0.0) == []
        assert measured[2][2] == ["train_dataloader"]


class Messy(nn.Module):
    """A module whose forward changes parameters, buffers and attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.count = 0
        self.kept: list[torch.Tensor] = []
        self.by_name = {"a": torch.zeros(2)}
        self.other = self.by_name
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.kept.append(x)
        self.by_name["a"] += 1
        self.by_name["b"] = x
        self.table = self.table + 1
        self.new = x
        with torch.no_grad():
            self.norm.weight.mul_(2)
        self.norm.bias.data = torch.ones(3)
        return self.norm(x)


def test_unchanged() -> None:
    """`keep_unchanged` restores the tensors, gradients and attributes that a forward and a backward have changed."""
    messy = Messy()
    messy.norm.weight.grad = torch.full((3,), 7.0)
    before = {name: t.clone() for name, t in (*messy.named_parameters(), *messy.named_buffers())}
    objects = {name: id(t) for name, t in (*messy.named_parameters(), *messy.named_buffers())}
    gradient = messy.norm.weight.grad
    with keep_unchanged(messy):
        messy(torch.randn(4, 3)).sum().backward()
        assert messy.count == 1
    assert {name: id(t) for name, t in (*messy.named_parameters(), *messy.named_buffers())} == objects
    for name, tensor in (*messy.named_parameters(), *messy.named_buffers()):
        assert torch.equal(tensor, before[name]), name
    assert (messy.count, messy.kept, hasattr(messy, "new")) == (0, [], False)
    assert messy.by_name is messy.other
    assert messy.by_name.keys() == {"a"}
    assert messy.by_name["a"].sum() == 0
    assert messy.norm.weight.grad is gradient
    assert gradient.sum() == 21
    assert messy.norm.bias.grad is None


# ---- samples


class Drawn(Dataset[torch.Tensor]):
    """A dataset that adds random numbers from its own generators to its samples."""

    def __init__(self) -> None:
        self.ours = {"torch": torch.Generator().manual_seed(1), "numpy": np.random.default_rng(1)}
        self.python = random.Random(1)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.rand((), generator=self.ours["torch"]) + self.ours["numpy"].random() + self.python.random()
        return torch.full((2,), index) + drawn


class Endless(IterableDataset[torch.Tensor]):
    """A dataset that never ends."""

    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(2)


class Never(torch.utils.data.Sampler[int]):
    """A sampler that raises an error when it is used."""

    def __iter__(self) -> Any:
        raise AssertionError("the sampler was asked")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_is_taken_unnoticed(workers: int) -> None:
    """Reading an example batch neither uses the sampler nor advances the dataset's own generators."""
    loader = DataLoader(Drawn(), batch_size=4, sampler=Never(), num_workers=workers)
    assert batch_rows(loader) == 4
    first, again = example_batch(loader, 3), example_batch(loader, 3)
    assert first.shape == (3, 2)
    assert torch.equal(first, again)
    assert batch_rows(DataLoader(Drawn(), batch_size=99)) == 5


def test_sample_of_several_loaders():
    """The example batch of several loaders has the given number of samples from each loader with the batch size of the
    first.

    All other loaders contribute their whole batch.
    """
    few, many = TensorDataset(torch.arange(9.0)), TensorDataset(torch.arange(50.0))
    loaders = {"a": DataLoader(few, batch_size=4), "b": [DataLoader(many, batch_size=4), DataLoader(many, 24)]}
    for each in (loaders, CombinedLoader(loaders, "max_size_cycle")):
        assert batch_rows(each) == 4
        first = example_batch(each, 2)
        assert [len(first["a"][0]), len(first["b"][0][0]), len(first["b"][1][0])] == [2, 2, 24]
    trainer = make_trainer(max_epochs=2)
    assert expected_batches(trainer, loaders) == 2 * 13  # 9, 50 and 50 samples; shorter loaders are repeated


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Endless(), batch_size=4), "IterableDataset"),
        (DataLoader(Drawn(), batch_size=None), "no batch_size"),
        ({"a": DataLoader(Drawn()), "b": [1, 2]}, "dict"),
        (DataLoader([], batch_size=4, sampler=Never()), "empty"),
    ],
)
def test_no_sample(loader: Any, reason: str) -> None:
    """Loaders without a sample that can be read in advance raise an error with the reason."""
    with pytest.raises(NoSampleError, match=reason):
        batch_rows(loader)


class LitFails(LitOutside):
    """A module whose step fails before training starts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.trainer.fit_loop.epoch_loop.global_step and self.trainer.fit_loop.epoch_loop.batch_idx < 0:
            raise RuntimeError("too early")
        return super().training_step(batch, batch_idx)


class LitMeta(pl.LightningModule):
    """A module whose layers are created on `meta`."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device("meta"):
                self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0].float()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def skipped(rank: int, folder: str) -> dict[str, str]:
    """Return, by case, the reason why the layers were not measured."""
    quiet()
    layer_profiler.MIN_MEASURED_SECONDS = 600.0  # on a slow machine, a step of small layers also takes long

    def why(module: Any, loader: Any, **settings: Any) -> str:
        options = {"limit_train_batches": 2, "max_epochs": 1, **settings}
        path = options.pop("ckpt_path", None)
        trainer = make_trainer(strategy=PipelineStrategy(module="model"), **options)  # not chosen by times
        trainer.fit(module, loader, ckpt_path=path)
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        return str(trainer.strategy.decision.why)

    def endless() -> Any:
        class Rows(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(data())

        return DataLoader(Rows(), batch_size=8)

    class FromHook(LitBefore):
        pass

    return {
        "iterable": why(Lit().double(), endless()),
        "meta": why(LitMeta(), DataLoader(data(), batch_size=8)),
        "raises": why(LitFails().double(), DataLoader(data(), batch_size=8), max_epochs=1),
        "hook": why(FromHook().double(), None),
        "resumed": why(FromHook().double(), None, max_epochs=2, ckpt_path=f"{folder}/last.ckpt"),
    }


def test_why_nothing_was_measured() -> None:
    first, second = run_ranks(skipped, 2, mkdtemp(), timeout=60)
    assert first == second
    assert "IterableDataset" in first["iterable"]
    assert "on meta" in first["meta"]
    assert "too early" in first["raises"]
    assert "too little" in first["hook"]
    assert "resumed run" in first["resumed"]


# ---- arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "time"}, "'auto', 'parameters' or a list"),
        ({"schedule": "auto", "partition": [1, 2]}, "Leave partition out, or name a schedule"),
        ({"schedule": "auto", "partition": "parameters"}, "Leave partition out, or name a schedule"),
        ({"schedule": "auto", "schedule_args": {"k": 2}}, "belong to one schedule"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PipelineStrategy(**settings)


def test_names() -> None:
    """The strategy and the registered name 'pipeline_auto' both select automatic planning."""
    assert PipelineStrategy()._request.partition == "auto"
    assert pl.Trainer(strategy="pipeline_auto", accelerator="cpu").strategy._request.chooses


# ---- adopting schedules


class Adopts(Callback):
    """A callback that adopts other schedules after the first three batches, and then schedules that are refused."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        self.counts.append(len(strategy.current_run.windows[-1].plan.jobs[0].forward[0]))
        if trainer.global_step == 1:
            strategy.adopt("kfkb", 2)
        elif trainer.global_step == 2:
            strategy.adopt("gpipe", 4, Plan.even(2, 3, 6))
        elif trainer.global_step == 3:
            strategy.adopt("zero_bubble")
        for schedule in ("interleaved", "pipedream", "auto", "no such"):
            try:
                strategy.adopt(schedule)
            except PlanError as error:
                self.errors.append(str(error))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.counts.append(-1)


class Disagrees(Callback):
    """A callback that adopts a different number of micro-batches on each rank."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.adopt("1f1b", 1 + trainer.global_rank)


def adopting(rank: int, folder: str) -> tuple[Any, Any, str]:
    """Train with Adopts, then with Disagrees, and return the results and error messages."""
    adopts = Adopts()
    settings = {"partition": "parameters", "microbatches": 8}
    case = Case(LitOutside, strategy=settings, trainer={"max_epochs": 2, "callbacks": [adopts]})
    found = train(case, 2, folder)
    try:
        train(Case(Lit, strategy=settings, trainer={"callbacks": [Disagrees()]}), 2, f"{folder}/other")
    except Exception as error:
        return found, (adopts.counts, adopts.errors), str(error)
    return found, (adopts.counts, adopts.errors), ""


def test_another_schedule_from_the_next_batch_on() -> None:
    """Adopted schedules take effect with the next batch, and the results still equal the results of one process."""
    alone = train(Case(LitOutside, trainer={"max_epochs": 2}), 1, Path(mkdtemp()))
    for found, (counts, errors), disagreed in run_ranks(adopting, 2, mkdtemp(), timeout=60):
        for key in ("outputs", "metrics", "weights", "rates", "steps"):
            assert differences(found[key], alone[key]) == []
        assert [n for n in counts if n > 0] == [8, 2, 3, 4, 4, 4]  # batches of 8, 8 and 6 samples
        assert "stages can't move to other ranks" in errors[0]
        assert "does not flush" in errors[1]
        assert "when training starts" in errors[2]
        assert "no schedule is called" in errors[3]
        assert "must adopt the same" in disagreed


def test_adopting_needs_a_run() -> None:
    strategy = PipelineStrategy()
    with pytest.raises(PlanError, match=r"trainer\.fit"):
        strategy.adopt("gpipe")
