"""Layers that move between two batches with all that belongs to them, to the bit as if they had stayed."""

from __future__ import annotations

import copy
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_pipes.engine.watch.points import Fault
from lightning_pipes.ir import Plan, PlanError, Span
from lightning_pipes.testing.patience import patience
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from lightning_pipes.trainer.module.capture import Interceptor
from lightning_pipes.trainer.module.pipelined import CutModule
from tests.trainer.lit import WIDTH, Case, Lit, LitOutside, LitTied, differences, train

LAYERS = 6
CUTS = (3, 1, 5, 0, 4, 2)
"""Where the second stage begins, batch by batch."""


class Block(nn.Module):
    """Has all kinds of state: weights, one of them frozen, running averages, a buffer that is not saved, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)  # what a norm takes away has noise for a gradient
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("count", torch.zeros(1), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.calls += 1
        return self.norm(self.linear(x)) * self.scale + 0.01 * self.count + 0.001 * self.calls

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class LitRich(LitOutside):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = nn.Sequential(*(Block() for _ in range(LAYERS - 1)), nn.Linear(WIDTH, 3))


class LitMeta(Lit):
    """No process ever has all of its layers."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with torch.device("meta"):
            self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS - 1)), nn.Linear(WIDTH, 3))


class Moves(Callback):
    """Has the next batch run with another cut."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        strategy = trainer.strategy
        plan = strategy.running.windows[-1].plan
        self.trained.append(plan.layers[1].start)
        start = CUTS[(len(self.trained)) % len(CUTS)]
        layers = (Span(0, start), Span(start, LAYERS))
        strategy.adopt(strategy.schedule, plan=Plan.even(2, len(plan.jobs[0].forward[0]), 8, layers=layers))


RICH = Case(
    LitRich,
    strategy={"partition": [3], "microbatches": 1},
    trainer={"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
    evaluate=True,
)
META = Case(LitMeta, strategy={"partition": [3], "module": "model"}, trainer={"max_epochs": 2}, evaluate=True)
CASES = {"rich": RICH, "meta": META}
KEYS = ("outputs", "metrics", "weights", "rates", "steps", "validated", "tested", "predicted")


def moving(rank: int, name: str, ranks: int, more: dict[str, Any], folder: str) -> tuple[Any, Any, list[int]]:
    case, moves = CASES[name], Moves()
    strategy = {**(case.strategy or {}), **more}
    options = {**case.trainer, "callbacks": [moves]}
    stayed = train(Case(case.module, case.settings, strategy, case.trainer, case.evaluate), ranks, f"{folder}/stayed")
    moved = train(Case(case.module, case.settings, strategy, options, case.evaluate), ranks, f"{folder}/moved")
    return moved, stayed, moves.trained


def test_state_of_every_kind_moves() -> None:
    """Gradients of two batches add up meanwhile, and are clipped by the norm over all layers."""
    alone = train(RICH.plain(), 1, mkdtemp())
    for moved, _, trained in run_ranks(moving, 2, "rich", 2, {}, mkdtemp(), timeout=90):
        assert trained == list(CUTS)
        for key in KEYS:
            assert differences(moved[key], alone[key]) == []


@pytest.mark.parametrize(("name", "ranks", "more"), [("meta", 2, {}), ("rich", 4, {"data_parallel": 2})])
def test_moving_changes_nothing(name: str, ranks: int, more: dict[str, Any]) -> None:
    for moved, stayed, trained in run_ranks(moving, ranks, name, ranks, more, mkdtemp(), timeout=90):
        assert trained == list(CUTS)[: len(trained)]
        for key in KEYS:
            assert differences(moved[key], stayed[key], tolerance=0) == []


class Refused(Callback):
    """Asks for what can't be, and keeps why."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        for spans in ((Span(0, 1), Span(1, 5)), (Span(0, 5), Span(5, 5)), (Span(0, 1), Span(2, 5)), (Span(0, 4),) * 2):
            try:
                trainer.strategy.adopt("1f1b", plan=Plan.even(2, 2, 8, layers=spans))
                self.errors.append("")
            except PlanError as error:
                self.errors.append(str(error))


def asking(rank: int, folder: str) -> tuple[Any, list[str]]:
    refused = Refused()
    case = Case(LitTied, strategy={"partition": [2]}, trainer={"limit_train_batches": 1, "callbacks": [refused]})
    return train(case, 2, folder), refused.errors


def test_layers_that_share_a_weight_stay_together() -> None:
    for _, (fine, tied, gap, twice) in run_ranks(asking, 2, mkdtemp(), timeout=60):
        assert fine == ""
        assert "model.0.weight is shared by layers 0 and 4" in tied
        assert "every layer has to be in one stage" in gap
        assert "every layer has to be in one stage" in twice


def test_a_copy_of_weights_elsewhere_keeps_their_layer_there() -> None:
    module = Lit()
    cut = CutModule(module, "model", [0, 1], Interceptor("self.model"))
    average = copy.deepcopy(module.model)
    cut.check_arrival(1)
    with pytest.raises(PlanError, match=r"a copy of self.model.2.0.weight whose values are on the rank"):
        cut.check_arrival(2)
    del average
    cut.check_arrival(2)


def dying(rank: int, folder: str) -> None:
    train(Case(LitRich, strategy=RICH.strategy, trainer={"callbacks": [Moves()]}), 2, folder)


@pytest.mark.parametrize("place", ["move", "move.arrived"])
def test_a_rank_that_dies_while_layers_move_is_named(place: str) -> None:
    folder = mkdtemp()
    fault = Fault(1, place, f"{folder}/when")
    other, victim = watch_ranks(dying, 2, folder, timeout=60, env=dict(fault.environment()))
    assert victim.exitcode == -9
    assert "rank 1 (stage 0) has ended" in other.error
    assert other.seconds - victim.seconds < patience(10.0)
