"""Tests of losses that are means over tokens, or sums, in a pipeline and in one process."""

from __future__ import annotations

import re
import warnings
from functools import cache
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import Span
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.results import loss_weights
from lightning_pipes.trainer.results.loss_weights import candidates_differ, find_candidates
from tests.trainer.lit import differences, plain_values, quiet
from tests.trainers import make_trainer

WORDS, TOKENS, ROWS = 7, 5, 8
LENGTHS = ([5, 1, 2, 5, 4, 3, 1, 5], [2, 5, 5, 1, 1, 2, 3, 5], [1, 3, 3, 5, 5, 5, 2, 2])


def batches(lengths: Any = LENGTHS) -> list[dict[str, torch.Tensor]]:
    """Return batches of sequences with the given lengths. Labels after the end of a sequence are -100."""
    generator, found = torch.Generator().manual_seed(0), []
    for each in lengths:
        tokens = torch.randint(0, WORDS, (ROWS, TOKENS), generator=generator)
        padding = torch.arange(TOKENS)[None] >= torch.tensor(each)[:, None]
        found.append(
            {"tokens": tokens, "labels": tokens.masked_fill(padding, -100), "rest": ~padding & (tokens % 3 > 0)}
        )
    return found


class LitTokens(pl.LightningModule):
    """A mean over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
        self.layers = nn.Sequential(nn.Embedding(WORDS, 4), *blocks, nn.Linear(4, WORDS))

    def losses(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.layers(batch["tokens"])
        loss = self.losses(logits, batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", batch["tokens"].double().mean(), on_step=True, on_epoch=True)
        right = (logits.argmax(-1) == batch["labels"])[batch["labels"] != -100]
        self.log("accuracy", right.double().mean(), batch_size=ROWS)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class LitShifted(LitTokens):
    def losses(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class LitSequences(LitTokens):
    """A mean over sequences, some of which have no label after their first one."""

    def losses(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"][:, 1:]
        each = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none").sum(1)
        counts = (labels != -100).sum(1)
        return (each / counts.clamp(min=1)).sum() / (counts > 0).sum()


class LitSum(LitTokens):
    def losses(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return 0.1 * F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten(), reduction="sum")


class LitMasked(LitTokens):
    """Means that are divided by a count, and are NaN if the count is zero."""

    def losses(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        each = F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten(), reduction="none")
        mask = batch["rest"].flatten().double()
        return (each * mask).sum() / mask.sum()


class LitOwnWeight(LitTokens):
    """A weight that does not follow from the labels."""

    def losses(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        each = F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten(), reduction="none")
        return (each * self.counts(batch)).sum() / self.counts(batch).sum()

    def counts(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (batch["tokens"].flatten() % 3).double()

    def microbatch_weight(self, batch: Any) -> torch.Tensor:
        return self.counts(batch).sum()


class LitItems(LitTokens):
    """A loss as in Hugging Face models, which receives the number of items of the whole batch."""

    def losses(self, logits: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return total / batch["num_items_in_batch"]


class LitInside(LitTokens):
    """A loss that the last layer computes."""

    def __init__(self) -> None:
        super().__init__()
        embedding, *blocks, head = self.layers
        self.layers = nn.ModuleList([embedding, *blocks, Loss(head)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = batch["tokens"]
        for layer in list(self.layers)[:-1]:
            h = layer(h)
        loss = self.layers[-1](h, batch["labels"])
        self.log("loss", loss)
        return loss


class Loss(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten(), ignore_index=-100)


class LitZeroHead(LitTokens):
    """A module with equal losses for all samples in the first batch."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.layers[-1].weight)
        nn.init.zeros_(self.layers[-1].bias)


class LitZeroHeadShifted(LitZeroHead, LitShifted):
    pass


class WithUnused(nn.Module):
    """A layer that also returns a tensor that the loss does not use."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x), x * 2


class LitZeroHeadWithUnused(LitZeroHeadShifted):
    """The same, with layers that return more than the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1] = WithUnused(self.layers[-1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.losses(self.layers(batch["tokens"])[0], batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class LitZeroHeadOutside(LitShifted):
    """Equal losses for all samples in the first batch, which do not depend on the outputs of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WORDS, WORDS)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def losses(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().losses(self.head(logits), batch)


class LitFrozenZeroHead(LitZeroHeadOutside):
    """The same, if no weight around the layers trains."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)


class LitHookedWeight(LitZeroHeadShifted):
    """A module that keeps the gradients that a hook of its last weight gets."""

    heard: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].weight.register_hook(lambda gradient: self.heard.append(gradient.clone()))


FULL = [TOKENS] * ROWS
NONE_IN_A_PART = [5, 5, 3, 2, 0, 0, 4, 1]  # with four micro-batches, the third one has no label
UNCHECKED = "own, unchecked"
NO_NUMBER = "no label in a part, no number"
NOT_TOLD = {UNCHECKED, NO_NUMBER}
"""Cases in which the first batch does not show the weights of the accuracy."""
CASES: dict[str, tuple[type[LitTokens], Any, dict[str, Any]]] = {
    "tokens": (LitTokens, LENGTHS, {}),
    "shifted": (LitShifted, LENGTHS, {}),
    "sequences": (LitSequences, LENGTHS, {}),
    "sum": (LitSum, LENGTHS, {}),
    "mask": (LitMasked, LENGTHS, {}),
    "own": (LitOwnWeight, LENGTHS, {}),
    UNCHECKED: (LitOwnWeight, LENGTHS, {"check_loss": False}),
    "items": (LitItems, LENGTHS, {}),
    "padded later": (LitTokens, (FULL, FULL, *LENGTHS), {}),
    "padded at first": (LitShifted, (*LENGTHS, FULL, *LENGTHS), {}),
    "no label in a part": (LitTokens, (NONE_IN_A_PART, *LENGTHS), {"microbatches": 4}),
    NO_NUMBER: (LitMasked, (NONE_IN_A_PART, *LENGTHS), {"microbatches": 4}),
    "accumulated": (LitTokens, (*LENGTHS, FULL), {"accumulate_grad_batches": 2}),
    "recomputed": (LitShifted, LENGTHS, {"recompute": True}),
    "equal losses": (LitZeroHead, LENGTHS, {}),
    "equal losses, shifted": (LitZeroHeadShifted, LENGTHS, {}),
    "equal losses, units": (LitZeroHeadShifted, LENGTHS, {"module": ""}),
    "equal losses, outputs that are not used": (LitZeroHeadWithUnused, LENGTHS, {}),
    "equal losses, head outside": (LitZeroHeadOutside, LENGTHS, {}),
    "kfkb": (LitTokens, LENGTHS, {"schedule": "kfkb", "schedule_args": {"k": 2}, "microbatches": 4}),
    "zero_bubble": (LitShifted, LENGTHS, {"schedule": "zero_bubble", "microbatches": 4}),
    "interleaved": (LitTokens, LENGTHS, {"schedule": "interleaved", "microbatches": 4}),
    "umpipe": (LitTokens, LENGTHS, {"schedule": "umpipe", "schedule_args": {"forward": [2, 4]}, "microbatches": None}),
}


class Heard(pl.Callback):
    """Records the logged values and the loss of each step."""

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.logged.append(plain_values([dict(trainer.logged_metrics), outputs["loss"]]))


def fitted(kind: type[LitTokens], lengths: Any, settings: dict[str, Any], strategy: bool, ranks: int) -> dict[str, Any]:
    """Train and return the weights, the logs, the warnings, and how micro-batches were weighted."""
    quiet()
    pl.seed_everything(3, verbose=False)
    module, heard = kind().double(), Heard()
    options = {"strategy": "auto"}
    given = {"microbatches": 2, **settings}
    accumulate = given.pop("accumulate_grad_batches", 1)
    data: Any = batches(lengths)
    if kind is LitItems:
        data = [{**each, "num_items_in_batch": (each["labels"] != -100).sum()} for each in data]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if strategy:
            options["strategy"] = made = PipelineStrategy(partition="parameters", **given)
        trainer = make_trainer(
            devices=ranks,
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            callbacks=[heard],
            log_every_n_steps=1,
            **options,
        )
        trainer.fit(module, DataLoader(data, batch_size=None))
    said = [
        str(w.message) for w in caught if "mean over samples" in str(w.message) or "does not show" in str(w.message)
    ]
    facts = made.report.record.facts.get("micro-batches weighted by", "") if strategy else ""
    return {
        "weights": plain_values(dict(module.state_dict())),
        "logged": heard.logged,
        "metrics": plain_values(dict(trainer.callback_metrics)),
        "said": said,
        "by": facts,
    }


def fitted_all(rank: int, names: list[str]) -> dict[str, Any]:
    return {name: fitted(*CASES[name], strategy=True, ranks=2) for name in names}


@cache
def piped() -> list[dict[str, Any]]:
    return run_ranks(fitted_all, 2, [*CASES], timeout=240)


BY = {
    "tokens": "labels in batch['labels'] that are not -100",
    "shifted": "labels in batch['labels'] that are not -100, shifted by one",
    "sequences": "samples with labels in batch['labels'] that are not -100, shifted by one",
    "sum": "1: it is a sum",
    "mask": "entries of batch['rest'] that are not 0",
    "own": "microbatch_weight",
    "items": "1: it is a sum",
    "equal losses": "labels in batch['labels'] that are not -100",
    "equal losses, shifted": "labels in batch['labels'] that are not -100, shifted by one",
    "equal losses, units": "labels in batch['labels'] that are not -100, shifted by one",
    "equal losses, outputs that are not used": "labels in batch['labels'] that are not -100, shifted by one",
    "equal losses, head outside": "labels in batch['labels'] that are not -100, shifted by one",
}


@pytest.mark.parametrize("name", CASES)
def test_weights_that_one_process_trains(name):
    """Check that weights and logs equal the results of one process, and how micro-batches are weighted."""
    plain = fitted(*CASES[name], strategy=False, ranks=1)
    for by_name in piped():
        found = by_name[name]
        assert differences(found["weights"], plain["weights"]) == []
        for key in ("logged", "metrics"):
            expected = [d for d in differences(found[key], plain[key]) if "accuracy" not in d or name not in NOT_TOLD]
            assert expected == [], key
    assert piped()[0][name]["said"] == []
    if name in BY:
        assert piped()[0][name]["by"] == BY[name]


class Sharded(torch.utils.data.Dataset[Any]):
    def __init__(self, lengths: Any) -> None:
        self.rows = [{k: v[n] for k, v in batch.items()} for batch in batches(lengths) for n in range(ROWS)]

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


ALL_IN_ONE = [1, 5, 1, 4, 1, 5, 1, 3]
"""One of two replicas gets every second sample, each of which has one label."""
OF_REPLICAS = [(LitTokens, (ALL_IN_ONE, *LENGTHS)), (LitSum, LENGTHS), (LitShifted, (FULL, ALL_IN_ONE, *LENGTHS))]


def replicated(rank: int, strategy: bool) -> list[Any]:
    found = []
    for kind, lengths in OF_REPLICAS:
        quiet()
        pl.seed_everything(3, verbose=False)
        module = kind().double()
        made: Any = PipelineStrategy(data_parallel=2, microbatches=2, partition="parameters") if strategy else "auto"
        trainer = make_trainer(devices=4 if strategy else 1, strategy=made, max_epochs=1, use_distributed_sampler=False)
        data = Sharded(lengths)
        own = range(rank // 2, len(data), 2) if strategy else range(len(data))
        trainer.fit(module, DataLoader(data, batch_size=ROWS // 2 if strategy else ROWS, sampler=own))
        found.append(plain_values(dict(module.state_dict())))
    return found


def test_replicas_are_one_batch():
    """Check that replicas train like one process with all of their samples, in another order."""
    plain = replicated(0, False)
    for found in run_ranks(replicated, 4, True, timeout=180):
        assert differences(found, plain) == []


def fitted_with_few_entries(rank: int) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_weights, "_COMPARED_GRADIENTS", 8)
        assert [g.numel() for g in loss_weights.first_entries([torch.ones(4, 4), torch.ones(3)])] == [8, 3]
        return [
            fitted(kind, LENGTHS, settings, strategy=True, ranks=2)
            for kind, settings in ((LitZeroHeadOutside, {}), (LitZeroHeadShifted, {"module": ""}))
        ]


def test_a_few_entries_of_the_gradients_of_a_large_head_decide():
    plain = [fitted(kind, LENGTHS, {}, strategy=False, ranks=1) for kind in (LitZeroHeadOutside, LitZeroHeadShifted)]
    for by_rank in run_ranks(fitted_with_few_entries, 2, timeout=120):
        for found, expected in zip(by_rank, plain, strict=True):
            assert differences(found["weights"], expected["weights"]) == []
            assert found["said"] == []


def gradients_of_hooks(rank: int, module: str | None) -> list[Any]:
    fitted(LitHookedWeight, LENGTHS, {"module": module}, strategy=True, ranks=2)
    return plain_values(LitHookedWeight.heard)


@pytest.mark.parametrize("module", [None, ""], ids=["layers", "units"])
def test_hooks_of_weights_get_gradients_of_training_steps_only(module):
    LitHookedWeight.heard.clear()
    fitted(LitHookedWeight, LENGTHS, {}, strategy=False, ranks=1)
    last, _ = run_ranks(gradients_of_hooks, 2, module, timeout=120)
    assert differences(last, plain_values(LitHookedWeight.heard)) == []


def test_what_a_first_loss_does_not_tell():
    """Check the warnings about a first batch that does not show how micro-batches are weighted.

    A frozen head of zeros after the layers makes all losses equal, and all gradients 0. A loss inside of the layers is
    known only when the batch is trained.
    """
    (nothing, later), others = run_ranks(told, 2, timeout=120)
    assert others == [[], []]
    assert nothing
    assert len(later) == 1
    assert "in batch 0 does not show whether micro-batches are weighted by samples or by labels in" in nothing[0]
    assert re.search(
        r"differs from one process in this batch; from the next one on they are weighted by labels", later[0]
    )


def told(rank: int) -> list[list[str]]:
    kinds = (LitFrozenZeroHead, LitInside)
    return [fitted(kind, LENGTHS[1:], {}, strategy=True, ranks=2)["said"] for kind in kinds]


@pytest.mark.parametrize("types", [{torch.float64}, {torch.float32, torch.float64}])
def test_a_loss_in_double_precision_of_numbers_in_single_precision(types):
    """Weights of samples that NumPy has made are in double precision, and so is the loss of a model in float32."""
    rounded = loss_weights.losses_differ(1.0, 1.0 + 1e-7, [1.0], torch.float64, types)
    assert rounded == (torch.float32 not in types)
    assert loss_weights.losses_differ(1.0, 1.0 + 1e-3, [1.0], torch.float64, types)


def test_candidates_of_a_batch():
    (batch,) = batches(LENGTHS[:1])
    spans = [Span(0, 3), Span(3, 8)]
    found = {each.name: [each.of(span) for span in spans] for each in find_candidates(LitTokens(), batch, ROWS, spans)}
    labels = "labels in batch['labels'] that are not -100"
    assert found["samples"] == [3, 5]
    assert found[labels] == [8, 18]
    assert found[f"{labels}, shifted by one"] == [5, 13]
    assert found[f"samples with {labels}"] == [3, 5]
    assert found[f"samples with {labels}, shifted by one"] == [2, 4]
    assert found["entries of batch['rest'] that are not 0"] == [5, 15]
    assert found["1: it is a sum"] == [1, 1]
    (full,) = batches([FULL])
    del full["rest"]
    assert not candidates_differ(find_candidates(LitTokens(), full, ROWS, spans)[:-1], spans)
