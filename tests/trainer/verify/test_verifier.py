"""Tests that `PipelineStrategy(verify=n)` finds differences from the training of one process, without false alarms."""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
from collections.abc import Collection
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import MemorySwap, PipelineStrategy
from lightning_pipes.arrays.array import JobArray
from lightning_pipes.ir import InputError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.verify import reference
from lightning_pipes.trainer.verify.comparison import Comparison, Rounding
from lightning_pipes.trainer.verify.record import Phase, ValueKey
from tests.cases import selected_values
from tests.trainer.lit import Lit, data, quiet
from tests.trainer.verify.faults import (
    BY_UNITS,
    EQUAL,
    FAULTS,
    FOUND,
    LAID_BY_UNITS,
    Fault,
    Net,
    Search,
    Single,
    found,
    is_found_by_units,
    patched,
    trained,
)
from tests.trainers import make_trainer


@cache
def sentences() -> dict[int, str]:
    numbers = selected_values(test_every_seeded_fault_is_found, "number")
    return dict(zip(numbers, found(numbers), strict=True))


@pytest.mark.parametrize("number", range(len(FAULTS)), ids=[fault.name for fault in FAULTS])
def test_every_seeded_fault_is_found(number):
    said = sentences()[number]
    assert FOUND in said, said
    assert FAULTS[number].finds in said.partition("Likely reason")[0], said
    assert "Likely reason: " in said


SOME_BY_UNITS = (
    "attribute set in on_train_epoch_end, read before the layers",
    "BatchNorm by micro-batches",
    "norm over optimizer.param_groups in a hook",
    "mean over samples before the layers",
    "loss that is not a mean over samples",
    "random streams shifted on one rank",
    "one gradient scaled by 1.0001",
    "logs merged by the last micro-batch",
)


def check_found_by_units(names: Collection[str]) -> None:
    """Check that the named faults are found if modules are cut by units."""
    numbers = [number for number in LAID_BY_UNITS if FAULTS[number].name in names]
    for number, said in zip(numbers, found(numbers, **BY_UNITS), strict=True):
        assert is_found_by_units(FAULTS[number], said), (FAULTS[number].name, said)


def test_seeded_faults_are_found_by_units() -> None:
    check_found_by_units(SOME_BY_UNITS)


@pytest.mark.slow
def test_every_seeded_fault_is_found_by_units() -> None:
    check_found_by_units([fault.name for fault in FAULTS])


class Rich(Net):
    """A module with dropout in and around its layers, a scheduler, and random numbers for each sample."""

    dropout = 0.3

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x + 0.1 * torch.randn_like(x) + torch.rand(len(x), 1).to(x), 0.2)

    def loss(self, h: torch.Tensor, y: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(nn.functional.dropout(h, 0.2), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


class RichPlain(Rich):
    """The same with layers that read no values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6), nn.Tanh()) for _ in range(6)]
        self.model = nn.Sequential(*layers).double()


class RichSingle(Rich, Single):
    """The same in single precision, in which rounding differs."""


class AtJumps(Single):
    """Units that are 0 except for rounding.

    The rounding depends on the number of samples, as in matrix products.
    """

    units, samples = 1, 1

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Identity()
        self.model = nn.Sequential(nn.Identity(), Jumps(self.units), nn.Linear(self.units, 6))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = super().on_before_batch_transfer(batch, dataloader_idx)
        for n in range(self.samples):
            x[n] = torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 0.0]).roll(2 * n)
        return x, y


class AtManyJumps(AtJumps):
    """A module with many such units.

    A repetition puts all units on the same side as in the pipeline only once in 200,000 times.
    """

    units, samples = 6, 3


class Jumps(nn.Module):
    """Units whose inputs are 0 except for a rounding error that depends on the number of samples."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, units, bias=False)
        nn.init.constant_(self.linear.weight, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 + torch.relu(self.linear(x) + 2e-8 * (len(x) - 6))


class Checkpointed(Rich):
    """Layers whose forward runs again in backward, with the random numbers of the first run."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Again(layer) for layer in self.model))


class Again(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)


class TakesTurns(Search):
    """Layers that are on the device only while they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = memory_swap(24_000)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [self.memory]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.alone and self.trainer.is_last_batch:
            assert self.memory.statistics.bytes_in > 0, "no layer has come back"


def memory_swap(*args: Any) -> MemorySwap:
    memory = MemorySwap(*args)
    memory._poison = True
    return memory


class Returns(Net):
    """Returns values in addition to the loss, and has labels that are ignored."""

    def loss(self, h: torch.Tensor, y: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(h, y, ignore_index=-100)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "rows": len(batch[0]), "more": {"name": "n", "doubled": loss.detach() * 2}}

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x, y.masked_fill(torch.arange(len(y)) < 3, -100)


EQUALS: dict[str, Fault] = {
    "1f1b": Fault("", Rich, "", trainer={"limit_train_batches": 4, "max_epochs": 1}),
    "clipping": Fault("", Rich, "", trainer={"gradient_clip_val": 0.1}),
    "accumulation": Fault(
        "", Rich, "", trainer={"limit_train_batches": 4, "max_epochs": 1, "accumulate_grad_batches": 2}
    ),
    "kfkb": Fault("", Rich, "", strategy={"schedule": "kfkb", "schedule_args": {"k": 2}, "microbatches": 4}),
    "interleaved": Fault("", Rich, "", strategy={"schedule": "interleaved", "partition": "parameters"}),
    "hanayo": Fault("", Rich, "", strategy={"schedule": "hanayo", "partition": "parameters"}),
    "v": Fault("", Rich, "", strategy={"schedule": "v", "partition": "parameters"}),
    "zero bubble": Fault("", Rich, "", strategy={"schedule": "zero_bubble"}),
    "umpipe": Fault(
        "",
        partial(Net),
        "",
        strategy={"schedule": "umpipe", "schedule_args": {"forward": (2, 4), "backward": (4, 1)}, "microbatches": None},
    ),
    "recompute": Fault("", Rich, "", strategy={"recompute": True}),
    "single precision": Fault("", RichSingle, ""),
    "units at their jumps": Fault("", AtJumps, "", strategy={"partition": [2]}),
    "many units at their jumps": Fault("", AtManyJumps, "", strategy={"partition": [2]}),
    "bf16": Fault("", Net, "", trainer={"precision": "bf16-mixed"}),
    "returned": Fault("", Returns, ""),
    "checkpointed": Fault("", Checkpointed, ""),
    "by units": Fault("", Rich, "", strategy=BY_UNITS | {"schedule": "kfkb", "microbatches": 4}),
    "by units, recomputed": Fault("", Single, "", strategy=BY_UNITS | {"recompute": True}),
    "by units, checkpointed": Fault("", Checkpointed, "", strategy=BY_UNITS | {"schedule": "zero_bubble"}),
    "by units, unequal micro-batches": Fault(
        "",
        RichPlain,
        "",
        strategy=BY_UNITS
        | {
            "schedule": "umpipe",
            "schedule_args": {"forward": (2, 4), "backward": (4, 1)},
            "microbatches": None,
            "partition": ["model.3.2"],
        },
    ),
    "csp": Fault("", Search, "", strategy={"schedule": "csp"}),
    "csp, cut by batch": Fault("", Search, "", strategy={"schedule": "csp", "schedule_args": {"balanced": True}}),
    "subnets with a flush": Fault("", Search, ""),
    "csp, layers that take turns": Fault("", TakesTurns, "", strategy={"schedule": "csp", "recompute": True}),
}


def all_equal(rank: int, names: list[str]) -> list[str]:
    return [trained(rank, EQUALS[name], verify=2) for name in names]


@cache
def said_of_equals() -> dict[str, str]:
    names = selected_values(test_equal_modules_raise_no_alarm, "name")
    return dict(zip(names, run_ranks(all_equal, 2, names, timeout=200)[0], strict=True))


class Garbage:
    """Records the process in which it is collected."""

    def __init__(self, collected: Any) -> None:
        self.itself, self.collected = self, collected

    def __del__(self) -> None:
        with open(self.collected, "a") as file:
            file.write(f"{os.getpid()}\n")


class Collects(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        gc.collect()
        return super().training_step(batch, batch_idx)


def with_garbage(rank: int, folder: str) -> int:
    gc.disable()
    Garbage(f"{folder}/{rank}")
    assert EQUAL in trained(rank, Fault("", Collects, ""), verify=2) or rank
    return os.getpid()


def test_the_reference_collects_no_garbage_of_its_parent(tmp_path):
    """Check that the forked reference does not collect garbage of its parent.

    The garbage may contain process groups of earlier runs, whose end waits for threads that a fork does not have.
    """
    for rank, pid in enumerate(run_ranks(with_garbage, 2, str(tmp_path), timeout=60)):
        assert (tmp_path / str(rank)).read_text() == f"{pid}\n"


@pytest.mark.parametrize("name", EQUALS)
def test_equal_modules_raise_no_alarm(name):
    said = said_of_equals()[name]
    assert EQUAL in said, said
    many = name == "many units at their jumps"
    assert f"over {'1 batch:' if many else '2 batches'}" in said
    assert ("later batches were not compared" in said) == many
    assert "Error" not in said, said
    assert ("rounding decided which side of a jump values are on" in said) == ("jumps" in name), said


def test_rounding_of_earlier_steps_stays_in_weights():
    """Check that earlier rounding, which stays in the weights, does not count as a difference.

    The gradient of the bias of keys consists of rounding, and Adam makes steps from it. A short step does not undo an
    earlier long one: here, the steps are 1e-3 and -1e-3, and then 1e-5 in both trainings.
    """
    key = {phase: ValueKey(phase, 0, "bias") for phase in (Phase.STEP_GRADIENT, Phase.WEIGHT)}
    rounding = Rounding(1e-7, dict.fromkeys(Phase, 1.0))
    comparison = Comparison(0)
    comparison.remember_weights({"bias": torch.zeros(1)})
    for gradients, weights in (((1e-9, -1e-9), (1e-3, -1e-3)), ((1e-9, 0.9e-9), (1.01e-3, -0.99e-3))):
        ours, theirs = (
            {
                key[Phase.STEP_GRADIENT]: torch.tensor([gradient]),
                key[Phase.WEIGHT]: torch.tensor([weight]),
            }
            for gradient, weight in zip(gradients, weights, strict=True)
        )
        assert comparison.compare_values(0, ours, theirs, rounding) == []


def warned(rank: int) -> list[Any]:
    """Return whether a training with verify="warn" ends with the weights of a training without verification."""
    fault = next(f for f in FAULTS if f.name == "mean over samples before the layers")
    weights = []
    for verify in ("warn", 0):
        quiet()
        torch.manual_seed(0)
        module = fault.kind()
        trainer = fitted(module, verify=verify)
        assert trainer.global_step == 4
        weights.append({name: value.tolist() for name, value in module.state_dict().items()})
    return [weights[0] == weights[1]]


def fitted(module: pl.LightningModule, callbacks: Any = (), **strategy: Any) -> pl.Trainer:
    """Train for one epoch of four batches and return the Trainer."""
    g = torch.Generator().manual_seed(2)
    rows = TensorDataset(torch.randn(32, 6, generator=g).double(), torch.randint(0, 3, (32,), generator=g))
    trainer = make_trainer(
        strategy=PipelineStrategy(partition="parameters", **strategy), max_epochs=1, callbacks=list(callbacks)
    )
    trainer.fit(module, DataLoader(rows, batch_size=8))
    return trainer


def test_training_continues_after_a_warning():
    assert run_ranks(warned, 2) == [[True], [True]]


class Watches(pl.Callback):
    """Checks that nothing is left after the compared batches: no process, hook, listener or wrapped method."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.world_size == 1:  # the reference
            return
        hooks = [len(layer._forward_pre_hooks) for layer in pl_module.model]
        run = trainer.strategy.current_run
        children = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
        if batch_idx < 2:
            assert any(hooks)
            assert run.listeners
            assert bool(children) == trainer.is_global_zero
        else:
            assert not any(hooks)
            assert not run.listeners
            assert not children
            assert "configure_gradient_clipping" not in vars(pl_module)


MESSAGE = 320  # bytes of a message; a batch has 384 bytes


class Weighs(pl.Callback):
    """Measures the bytes of all tensors larger than a message of a micro-batch, before the last batch.

    Messages are left out, because some may be in flight.
    """

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            gc.collect()
            tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
            self.held = sum(each.nbytes for each in tensors if each.nbytes > MESSAGE)


def watched(rank: int, folder: Path) -> None:
    """Check that verification leaves neither files nor tensors behind."""
    quiet()
    tempfile.tempdir = str(folder)
    fitted(Net(), [Watches()], verify=2)
    assert not [*folder.glob("lightning_pipes_verify_*")]
    held = []
    for verify in (0, 2):
        weighs = Weighs()
        fitted(Net(), [weighs], verify=verify)
        held.append(weighs.held)
    assert held[0] == held[1], held


def test_nothing_is_left_after_the_batches(tmp_path):
    run_ranks(watched, 2, tmp_path)


class Digests(pl.Callback):
    """Writes the weights of this process before each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        who = "reference" if trainer.world_size == 1 else f"rank{trainer.global_rank}"
        here = {name: p.tolist() for name, p in pl_module.named_parameters() if not p.is_meta}
        (self.folder / f"{who} {batch_idx}.json").write_text(json.dumps(here))


def digested(rank: int, folder: Path) -> None:
    quiet()
    fitted(Net(), [Digests(folder)], verify=3, microbatches=4)


def test_each_batch_is_compared_from_the_weights_of_the_pipeline(tmp_path):
    """The reference takes the weights of the pipeline after each batch, so that rounding does not grow over batches."""
    run_ranks(digested, 2, tmp_path)
    for batch in range(3):
        ours, more, theirs = (
            json.loads((tmp_path / f"{who} {batch}.json").read_text()) for who in ("rank0", "rank1", "reference")
        )
        assert theirs
        assert {name: (ours | more)[name] for name in theirs} == theirs


SLICED: dict[str, tuple[Fault, str]] = {
    name: (fault, "layers equal to the same layers alone")
    for name, fault in EQUALS.items()
    if name in ("1f1b", "interleaved", "zero bubble", "umpipe", "recompute", "single precision", "accumulation")
} | {
    each.name: (each, finds)
    for each in FAULTS
    for name, finds in {
        "BatchNorm by micro-batches": "The first difference is in the output of layer 0",
        "random streams shifted on one rank": "The first difference is in the output of layer",
        "one gradient scaled by 1.0001": "in layer 5, the gradient of model.5.linear.bias after backward",
    }.items()
    if each.name == name
}


def all_sliced(rank: int, names: list[str]) -> list[str]:
    """Train as on processes that have no room for the whole module, and return the sentences."""
    with patched(reference, "no_room_for", lambda module: "there is no room"):
        return [trained(rank, SLICED[name][0], verify=2) for name in names]


@cache
def said_of_slices() -> dict[str, str]:
    names = selected_values(test_layers_are_compared_alone_where_there_is_no_room, "name")
    return dict(zip(names, run_ranks(all_sliced, 2, names, timeout=200)[0], strict=True))


@pytest.mark.parametrize("name", SLICED)
def test_layers_are_compared_alone_where_there_is_no_room(name):
    assert SLICED[name][1] in said_of_slices()[name], said_of_slices()[name]


def test_room():
    """Check the reasons for which a module cannot be copied: weights on meta, and too little free memory."""
    small = nn.Linear(3, 3)
    assert reference.no_room_for(small) == ""
    assert "on meta" in reference.no_room_for(nn.Linear(3, 3, device="meta"))
    free = psutil.virtual_memory().available
    with torch.device("meta"):
        large = nn.Linear(1, 1)
    large.weight = nn.Parameter(torch.empty(1).expand(free // 8))
    large.bias = None
    assert "GiB are free" in reference.no_room_for(large)


def job(number: int) -> str:
    return trained_alone(Net if number != 1 else next(f for f in FAULTS if "sorted" in f.name).kind)


def trained_alone(kind: Any) -> str:
    trainer = fitted(kind(), verify=2, schedule="jap", microbatches=2)
    return f"{trainer.global_step} steps"


def arrays(rank: int) -> list[list[str]]:
    """Return the results of an array whose siblings stay on the device, and of one whose siblings take turns there."""
    quiet()
    found, memory = [], memory_swap(1 << 30, None, 2)
    for array in (JobArray[str](2), JobArray[str](3, memory=memory)):
        ended = sorted(array.run([partial(job, n) for n in range(3)]), key=lambda each: each.index)
        found.append([str(each.value or each.error) for each in ended])
    assert memory.statistics.bytes_in > 0
    return found


def test_siblings_of_an_array_are_verified_each():
    for rank in run_ranks(arrays, 2):
        for first, wrong, last in rank:
            assert (first, last) == ("4 steps", "4 steps")
            assert FOUND in wrong


def refused(rank: int) -> list[str]:
    quiet()
    said = []
    for schedule in STALE:
        try:
            fitted(Net(), verify=2, schedule=schedule)
        except Exception as error:
            said.append(str(error))
    return said


STALE = ("pipedream", "pipedream_2bw", "dynpipe")


def test_stale_weights_are_refused():
    for name, said in zip(STALE, run_ranks(refused, 2)[0], strict=True):
        assert f"schedule {name!r} trains by weights that miss updates" in said


@pytest.mark.parametrize("verify", [-1, 1.5, "no", None])
def test_invalid_number_of_batches_is_refused(verify):
    with pytest.raises(InputError, match="verify"):
        PipelineStrategy(verify=verify)


def test_replicas_are_refused():
    with pytest.raises(InputError, match="data_parallel=2"):
        PipelineStrategy(verify=2, data_parallel=2)


def test_the_environment_asks_for_it(monkeypatch):
    monkeypatch.setenv("LIGHTNING_PIPES_VERIFY", "3")
    assert PipelineStrategy()._settings.verify.batches == 3
    assert PipelineStrategy(verify=1)._settings.verify.batches == 1
    monkeypatch.setenv("LIGHTNING_PIPES_VERIFY", "warn")
    assert PipelineStrategy()._settings.verify == (2, True)
    monkeypatch.setenv("LIGHTNING_PIPES_VERIFY", "soon")
    with pytest.raises(InputError, match="LIGHTNING_PIPES_VERIFY"):
        PipelineStrategy()


class Dies(Net):
    """Kills the plain process, as the kernel does if memory is short."""

    def loss(self, h: torch.Tensor, y: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.alone and batch_idx == 1:
            os.kill(os.getpid(), 9)
        return super().loss(h, y, batch_idx)


class Raises(Net):
    def loss(self, h: torch.Tensor, y: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.alone and batch_idx == 1:
            raise LookupError("not in one process")
        return super().loss(h, y, batch_idx)


def ended(rank: int) -> list[str]:
    quiet()
    said = []
    for kind in (Dies, Raises):
        try:
            fitted(kind(), verify=2)
        except Exception as error:
            said.append(str(error))
    return said


def test_end_of_the_reference_is_reported():
    for killed, raised in run_ranks(ended, 2, timeout=80):
        assert "batch 1" in killed
        assert "memory" in killed
        assert "LookupError: not in one process" in raised


def saves(rank: int, folder: str) -> list[str]:
    """Train with verification, and return the files that the training wrote."""
    quiet()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    trainer = make_trainer(
        strategy=PipelineStrategy(verify=2),
        max_epochs=1,
        default_root_dir=folder,
        logger=pl.loggers.CSVLogger(folder, name="", version="run"),
        callbacks=[pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")],
        log_every_n_steps=1,
    )
    trainer.fit(Lit().double(), DataLoader(data(), batch_size=8))
    return sorted(os.listdir(folder))


def test_the_reference_writes_no_files(tmp_path):
    (tmp_path / "scratch").mkdir()
    first, _ = run_ranks(saves, 2, str(tmp_path), env={"TMPDIR": str(tmp_path / "scratch")})
    assert not list((tmp_path / "scratch").glob("lightning_pipes_verify_*"))
    assert [name for name in first if name.endswith("ckpt")] == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    steps = [line.split(",") for line in (tmp_path / "run" / "metrics.csv").read_text().splitlines()]
    column = steps[0].index("step")
    assert len([line for line in steps[1:] if line[column] == "1"]) == 1
