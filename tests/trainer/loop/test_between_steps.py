"""Tests of hooks between the steps of overlapping batches, which must not change batches in flight."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import LayerUse, PipelineError, Span
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.loop.between_steps import (
    COMPARISON_INTERVAL,
    N_FIRST_COMPARED_BATCHES,
    BetweenSteps,
    check_clearing,
)
from lightning_pipes.trainer.user.patches import Patches
from tests.trainer.lit import Lit as LitCase
from tests.trainer.lit import data, differences, plain_values, quiet
from tests.trainers import make_trainer

CUT = (Span(0, 2), Span(2, 4))


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(4)))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=batch_idx != 1)


def watched(values: bool = True, hooks: bool = True) -> tuple[nn.Sequential, BetweenSteps]:
    """Return a net of four layers, and the check of a rank that has layers 0 and 1."""
    module = Lit()
    return module.net, BetweenSteps("csp", module, module.net, lambda: (0, 1), lambda names: hooks, values)


def use(*names: str) -> LayerUse:
    return LayerUse.from_names(names, CUT)


def in_place(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def in_data(p: nn.Parameter) -> None:
    p.data.mul_(0.5)


def freeze(p: nn.Parameter) -> None:
    p.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "what"), [(in_place, "the values"), (in_data, "the values"), (freeze, "requires_grad")]
)
def test_a_change_of_what_is_under_way_is_named(change: Any, what: str) -> None:
    net, between = watched()
    between.begin_hooks([use("0.1", "2.0")])
    change(net.get_parameter("0.1.bias"))
    with pytest.raises(PipelineError, match=rf"changes {what} of net.0.1.bias between two batches"):
        between.check()
    between.check()


@pytest.mark.parametrize("change", [in_place, in_data, freeze])
def test_what_no_batch_under_way_uses_may_change(change: Any) -> None:
    net, between = watched()
    between.begin_hooks([use("0.1", "2.0"), use("1.0")])
    change(net.get_parameter("0.0.bias"))
    change(net.get_parameter("2.0.bias"))  # this layer is on another rank
    between.check()
    with between.step_hooks([use("0.1"), use("0.0")], [net.get_parameter("0.1.weight")], ()):
        change(net.get_parameter("0.1.weight"))


def test_hooks_before_a_step_change_the_layers_of_that_batch_only() -> None:
    net, between = watched()
    refused = pytest.raises(PipelineError, match=r"net.0.0.bias before the step of another batch")
    with refused, between.step_hooks([use("0.1"), use("0.0")], [net.get_parameter("0.1.weight")], ()):
        in_place(net.get_parameter("0.0.bias"))


def test_values_are_compared_at_first_and_now_and_then() -> None:
    net, between = watched()
    found = []
    for number in range(1, 2 * COMPARISON_INTERVAL + 1):
        between.begin_hooks([use("0.1")])
        in_data(net.get_parameter("0.1.bias"))
        try:
            between.check()
        except PipelineError:
            found.append(number)
    assert found == [*range(1, N_FIRST_COMPARED_BATCHES + 1), COMPARISON_INTERVAL, 2 * COMPARISON_INTERVAL]


def test_gradients_of_layers_that_no_batch_names_are_found() -> None:
    net, between = watched()
    named = [net.get_parameter("0.1.weight")]
    named[0].grad = torch.zeros(2, 2)
    between.check_gradients(5, named)
    net.get_parameter("1.0.weight").grad = torch.zeros(2, 2)
    with pytest.raises(PipelineError, match=r"batch 5, or one shortly before it, trains net.1.0.weight"):
        between.check_gradients(5, named)


def test_without_hooks_nothing_is_looked_at() -> None:
    net, between = watched(hooks=False)
    between.begin_hooks([use("0.1")])
    in_place(net.get_parameter("0.1.bias"))
    between.check()


def test_clearing_is_checked_at_every_batch() -> None:
    module = Lit()
    optimizer = torch.optim.SGD(module.parameters())
    patches = Patches()
    check_clearing(module, "csp", patches)
    module.optimizer_zero_grad(0, 0, optimizer)
    with pytest.raises(PipelineError, match=r"Lit.optimizer_zero_grad leaves gradients, or zeros"):
        module.optimizer_zero_grad(0, 1, optimizer)
    assert all(p.grad is None for p in module.parameters())
    patches.close()
    module.optimizer_zero_grad(0, 1, optimizer)


class Clips(LitCase):
    """Changes gradients directly after Lightning has computed them."""

    def on_after_backward(self) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.01)


class LooksAfterwards(LitCase):
    """Reads and doubles gradients at the end of their batch.

    Doubling has an effect only if the batch ended without an optimizer step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters():
            assert p.grad is not None
            self.norms.append(float(p.grad.norm()))
            p.grad.mul_(2)

    def on_train_epoch_end(self) -> None:
        self.norms.append(float(sum(p.grad is not None for p in self.parameters())))


def trained_with(schedule: str, kind: type[LitCase], accumulated: int) -> dict[str, Any]:
    """Train with a schedule, or in plain Lightning without one, and return the weights and norms."""
    pl.seed_everything(1, verbose=False)
    module = kind().double()
    trainer = make_trainer(
        devices=1,
        strategy=PipelineStrategy(schedule, microbatches=2) if schedule else "auto",
        max_epochs=2,
        precision="64-true",
        accumulate_grad_batches=accumulated,
    )
    trainer.fit(module, DataLoader(data(), batch_size=8))
    return {"norms": getattr(module, "norms", None), **plain_values(dict(module.state_dict()))}


def together(rank: int, kind: type[LitCase], accumulated: int) -> list[dict[str, Any]]:
    quiet()
    schedules = ("", "pipedream", "dynpipe" if accumulated > 1 else "csp")
    return [trained_with(schedule, kind, accumulated) for schedule in schedules]


@pytest.mark.parametrize(("kind", "accumulated"), [(Clips, 1), (LooksAfterwards, 1), (LooksAfterwards, 2)])
def test_hooks_on_one_rank_find_the_gradients_of_one_process(kind: type[LitCase], accumulated: int) -> None:
    [(plain, *others)] = run_ranks(together, 1, kind, accumulated, timeout=100)
    for found in others:
        assert not differences(found, plain, 1e-10)
