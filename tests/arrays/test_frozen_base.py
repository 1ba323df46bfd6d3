"""Tests that siblings with one frozen base hold it once, read it once, and train as they do alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import JobArray, MemorySwap, PipelineStrategy, load_pretrained
from lightning_pipes.arrays.siblings.sibling import current_sibling
from lightning_pipes.engine.private_torch import storage_address
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.weights.pretrained import PretrainedWeights
from tests.arrays.jobs import LoRALinear
from tests.trainer.lit import quiet
from tests.trainers import make_trainer

pytest.importorskip("safetensors", reason="the base is a safetensors file")

WIDTH, DEPTH = 64, 4
BASE_BYTES = WIDTH * WIDTH * 4
"""The bytes of the base of one layer."""


class Tuned(pl.LightningModule):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.net: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is not None:
            return
        with torch.device("meta"):
            self.net = nn.Sequential(*(LoRALinear(WIDTH, self.job.rank) for _ in range(DEPTH)))
        load_pretrained(self.net, self.job.file, strict=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        for layer in self.net if self.job.writes and batch_idx == 2 else ():
            layer.base.weight.data.mul_(0.5)
        if current_sibling() is not None:
            BASES.update(addresses(self.net))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.job.lr)


BASES: set[int] = set()
"""The addresses of the bases on this rank after each batch and its checkpoint, and after the array."""
MODULES: list[Tuned] = []
"""The modules of the siblings on this rank."""


def addresses(net: nn.Module) -> list[int]:
    """Return the addresses of the bases on this rank. The stand-ins for other ranks have no memory."""
    found = [storage_address(p) for name, p in net.named_parameters() if "base" in name]
    return [each for each in found if each]


@dataclass(frozen=True)
class Job:
    """The settings of one sibling, and the function that trains it."""

    file: str
    rank: int
    lr: float
    writes: bool = False
    folder: str = ""
    module: str = ""
    epochs: int = 1
    fits: int = 1

    def __call__(self) -> Any:
        torch.manual_seed(self.rank)
        x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(5))
        saving = [ModelCheckpoint(f"{self.folder}/{self.rank}", every_n_train_steps=2)] if self.folder else []
        module = Tuned(self)
        for _ in range(self.fits):
            trainer = make_trainer(
                devices=int(os.environ["WORLD_SIZE"]),
                strategy=PipelineStrategy("1f1b", microbatches=2, module=self.module or "net"),
                max_epochs=self.epochs,
                callbacks=saving,
            )
            trainer.fit(module, DataLoader(TensorDataset(x), 4))
        if self.folder:
            MODULES.append(module)
            torch.save(module.state_dict(), f"{self.folder}/{self.rank}-{trainer.global_rank}.pt")
        weights = {n: p.detach().clone() for n, p in module.named_parameters() if p.device.type != "meta"}
        return module.losses, weights


def tune(
    rank: int, jobs: Sequence[Job], memory: MemorySwap | None = None
) -> tuple[list[Any], list[Any], int, int, int]:
    """Return the results in one array and alone, and three counts of the array.

    The counts are the tensors read from files, the addresses of bases, and the turns after which free memory is
    returned to the system.
    """
    quiet()
    logging.getLogger("lightning_pipes").setLevel(logging.ERROR)
    reads: list[str] = []
    trims: list[bool] = []
    read = PretrainedWeights._read

    def counted(self: PretrainedWeights, key: str) -> torch.Tensor:
        reads.append(key)
        return read(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PretrainedWeights, "_read", counted)
        patch.setattr("lightning_pipes.arrays.array.trim_heap", lambda kept: trims.append(kept))
        outcomes = sorted(JobArray[Any](len(jobs), memory=memory).run(jobs), key=lambda each: each.index)
    assert not [each.error for each in outcomes if each.error]
    found = len(reads), len(BASES.union(*(addresses(module.net) for module in MODULES)))
    alone = [outcome.value for job in jobs for outcome in JobArray[Any](1).run([job])]
    return [each.value for each in outcomes], alone, *found, len(trims)


@pytest.fixture
def base(tmp_path: Path) -> str:
    from safetensors.torch import save_file

    g = torch.Generator().manual_seed(3)
    path = tmp_path / "base.safetensors"
    save_file({f"{n}.base.weight": torch.randn(WIDTH, WIDTH, generator=g) / 8 for n in range(DEPTH)}, path)
    return str(path)


def assert_alike(together: list[Any], alone: list[Any]) -> None:
    for (losses, weights), (losses_alone, weights_alone) in zip(together, alone, strict=True):
        assert losses == losses_alone
        assert weights.keys() == weights_alone.keys()
        assert all(torch.equal(weights[name], weights_alone[name]) for name in weights)


@pytest.mark.parametrize("module", ["net", pytest.param("*", marks=pytest.mark.slow)])
def test_one_base_is_held_and_read_once(module: str, base: str, tmp_path: Path) -> None:
    """Check siblings with adapters of different ranks, and checkpoints, which contain the base.

    Each sibling has three turns with a checkpoint. The last of them is also its last turn.
    """
    jobs = [Job(base, rank, 0.01 * rank, folder=str(tmp_path), module=module.strip("*")) for rank in (2, 4, 8)]
    for together, alone, reads, bases, trims in run_ranks(tune, 2, jobs, timeout=120):
        assert_alike(together, alone)
        assert reads == bases == DEPTH // 2
        assert trims == 3 * len(jobs)


def test_a_write_to_the_base_belongs_to_its_sibling(base: str) -> None:
    """Check that a sibling which writes the base trains as alone, and so do its neighbors."""
    jobs = [Job(base, 2, 0.01), Job(base, 4, 0.01, writes=True), Job(base, 8, 0.01)]
    for together, alone, _, bases, _ in run_ranks(tune, 2, jobs, timeout=120):
        assert_alike(together, alone)
        assert bases == 2 * DEPTH // 2


def swap_adapters(rank: int, jobs: Sequence[Job], device_bytes: int) -> tuple[Any, Any]:
    """Return the result of `tune` with states that take turns, and the statistics of their memory."""
    memory = MemorySwap(device_bytes)
    return tune(rank, jobs, memory), memory.statistics


def test_only_what_belongs_to_a_sibling_takes_turns(base: str) -> None:
    """Check four siblings in memory with room for two of their states.

    A state consists of two tensors for each layer, without the base, which stays on the device. Its tensors have 64 or
    128 numbers of four bytes, in places that are multiples of 512 bytes.
    """
    jobs = [Job(base, rank, 0.01) for rank in (1, 2, 1, 2)]
    state = DEPTH // 2 * 2 * 512
    for (together, alone, _, bases, _), found in run_ranks(swap_adapters, 2, jobs, 2 * state, timeout=120):
        assert_alike(together, alone)
        assert bases == DEPTH // 2
        assert found.peak_bytes == 2 * state
        assert found.bytes_in % state == 0
        assert found.bytes_in >= len(jobs) * state


def train_alone(rank: int, *jobs: Job) -> list[Any]:
    quiet()
    return [job() for job in jobs]


@pytest.mark.parametrize("module", ["net", pytest.param("*", marks=pytest.mark.slow)])
def test_rank_0_has_all_adapters_after_every_run(module: str, base: str) -> None:
    """Check that the layers stay distributed, so that two runs of an epoch continue each other as two epochs do."""
    jobs = [Job(base, 2, 0.1, module=module.strip("*"), epochs=3 - fits, fits=fits) for fits in (1, 2)]
    (zero, one), (zero_twice, one_twice) = zip(*run_ranks(train_alone, 2, *jobs, timeout=120), strict=True)
    assert_alike([zero, one], [zero_twice, one_twice])
    zero_weights, one_weights = zero[1], one[1]
    adapters = {f"net.{n}.{name}.weight" for n in range(DEPTH) for name in ("down", "up")}
    assert adapters < zero_weights.keys()
    assert len(zero_weights) == 2 * DEPTH + DEPTH // 2
    assert len(one_weights) == 3 * DEPTH // 2
    shared = zero_weights.keys() & one_weights.keys()
    assert shared == {name for name in one_weights if "base" not in name}
    assert all(torch.equal(zero_weights[name], one_weights[name]) for name in shared)
