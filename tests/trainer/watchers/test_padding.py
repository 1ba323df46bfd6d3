"""Tests of the advice on padding."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.data.token_cut import TokenCounts
from lightning_pipes.trainer.watchers.padding import describe_padding
from tests.trainer.data.token_modules import LitCausal, batch_of
from tests.trainer.lit import quiet, rank_zero_lines
from tests.trainers import make_trainer

UNEVEN, EVEN = [2, 9, 4, 29, 6, 5, 11, 3], [9, 8, 9, 9, 8, 9, 9, 9]


def advised(lengths: list[int], batches: int, **settings: Any) -> tuple[list[str], str, tuple[str, ...]]:
    """Return the log lines on padding, the text of the report, and the notes of its advice."""
    quiet()
    pl.seed_everything(0, verbose=False)
    strategy = PipelineStrategy(**{"schedule": "1f1b", "microbatches": 4, "partition": "parameters", **settings})
    trainer = make_trainer(devices=2, strategy=strategy, max_epochs=1)
    with rank_zero_lines() as lines:
        trainer.fit(LitCausal(), DataLoader([batch_of(lengths)] * batches, batch_size=None))
    return [line for line in lines if "padding" in line], str(strategy.report), strategy.report.advice.notes


def advised_all(rank: int) -> list[tuple[list[str], str, tuple[str, ...]]]:
    return [
        advised(UNEVEN, 5),
        advised(UNEVEN, 2, module="", schedule="auto", partition="auto"),
        advised(UNEVEN, 5, schedule="pipedream"),
        advised(EVEN, 5),
        advised(UNEVEN, 5, microbatches_by="tokens"),
    ]


def test_advice_in_log_and_report() -> None:
    """The log names the share of padding once, and so does the report, also after few batches."""
    text = "70% of the tokens in the first batches are padding. With microbatches_by='tokens' or 'auto', "
    usual, few, overlapping, even, by_tokens = run_ranks(advised_all, 2, timeout=240)[0]
    for lines, report, notes in (usual, few, overlapping):
        assert len([line for line in lines if text in line]) == (lines is not few[0])
        assert text in report
        assert any(text in note for note in notes)
    for lines, report, notes in (even, by_tokens):
        assert not any("in the first batches" in line for line in [*lines, report, *notes])


@pytest.mark.parametrize(
    ("counts", "advises"),
    [
        (TokenCounts(), False),
        (TokenCounts(86, 100, 87), False),
        (TokenCounts(84, 100, 97), False),
        (TokenCounts(84, 100, 94), True),
    ],
)
def test_limits_of_the_advice(counts: TokenCounts, advises: bool) -> None:
    """Padding is only named if there is much of it, and if sorted sequences have less."""
    assert bool(describe_padding(counts)) == advises


def test_batches_without_sequences_are_not_counted() -> None:
    """One-hot targets and images have no lengths."""
    from lightning_pipes.ir.instruction import even_spans
    from lightning_pipes.trainer.data.token_cut import TokenCutter

    targets = torch.eye(5, dtype=torch.bool)[[0, 3, 2, 1, 4, 4, 0, 1]]
    for batch in ((torch.randn(8, 5), targets), (torch.randn(8, 3, 4, 4), torch.arange(8)), torch.randn(8, 5)):
        assert TokenCutter(2).count_tokens(batch, 8, even_spans(8, 4)) is None
