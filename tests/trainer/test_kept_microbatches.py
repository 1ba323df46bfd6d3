"""Stages that recompute some micro-batches, or recompute early, have the bits of stages that recompute none or all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_pipes.engine import Stage
from lightning_pipes.ir import Kind, Plan, Program, add_recomputations
from lightning_pipes.planning.planner import EvenPlanner
from lightning_pipes.strategies.v.schedule import V
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.eager import Eager
from tests.trainer.lit import WIDTH, Case, Lit, differences, train

MICROBATCHES = 4
PATTERNS = [None, (1, 2), (2, 3), (0, 1)]
"""The micro-batches that keep their activations; None if no stage recomputes."""
SECOND_FORWARDS = (0, 2 + 2 + 1, 1 + 1 + 1, 4 + 4 + 3)
"""For each pattern, the second forwards of a stage in three batches. The last batch has three micro-batches."""
LAYERS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "gpipe, late": {"schedule": "gpipe", "recompute": "late"},
    "interleaved": {"schedule": "interleaved", "schedule_args": {"stages_per_rank": 2}},
    "zero_bubble": {"schedule": "zero_bubble"},
    "v, late": {"schedule": "v", "recompute": "late"},
    "kfkb": {"schedule": "kfkb", "schedule_args": {"k": 2}},
    "both ends": {"schedule": Eager()},
}
UNITS: dict[str, dict[str, Any]] = {
    "1f1b by units": {"schedule": "1f1b", "module": ""},
    "v by units": {"schedule": "v", "module": ""},
    "zero_bubble by units, late": {"schedule": "zero_bubble", "module": "", "recompute": "late"},
    "interleaved by units": {**LAYERS["interleaved"], "module": ""},
}
CASES = {**LAYERS, **UNITS}
SLOW_ON_FOUR = {"gpipe, late", "zero_bubble", "kfkb", "both ends", "v by units", "interleaved by units"}


class Growing(nn.Module):
    """A layer that reads the buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * (1 + 0.1 * self.calls)).tanh()  # a norm after it would remove a factor
        self.calls += 1
        return x


class Rich(Lit):
    """A module with dropout, running statistics, in-place changes, and hooks that see each forward of a layer."""

    def __init__(self) -> None:
        super().__init__(layers=9, dropout=0.3, optimizer="sgd")
        for n in (1, 3, 5, 7):
            self.model[n] = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.LeakyReLU(0.5, inplace=True), Growing())
        for layer in self.model:
            layer.register_forward_hook(lambda module, args, out: out * 1.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sub_(0.5).mul_(3.0).tanh_()
        return self.model(x if self.trainer.precision == "64-true" else x.float())


@contextmanager
def kept(pattern: tuple[int, int], counts: dict[int, int]) -> Iterator[None]:
    """Make all plans keep these micro-batches, and count the second forwards of each stage."""
    plan, forward = EvenPlanner.plan, Stage.forward

    def keep(self: EvenPlanner, problem: Any) -> Plan:
        made = plan(self, problem)
        return replace(made, kept_microbatches=(pattern,) * made.n_stages)

    def count(self: Stage, *args: Any, **options: Any) -> Any:
        if type(self) is Stage:  # not a stage of a check that repeats a batch
            counts[self.number] = counts.get(self.number, 0) + bool(options.get("again"))
        return forward(self, *args, **options)

    with mock.patch.object(EvenPlanner, "plan", keep), mock.patch.object(Stage, "forward", count):
        yield


def train_all(rank: int, names: list[str], ranks: int, folder: str) -> list[list[dict[str, Any]]]:
    """Return the results of each case if all micro-batches are kept, some of them, and none of them."""
    found = []
    for name in names:
        of_case = []
        for number, pattern in enumerate(PATTERNS):
            settings = {"partition": "parameters", "microbatches": MICROBATCHES, "recompute": True, **CASES[name]}
            counts: dict[int, int] = {}
            if pattern is None:
                settings["recompute"] = False
            trainer = {"gradient_clip_val": 0.05, "precision": "bf16-mixed" if name == "interleaved" else "64-true"}
            with kept(pattern or (0, 1), counts):
                case = Case(Rich, {}, settings, trainer, evaluate=True)
                of_case.append(train(case, ranks, Path(folder) / f"{name}-{number}"))
            of_case[-1]["again"] = counts
        found.append(of_case)
    return found


def check_cases(names: list[str], ranks: int) -> None:
    """Train the cases, compare all results with those without recomputation, and count the second forwards."""
    of_ranks = run_ranks(train_all, ranks, names, ranks, mkdtemp(), timeout=300)
    for n, name in enumerate(names):
        again: list[dict[int, int]] = [{} for _ in PATTERNS]
        for results in of_ranks:
            for number, found in enumerate(results[n]):
                again[number] |= found.pop("again")
                assert differences(found, results[n][0], 0.0, f"{name}, {PATTERNS[number]}") == []
        last = max(again[0])
        for number, second in enumerate(SECOND_FORWARDS):
            assert again[number] == {stage: second * (stage < last) for stage in range(last + 1)}, name


@pytest.mark.parametrize("kind", [LAYERS, UNITS], ids=["layers", "units"])
def test_two_ranks(kind: dict[str, Any]) -> None:
    check_cases(list(kind), 2)


def test_four_ranks() -> None:
    check_cases([name for name in CASES if name not in SLOW_ON_FOUR], 4)


@pytest.mark.slow
def test_other_schedules_on_four_ranks() -> None:
    check_cases([name for name in CASES if name in SLOW_ON_FOUR], 4)


@dataclass(frozen=True)
class EarlyV(V):
    """The schedule v with each recomputation directly after its forward, and before the forward of the last stage."""

    def make_planner(self) -> object:
        return None

    def program(self, plan: Plan) -> Program:
        rows = []
        for row in add_recomputations(super().program(plan), plan).head:
            again = {i._replace(kind=Kind.F): i for i in row if i.kind is Kind.R}
            kept = [i for i in row if i.kind is not Kind.R]
            rows.append(tuple(each for i in kept for each in ((i, again[i]) if i in again else (i,))))
        return Program(tuple(rows))


class ChangesInput(Lit):
    """A module that changes its batch in place before the layers, and reads it after them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sub_(0.5).mul_(3.0).tanh_()
        return self.model(x) + x[:, :3]


def train_early(rank: int, folder: str) -> dict[str, list[dict[str, Any]]]:
    """Return the results by layers and by units, without recomputation and with early recomputation."""
    found = {}
    for cut, module in {"layers": None, "units": ""}.items():
        settings = {"schedule": EarlyV(times=(1, 1, 1, 0)), "partition": "parameters", "module": module}
        cases = {
            setting: Case(ChangesInput, {}, {**settings, "microbatches": MICROBATCHES, "recompute": setting})
            for setting in (False, True)
        }
        found[cut] = [train(case, 2, Path(folder) / f"{cut}-{setting}") for setting, case in cases.items()]
    return found


def test_a_stage_recomputes_before_the_last_stage_runs() -> None:
    """A rank has the first and the last stage. The last stage finds the batch as it was loaded."""
    plain = train(Case(ChangesInput), 1, mkdtemp())
    for results in run_ranks(train_early, 2, mkdtemp(), timeout=120):
        for cut, (without, early) in results.items():
            assert differences(early, without, 0.0, cut) == []
            assert differences(early["weights"], plain["weights"], at=cut) == []
