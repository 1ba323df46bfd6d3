"""Tests of modules on the meta device: initial weights, memory per rank, checkpoints, and further runs."""

from __future__ import annotations

import gc
import hashlib
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy, consolidate
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.checkpoint.files import AtomicCheckpointIO, load_mapped
from lightning_pipes.trainer.checks import check_module
from lightning_pipes.trainer.cuts.layers.capture import Interceptor
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut
from lightning_pipes.trainer.weights.deferred import DeferredWeights, check_optimizers, group_layers
from tests.trainer.lit import WIDTH, Lit, data, differences, plain_values, quiet
from tests.trainers import make_trainer

SEED = 4
TORCH_SEED = 3
LAYERS = 6
sizes: list[int] = []
"""Bytes of all allocated parameters of this process, at each call of `look`."""


def look() -> None:
    """Record the bytes of all parameters of this process that have memory."""
    found = {id(p): p.numel() * p.element_size() for p in gc.get_objects() if type(p) is nn.Parameter and not p.is_meta}
    sizes.append(sum(found.values()))


class Layer(nn.Linear):
    """A layer with a buffer that is not saved in checkpoints."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("shift", torch.empty(self.out_features), persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "shift"):
            self.shift.fill_(0.5)
        look()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.shift


class Block(nn.Sequential):
    """A block that initializes its layers again, and has no weights of its own."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self[0].weight, std=0.3)
        with torch.no_grad():
            self[2].weight.mul_(0.5)
        self[2].bias.data.uniform_()


class LitMeta(Lit):
    """A module on the meta device, except for its outlet.

    Its blocks have two linear layers each. It also has a buffer, tied weights, and weights outside of the layers.
    """

    def __init__(self, by_units: bool = False) -> None:
        super().__init__()
        self.by_units = by_units
        self.model = None
        self.outlet = nn.Linear(3, 3)

    def configure_model(self) -> None:
        if self.model is not None:
            return
        with torch.device("meta"):
            blocks = [Block(Layer(WIDTH, WIDTH), nn.Tanh(), Layer(WIDTH, WIDTH)) for _ in range(LAYERS - 2)]
            self.inlet = nn.Linear(WIDTH, WIDTH)
            self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3))
        self.model[0].weight = self.model[3][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outlet(self.model(self.inlet(x)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([{"params": self.model.parameters(), "lr": 0.05}, {"params": self.inlet.parameters()}])


class LitReal(LitMeta):
    """The same module in memory, initialized by hand with the values that a module on the meta device must get.

    Random numbers depend on the seed, torch's seed and the number of the layer. Weights outside of the layers have the
    number -1. If `by_units` is true, the number is the position of each part in the module. Parts that initialize each
    other's weights use the smallest of their numbers.
    """

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        self.to_empty(device="cpu").double()
        self.model[0].weight = self.model[3][0].weight
        self.outlet.load_state_dict(self.outlet_before)
        state = torch.get_rng_state()
        layers = [[*layer.children(), layer] for layer in self.model]
        groups = [(-1, [self.inlet]), *enumerate(layers)]
        if self.by_units:  # independent of the cut
            number = {part: n for n, part in enumerate(self.modules())}
            layers[3:4], layers[0] = [], layers[0] + layers[3]  # these have a weight in common
            groups = [(min(number[part] for part in parts), parts) for parts in ([self.inlet], *layers)]
        for number, parts in groups:
            text = f"{SEED}/0/{number}/{TORCH_SEED}/0:0".encode()
            torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1)
            for module in parts:
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
        torch.set_rng_state(state)


class Looking(Callback):
    """Calls `look` whenever Lightning calls a hook that is not called for every batch."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and "batch" not in name and "save" not in name:
            look()
        return super().__getattribute__(name)


def trainer(
    ranks: int, folder: str | Path, strategy: Any = None, path: str | None = None, **options: Any
) -> pl.Trainer:
    if strategy is None:
        strategy = PipelineStrategy("1f1b", microbatches=1, seed=SEED, module=path) if ranks else "auto"
    return make_trainer(
        devices=max(ranks, 1),
        strategy=strategy,
        precision="64-true",
        default_root_dir=folder,
        **{"max_epochs": 1, **options},
    )


def loaders() -> tuple[Any, Any]:
    return DataLoader(data(), batch_size=8), DataLoader(data(13), batch_size=5)


def made(kind: Any, by_units: bool = False) -> Any:
    pl.seed_everything(TORCH_SEED, verbose=False)
    module = kind(by_units)
    module.outlet_before = {k: v.double() for k, v in module.outlet.state_dict().items()}
    return module


def used(rank: int, ranks: int, folder: str, by_units: bool = False) -> dict[str, Any]:
    """Run `fit` and `test` several times with checkpoints, and return the results.

    The module is fitted, tested, fitted again, and refused with another cut. A second module resumes from the
    checkpoint of the first fit, and a third one is tested with it.
    """
    quiet()
    folder_, make = Path(folder), partial(made, LitMeta if ranks else LitReal, by_units)
    train = partial(trainer, path="" if by_units else None)
    sizes.clear()
    module = make()
    found: dict[str, Any] = {}
    first = train(ranks, folder_, callbacks=[Looking(), AtStart(found)])
    first.fit(module, *loaders())
    found["peak"] = max(sizes)
    first.save_checkpoint(folder_ / "first.ckpt")
    found["tested"] = train(ranks, folder_).test(module, loaders()[1], verbose=False)
    again = train(ranks, folder_)
    again.fit(module, *loaders())
    again.save_checkpoint(folder_ / "again.ckpt")
    if ranks > 1:
        found["held"] = sum(p.numel() for p in module.parameters() if not p.is_meta)
        places: Any = ["model.1", "model.2", "model.3"] if by_units else [1, 2, 3]
        other = trainer(ranks, folder_, PipelineStrategy("1f1b", microbatches=1, partition=places[: ranks - 1]))
        with pytest.raises(Exception, match="differently from the last run, but the layers") as error:
            other.fit(module, *loaders())
        found["error"] = str(error.value)
    fresh = make()
    second = train(ranks, folder_, max_epochs=2)
    second.fit(fresh, *loaders(), ckpt_path=folder_ / "first.ckpt", weights_only=True)
    second.save_checkpoint(folder_ / "second.ckpt")
    loaded = make()
    testing = train(ranks, folder_)
    found["loaded"] = testing.test(loaded, loaders()[1], ckpt_path=folder_ / "first.ckpt", verbose=False)
    found["held in test"] = sum(p.numel() for p in loaded.parameters() if not p.is_meta)
    if rank == 0:
        for name in ("first", "again", "second"):
            whole = torch.load(folder_ / f"{name}.ckpt", weights_only=True)
            found[name] = plain_values([dict(whole["state_dict"]), whole["optimizer_states"]])
    return found


class AtStart(Callback):
    """Records the weights at the start of training."""

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found

    def on_train_start(self, trainer: Any, module: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.found["start"] = plain_values(dict(state))


@cache
def pipeline(ranks: int, by_units: bool) -> list[dict[str, Any]]:
    return run_ranks(used, ranks, ranks, mkdtemp(), by_units, timeout=120)


@cache
def plain(by_units: bool = False) -> dict[str, Any]:
    return run_ranks(used, 1, 0, mkdtemp(), by_units, timeout=120)[0]


RUNS = [(1, False), (2, False), (2, True), (3, True), pytest.param(4, False, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("ranks", "by_units"), RUNS)
def test_starts_and_trains_as_one_process(ranks, by_units):
    found, alone = pipeline(ranks, by_units), plain(by_units)
    for what in ("start", "first", "again", "second"):
        assert differences(found[0][what], alone[what]) == [], what
    for on_rank in found:
        assert differences([on_rank["tested"], on_rank["loaded"]], [alone["tested"], alone["loaded"]]) == []


@pytest.mark.parametrize(("ranks", "by_units"), RUNS[1:])
def test_no_rank_ever_holds_it_whole(ranks, by_units):
    start = pipeline(ranks, by_units)[0]["start"]
    whole = sum(v.size * 8 for k, v in start.items() if k.endswith(("weight", "bias")))
    tied = WIDTH * WIDTH * 8
    outside = 0 if by_units else (WIDTH + 1) * WIDTH * 8 + 4 * 3 * 8
    assert plain(by_units)["peak"] >= whole - tied
    for on_rank in pipeline(ranks, by_units):
        share = 0.85 if by_units else 0.75  # by units, a border may divide parts that are initialized together
        assert outside < on_rank["peak"] <= outside + (whole - outside) * share
        assert on_rank["held in test"] * 8 <= outside + (whole - outside) * 0.75
        assert on_rank["held"] * 8 <= on_rank["peak"]
        assert "differently from the last run, but the layers" in on_rank["error"]


def in_folders(rank: int, ranks: int, folder: str) -> Any:
    """Train and save a folder; if the runs on more ranks have written one, resume from it.

    Without such a folder, one epoch is trained.
    """
    quiet()
    path, before = Path(folder) / str(ranks), Path(folder) / str(ranks + 1)
    strategy = PipelineStrategy("1f1b", microbatches=1, seed=SEED, checkpoint="sharded")
    fitting = trainer(ranks, folder, strategy, max_epochs=2 if before.exists() else 1)
    fitting.fit(made(LitMeta), *loaders(), ckpt_path=before if before.exists() else None, weights_only=True)
    fitting.save_checkpoint(path)
    if rank == 0:
        consolidate(path, f"{path}.ckpt")
    return plain_values(dict(torch.load(f"{path}.ckpt", weights_only=True)["state_dict"])) if rank == 0 else None


def test_a_folder_is_read_where_it_is_needed(tmp_path):
    run_ranks(in_folders, 3, 3, str(tmp_path), timeout=60)
    found = run_ranks(in_folders, 2, 2, str(tmp_path), timeout=60)[0]
    assert differences(found, plain()["second"][0]) == []


def on_meta(*layers: Any, **outside: Any) -> pl.LightningModule:
    """Return a module with the given layers on the meta device."""
    module = pl.LightningModule()
    with torch.device("meta"):
        module.model = nn.Sequential(*(make() for make in layers))
        for name, make in outside.items():
            setattr(module, name, make())
    return module


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def defer(module: pl.LightningModule) -> DeferredWeights:
    return DeferredWeights(module, group_layers(module, "model"))


def test_layer_without_a_source_of_weights_is_named():
    with pytest.raises(
        PipelineError, match=r"LightningModule.model.1 is a Silent with weights on meta and has no reset"
    ):
        defer(on_meta(lambda: nn.Linear(1, 1), Silent))
    with pytest.raises(PipelineError, match=r"LightningModule is a LightningModule with weights on meta and has no"):
        defer(on_meta(scale=lambda: nn.Parameter(torch.ones(1))))
    tied = on_meta(Silent, norm=lambda: nn.LayerNorm(2))
    tied.model[0].scale = tied.norm.weight
    defer(tied)


class Scaled(nn.Module):
    """A module that sets a weight of a part when it is created, and sets it again in `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.reset_parameters()
        nn.init.zeros_(self.last.weight)

    def reset_parameters(self) -> None:
        self.first.reset_parameters()
        nn.init.ones_(self.last.weight)


def test_values_that_are_set_when_a_module_is_made_on_meta_are_warned_of():
    with pytest.warns(
        UserWarning, match=r"sets model.1.last.weight outside of reset_parameters\(\) when it is created"
    ):
        defer(on_meta(lambda: nn.Linear(2, 2), Scaled))
    with pytest.warns(UserWarning, match="Whole initializes weights of several layers"):
        defer(Whole())


class Whole(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def reset_parameters(self) -> None:
        for layer in self.model:
            nn.init.ones_(layer.weight)


class Adapted(nn.Module):
    """A layer with an adapter, as in LoRA of peft."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2)
        self.lora_A, self.lora_B = (nn.ModuleDict({"own": nn.Linear(2, 2, bias=False)}) for _ in range(2))

    def reset_lora_parameters(self, name: str, kind: bool | str) -> None:
        nn.init.constant_(self.lora_A[name].weight, 2.0 if kind == "gaussian" else 1.0)
        nn.init.zeros_(self.lora_B[name].weight)


def test_adapters_start_as_their_library_has_it():
    module = on_meta(Adapted, Adapted)
    module.peft_config = {"own": SimpleNamespace(init_lora_weights="gaussian")}
    pipe: Any = SimpleNamespace(broadcast=lambda value, source: value, ranks=[0])
    ranks: Any = SimpleNamespace(pipeline=pipe, control=pipe, device=torch.device("cpu"))
    defer(module).make_layers([1], [0, 0], 0, ranks)
    assert module.model[0].lora_B["own"].weight.is_meta
    assert module.model[1].lora_A["own"].weight.unique().tolist() == [2.0]
    assert module.model[1].lora_B["own"].weight.unique().tolist() == [0.0]


def test_an_optimizer_that_has_state_already():
    module = on_meta(lambda: nn.Linear(1, 1))
    check_optimizers([torch.optim.AdamW(module.parameters())])
    with pytest.raises(PipelineError, match=r"Adagrad makes its state 'sum' before weights on meta have values"):
        check_optimizers([torch.optim.Adagrad(module.parameters())])


def test_only_what_a_checkpoint_needs_to_load_is_read(tmp_path):
    torch.save({"state_dict": {"a": torch.ones(5)}, "callbacks": {"best": torch.ones(3)}}, tmp_path / "a.ckpt")
    mapped = load_mapped(AtomicCheckpointIO(), tmp_path / "a.ckpt", True)
    (tmp_path / "a.ckpt").write_bytes(b"")  # reading a page of the file after this line would end the process
    assert mapped["callbacks"]["best"].tolist() == [1.0] * 3
    assert load_mapped(AtomicCheckpointIO(), tmp_path, True) is None


def test_a_failed_run_leaves_nothing_to_go_on_with():
    module = on_meta(lambda: nn.Linear(1, 1), lambda: nn.Linear(1, 1))
    ContainerCut(module, "model", [0], Interceptor("self.model")).restore(ended=False)
    with pytest.raises(PipelineError, match=r"model.0.weight has no values: the last run with this object failed"):
        check_module(module, fitting=False)


class Failing(nn.Linear):
    """A layer whose initialization fails."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            raise ValueError("no idea what to start from")


class LitFailing(LitMeta):
    def configure_model(self) -> None:
        super().configure_model()
        with torch.device("meta"):
            self.model[1][0] = Failing(WIDTH, WIDTH)


def failing(rank: int) -> str:
    quiet()
    with pytest.raises(ValueError, match="no idea") as error:
        trainer(1, mkdtemp()).fit(made(LitFailing), *loaders())
    return str(error.value)


def test_an_error_while_weights_are_made_is_the_one_that_is_seen():
    assert run_ranks(failing, 1, timeout=40) == ["no idea what to start from"]
