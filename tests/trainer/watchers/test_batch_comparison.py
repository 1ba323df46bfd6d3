"""Tests of the comparison of the gradients of a whole batch with those of its micro-batches."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from tests.cases import selected_values
from tests.trainer.lit import quiet
from tests.trainer.watchers.mixing_modules import EXACT, FAILING, FAULTS, Plain
from tests.trainers import make_trainer

CUTS: dict[str, dict[str, Any]] = {
    "layers": {"partition": [2], "module": "net"},
    "units": {"partition": "parameters", "module": "", "loss": "microbatch"},
}
Case = tuple[str, type[Plain]]
CASES: list[Case] = [(cut, kind) for cut in CUTS for kind in (*FAULTS, *EXACT, *FAILING)]


def fit(cut: str, kind: type[Plain], **settings: Any) -> tuple[list[str], list[str]]:
    """Train a module on this rank, and return the warnings and the lines in the log."""
    quiet()
    torch.manual_seed(0)
    strategy = PipelineStrategy("1f1b", microbatches=4, **CUTS[cut], **settings)
    trainer = make_trainer(strategy=strategy, devices=2, max_epochs=kind.epochs, precision="64-true")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.addHandler(handler)
    log.setLevel("INFO")
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            module = kind()
            trainer.fit(module, module.loader())
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return [str(each.message) for each in warned], lines


def fit_all(rank: int, cases: list[Case]) -> list[tuple[list[str], list[str]]]:
    return [fit(*case) for case in cases]


@pytest.fixture(scope="module")
def found() -> dict[Case, tuple[list[str], list[str]]]:
    """Return the warnings and the log of rank 0 for each selected case."""
    cases = selected_values(test_differences_are_named, "case")
    of_ranks = run_ranks(fit_all, 2, cases, timeout=60 + 10 * len(cases))
    return dict(zip(cases, of_ranks[0], strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1].__name__}-{case[0]}")
def test_differences_are_named(case: Case, found: dict[Case, tuple[list[str], list[str]]]) -> None:
    """A module that trains differently in micro-batches is warned of, and an equal module is compared silently.

    If the comparison fails, the training continues, and the log gives the reason.
    """
    warned, lines = found[case]
    own = [text for text in warned if "micro-batch" in text]
    failed = [line for line in lines if "not compared with its micro-batches" in line]
    assert len(failed) == (case[1] in FAILING)
    assert all("too many samples" in line for line in failed)
    assert any(each in text for text in own for each in case[1].named) == bool(case[1].named)
    assert bool(own) == bool(case[1].named)
