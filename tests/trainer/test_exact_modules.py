"""Checks that modules similar to public code train as in one process, without warnings about differences."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from tests.cases import selected_values
from tests.compat.runs import Found, Row, compare, on_one_process, pipeline, train
from tests.trainer.exact_modules import MODULES, Exact

DIFFERENCES = ("differ", "not a mean", "several samples")
"""Phrases in warnings that the training differs from the training of one process."""


def row_of(kind: type[Exact]) -> Row:
    """Return the description of a run with a module."""
    return Row(
        "",
        kind.__name__,
        module=kind,
        trainer=lambda folder: {"max_epochs": 1, "num_sanity_val_steps": 0},
        loaders=lambda: {"train_dataloaders": kind().loader()},
        strategy={"partition": "parameters", **kind.strategy},
        then=lambda trainer, module, folder: is_cut_by_units(trainer.strategy),
        differs=frozenset({"then"}),
    )


def is_cut_by_units(strategy: Any) -> bool:
    return isinstance(strategy, PipelineStrategy) and bool(strategy.decision.pieces)


def train_all(rank: int, kinds: list[type[Exact]], folder: str) -> list[Found]:
    """Train all modules in the same processes."""
    return [train(row := row_of(kind), partial(pipeline, row, {}, 2), 2, Path(folder) / row.name) for kind in kinds]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Exact], list[Found]]:
    """Return the results of both ranks for each selected module."""
    kinds = selected_values(test_training_equals_one_process, "kind")
    found = run_ranks(train_all, 2, kinds, str(tmp_path_factory.mktemp("exact")), timeout=30 + 3 * len(kinds))
    return {kind: list(of_ranks) for kind, *of_ranks in zip(kinds, *found, strict=True)}


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_training_equals_one_process(kind: type[Exact], ranks: dict[type[Exact], list[Found]]) -> None:
    """A module trains as in one process, without warnings about differences, and is cut by units only if expected."""
    found = ranks[kind]
    assert [each.get("error") for each in found] == [None, None]
    if not kind.is_random:
        assert compare(row_of(kind), found, on_one_process(row_of(kind))) == []
    warned = [text for each in found for text in each["warnings"]]
    assert [text for text in warned if any(words in text for words in DIFFERENCES)] == []
    assert [each["then"] for each in found] == [kind.by_units] * 2
