"""Checks that training in a pipeline has the gradients, weights, logs and results of one process without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

import pytest

from lightning_pipes.ir import Instruction, Kind, Plan, Policy, RankView
from lightning_pipes.testing.ranks import run_ranks
from tests.cases import selected_values
from tests.trainer.lit import Case, Lit, LitHooked, LitOutside, LitTied, differences, train, train_cases

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", "schedule_args": {"stages_per_rank": 2}},
    "kfkb": {"schedule": "kfkb", "schedule_args": {"k": 2}},
    "zero_bubble": {"schedule": "zero_bubble"},
    "hanayo": {"schedule": "hanayo"},
    "v": {"schedule": "v"},
    "ready": {"schedule": "ready"},
}
TIED = {"model.4.weight": "model.0.weight"}  # name of the shared weights on a rank that only has the last layer
CLIPPED = {"gradient_clip_val": 0.05}


@dataclass(frozen=True)
class BackwardFirst(Policy):
    """A policy that runs backwards as soon as they are ready, with at most three micro-batches in flight."""

    name: ClassVar[str] = "backward first"

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        first = ready[0]
        held = sum(view.in_flight.values())
        return None if first.kind is Kind.F and held >= 3 * plan.spans(Kind.F, 0)[-1].rows else first


def pipeline(schedule: str, **settings: Any) -> dict[str, Any]:
    """Return the arguments of the strategy for a schedule, with four micro-batches."""
    return {**SCHEDULES[schedule], "microbatches": 4, **settings}


CASES: dict[tuple[str, int], Case] = {}
for n in (2, 4):
    for name in SCHEDULES:
        CASES[name, n] = Case(Lit, strategy=pipeline(name), evaluate=True)
    CASES["outside", n] = Case(LitOutside, strategy=pipeline("1f1b"), trainer=CLIPPED)
    CASES["outside, interleaved", n] = Case(LitOutside, strategy=pipeline("interleaved"), trainer=CLIPPED)
    CASES["tied", n] = Case(LitTied, strategy=pipeline("1f1b"), trainer=CLIPPED, evaluate=True)
    CASES["accumulate", n] = Case(
        LitOutside, {"optimizer": "sgd"}, pipeline("gpipe"), {"accumulate_grad_batches": 2, "max_epochs": 2}
    )
    CASES["outside, zero_bubble", n] = Case(LitOutside, strategy=pipeline("zero_bubble"), trainer=CLIPPED)
    CASES["recompute", n] = Case(LitOutside, strategy=pipeline("kfkb", recompute=True))
CASES["hooks", 2] = Case(LitHooked, strategy=pipeline("1f1b"), trainer={"max_epochs": 2})
CASES["policy", 2] = Case(LitOutside, strategy={"schedule": BackwardFirst(), "microbatches": 4})
CASES["clip by value", 2] = Case(
    Lit, strategy=pipeline("1f1b"), trainer={**CLIPPED, "gradient_clip_algorithm": "value"}
)
CASES["empty stages", 4] = Case(
    LitOutside, strategy=pipeline("1f1b", partition=[0, 5, 5]), evaluate=True, trainer=CLIPPED
)
CASES["more micro-batches than samples", 2] = Case(Lit, strategy=pipeline("1f1b", microbatches=50))
CASES["gloo", 2] = Case(Lit, strategy=pipeline("1f1b", transport="gloo"), evaluate=True)
CASES["accumulate, zero_bubble", 2] = Case(
    LitTied, {"optimizer": "sgd"}, pipeline("zero_bubble", recompute=True), {"accumulate_grad_batches": 2}
)
CASES["one rank", 1] = Case(LitOutside, strategy=pipeline("1f1b"), trainer=CLIPPED, evaluate=True)
CASES["two stages on one rank", 1] = Case(LitTied, strategy=pipeline("interleaved"), trainer=CLIPPED)


QUICK = {"1f1b", "interleaved", "zero_bubble", "tied", "empty stages"}
"""Cases on four ranks that always run. The other cases on four ranks resemble cases on two ranks and are slow tests."""


def is_slow(key: tuple[str, int]) -> bool:
    """Return whether only slow test runs contain a case."""
    return key[1] == 4 and key[0] not in QUICK


@cache
def in_a_pipeline(ranks: int) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the results of all ranks for each selected case. Cases with this number of ranks share processes."""
    selected = {*selected_values(test_parity, "key"), ("1f1b", 4)}
    keys = [key for key in CASES if key[1] == ranks and key in selected]
    found = run_ranks(train_cases, ranks, [CASES[k] for k in keys], ranks, mkdtemp(), timeout=180)
    return {key: [of_rank[n] for of_rank in found] for n, key in enumerate(keys)}


@cache
def on_one_process(key: tuple[str, int]) -> dict[str, Any]:
    """Return the results of a case on one process without a pipeline."""
    return train(CASES[key].plain(), 1, Path(mkdtemp()))


@pytest.mark.parametrize(
    "key",
    [pytest.param(key, id=f"{key[0]} on {key[1]}", marks=[pytest.mark.slow] if is_slow(key) else []) for key in CASES],
)
def test_parity(key):
    """All ranks report the results of one process, and together they hold its gradients."""
    ranks, plain = in_a_pipeline(key[1])[key], on_one_process(key)
    rows = ranks[0].pop("rows", plain["rows"])
    assert differences(rows, plain["rows"]) == []
    for found in ranks:
        for what in plain.keys() - {"rows", "gradients"}:
            assert differences(found[what], plain[what], at=what) == []
    for *parts, whole in zip(*(found["gradients"] for found in ranks), plain["gradients"], strict=True):
        assert {TIED.get(name, name) for part in parts for name in part} == set(whole)
        for part in parts:
            assert differences(part, {name: whole[TIED.get(name, name)] for name in part}) == []


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_recomputation_has_the_bits_of_late_recomputation(ranks):
    """Stages that recompute before the gradient arrives draw the same numbers as stages that recompute afterwards."""
    cases = [
        Case(
            Lit,
            {"dropout": 0.2},
            pipeline(schedule, recompute=recompute, partition="parameters", **settings),
            trainer=CLIPPED,
        )
        for schedule, settings in (("interleaved", {}), ("v", {}), ("1f1b", {"module": ""}))
        for recompute in (True, "late")
    ]
    for found in run_ranks(train_cases, ranks, cases, ranks, mkdtemp(), timeout=180):
        for early, late in zip(found[::2], found[1::2], strict=True):
            assert differences(early, late, tolerance=0.0) == []


def test_every_rank_holds_its_layers_only():
    """No parameter has gradients on two ranks."""
    ranks = in_a_pipeline(4)["1f1b", 4]
    held = [set(found["gradients"][0]) for found in ranks]
    assert all(held)
    assert sum(map(len, held)) == len(set().union(*held))
