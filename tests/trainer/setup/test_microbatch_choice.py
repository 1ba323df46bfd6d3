"""Tests of the choice of microbatches_by="auto" between micro-batches of samples and of tokens."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from lightning_pipes import PipelineStrategy
from lightning_pipes.engine.compute.rng import forked_rng
from lightning_pipes.ir import InputError
from lightning_pipes.ir.instruction import even_spans
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.data.sample import first_batch
from lightning_pipes.trainer.data.token_cut import TokenCutter
from tests.trainer.data.token_modules import LENGTHS, LitCausal, LitMasked, batch_of, fitted, mask_of
from tests.trainer.lit import differences, quiet, rank_zero_lines
from tests.trainers import make_trainer

UNEVEN, EVEN = LENGTHS[0], [9, 8, 9, 9, 8, 9, 9, 9]
CPU = torch.device("cpu")


class LitContrast(LitCausal):
    """A loss that compares the samples of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        words = self.layers(batch["input_ids"]) * batch["attention_mask"][..., None]
        self.shapes |= {tuple(batch["input_ids"].shape)}
        samples = words.sum(1)
        return F.cross_entropy(samples @ samples.T, torch.arange(len(samples)))


class LitNoLengths(LitCausal):
    """A module whose batches have no mask and no labels that are ignored."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"]), "labels": batch["labels"].clamp(min=0)}


def chosen(kind: type[LitCausal], ranks: int, settings: dict[str, Any], **options: Any) -> tuple[str, dict[str, Any]]:
    """Train a module with microbatches_by="auto". Return the line of the log about the choice, and the results."""
    with rank_zero_lines() as lines:
        found = fitted(kind, ranks, {"microbatches_by": "auto", **settings}, **options)
    return " ".join(line for line in lines if "microbatches_by='auto'" in line), found


BY_SAMPLES: dict[str, tuple[type[LitCausal], dict[str, Any], dict[str, Any], str]] = {
    "umpipe": (LitCausal, {"schedule": "umpipe"}, {}, "schedule 'umpipe' may cut a batch differently on each stage"),
    "whole loss": (LitCausal, {"loss": "batch"}, {}, "loss='batch' joins the outputs of micro-batches"),
    "unchecked": (LitCausal, {"check_loss": False}, {}, "check_loss=False leaves out the comparison"),
    "dropout": (LitCausal, {"verify": 1}, {"module": {"dropout": 0.1}}, "verify compares active dropout only with"),
    "mask": (LitMasked, {"module": ""}, {}, "or has a BlockMask"),
    "even": (LitCausal, {}, {"lengths": [EVEN]}, "3% of the tokens in the first batch are padding, and 0% if"),
    "no lengths": (LitNoLengths, {}, {}, "the first batch does not clearly show sequences of different lengths"),
}


@pytest.mark.parametrize("name", BY_SAMPLES)
def test_micro_batches_by_samples(name: str) -> None:
    """If sequences can't be sorted, or if this saves too little, the log gives the reason, and training works."""
    kind, settings, options, reason = BY_SAMPLES[name]
    line, found = chosen(kind, 1, settings, **{"lengths": [UNEVEN], **options})
    assert line.startswith("microbatches_by='auto' divides batches into micro-batches by samples: ")
    assert reason in line
    widths = {shape[1] for shape in found["shapes"]}
    assert len(widths) == 1


def chosen_on_ranks(rank: int) -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        "auto": chosen(LitCausal, 2, {"schedule": "auto", "partition": "auto", "microbatches": None}),
        "pipedream": chosen(LitCausal, 2, {"schedule": "pipedream"}),
        "contrast": chosen(LitContrast, 2, {}, lengths=[UNEVEN, UNEVEN]),
    }


@cache
def on_ranks() -> list[dict[str, tuple[str, dict[str, Any]]]]:
    return run_ranks(chosen_on_ranks, 2, timeout=480)


@pytest.mark.parametrize("name", ["auto", "pipedream"])
def test_choice_of_schedules(name: str) -> None:
    """Sequences are sorted with a chosen schedule, and if batches overlap."""
    line, _ = on_ranks()[0][name]
    assert line == (
        "microbatches_by='auto' divides batches into micro-batches by tokens: 70% of the tokens in the first batch are "
        "padding, and 16% if sequences are sorted by length"
    )
    for _, found in (each[name] for each in on_ranks()):
        assert {shape[1] for shape in found["shapes"]} > {9, 16, 29}


def test_loss_of_whole_batches() -> None:
    """A loss that compares samples is computed for whole batches, so micro-batches are not sorted."""
    assert "is computed once for all samples" in on_ranks()[0]["contrast"][0].split("by samples: ")[1]
    alone = fitted(LitContrast, 1, None, lengths=[UNEVEN, UNEVEN])
    for found in on_ranks():
        assert differences(found["contrast"][1]["weights"], alone["weights"], 1e-9) == []


def replicas(rank: int) -> tuple[str, list[tuple[int, ...]]]:
    lengths = [UNEVEN if rank < 2 else EVEN * 2] * 2
    line, found = chosen(LitCausal, 4, {"data_parallel": 2}, lengths=lengths, use_distributed_sampler=False)
    return line, found["shapes"]


def test_replicas_decide_together() -> None:
    """The replicas count the tokens of all of their batches, and make the same choice."""
    found = run_ranks(replicas, 4, timeout=240)
    assert "by tokens" in found[0][0]
    assert [len({shape[1] for shape in shapes}) > 1 for _, shapes in found] == [True, True, True, True]


def test_batches_that_can_not_be_sorted_later() -> None:
    """Batches without lengths, or with a BlockMask, are divided by samples."""
    cutter, spans = TokenCutter(2, is_required=False), even_spans(12, 4)
    batch = batch_of(UNEVEN)
    assert cutter.cut(batch, 12, spans, ()) is not None
    assert cutter.cut({**batch, "mask": mask_of(batch["attention_mask"].bool())}, 12, spans, ()) is None
    assert cutter.cut({"x": torch.ones(12, 3)}, 12, spans, ()) is None


class LitOwnData(LitCausal):
    """A module that makes its loaders, which Lightning requests after it has restored a checkpoint."""

    def train_dataloader(self) -> Any:
        return DataLoader(UNEVEN, batch_size=12, shuffle=True, collate_fn=batch_of)  # type: ignore[arg-type]


def resumed(rank: int, folder: str) -> list[Any]:
    quiet()
    found: list[Any] = []
    path = f"{folder}/last.ckpt"
    for epochs in (1, 2):
        pl.seed_everything(0, verbose=False)
        module = LitOwnData().double()
        strategy = PipelineStrategy("1f1b", 4, microbatches_by="auto", partition="parameters")
        trainer = make_trainer(devices=2, strategy=strategy, max_epochs=epochs)
        with rank_zero_lines() as lines:
            trainer.fit(module, ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
        found.append([[line for line in lines if "microbatches_by='auto'" in line], sorted(module.shapes)])
    return found


def test_resumed_run_decides_the_same(tmp_path: Path) -> None:
    """The data of the module are loaded once more for the choice if a checkpoint will be restored."""
    for rank, (before, after) in enumerate(run_ranks(resumed, 2, str(tmp_path), timeout=240)):
        assert before[0] == after[0]
        assert len(before[0]) == (rank == 0)
        assert "by tokens" in " ".join(before[0]) or rank
        assert len(before[1]) > 1
        assert len(after[1]) > 1


class Grouped(Sampler[list[int]]):
    """Batches of chosen samples."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = iter(batches)

    def __iter__(self) -> Any:
        return self.batches


def test_first_batch_of_samplers() -> None:
    """The batch is composed by a copy of the sampler, with its own random numbers, and no number is drawn here."""
    data: Any = list(range(100))

    def first(loader: Any) -> list[int]:
        with forked_rng(CPU):
            numbers: list[int] = first_batch(loader, CPU).tolist()
            return numbers

    shuffled = DataLoader(data, 4, shuffle=True)
    found = first(shuffled)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert first(shuffled) == found != [0, 1, 2, 3]
    assert torch.equal(before, torch.get_rng_state())
    assert first(DataLoader(data, 4)) == [0, 1, 2, 3]
    assert first(DataLoader(data, batch_sampler=Grouped([[7, 5], [1, 2]]))) == [7, 5]
    generator = torch.Generator().manual_seed(3)
    own = DataLoader(data, 4, sampler=RandomSampler(data, generator=generator))
    state = generator.get_state()
    assert first(own) == next(iter(own)).tolist()
    assert not torch.equal(state, generator.get_state())
    assert len(first(DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, True)))) == 5
    assert first(DataLoader([torch.arange(3)] * 2, batch_size=None)) == [0, 1, 2]  # type: ignore[arg-type]


def test_invalid_value() -> None:
    with pytest.raises(InputError, match="microbatches_by"):
        PipelineStrategy(microbatches_by="length")  # type: ignore[arg-type]
    PipelineStrategy("umpipe", microbatches_by="auto")
    PipelineStrategy(microbatches_by="auto", data_parallel=[2, 1])
    with pytest.raises(InputError, match=r"or set microbatches_by='auto'"):
        PipelineStrategy(microbatches_by="tokens", data_parallel=[2, 1])
