"""Tests of the layers that batches use: which one keeps batches from overlapping, and steps of some parameters."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Delayed, LayerUse, Plan, Span
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.trainer.loop.uses import MIN_STEPPED_BATCHES, Overlap, PartialSteps, speed_behind

STAGES, BATCHES = 4, 100
LAYERS = [Span(10 * s, 10 * s + 10) for s in range(STAGES)]


def plan(microbatches: int) -> Plan:
    return Plan.even(STAGES, microbatches, layers=LAYERS)


def uses(*shared: str, delays: dict[str, Delayed] | None = None) -> list[LayerUse]:
    """Return batches that share only the last layer of some stages with their neighbors."""
    own = [[str(10 * s + n % 9) for s in range(STAGES)] for n in range(BATCHES)]
    return [LayerUse.from_names([*names, *shared], LAYERS, delays=delays) for names in own]


def seconds(microbatches: int, batches: list[LayerUse]) -> float:
    costs = CostModel.uniform(STAGES, 1.0, 2.0)
    return simulate(CSP(depth=8), plan(microbatches), costs, batches=batches).makespan


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 2])
def test_speed_equals_a_simulation(stage: int, microbatches: int) -> None:
    free, shared = seconds(microbatches, uses()), seconds(microbatches, uses(f"{stage}9"))
    assert free / shared == pytest.approx(speed_behind(plan(microbatches), stage), rel=0.06)
    late = {f"{stage}9": Delayed(8)}
    assert seconds(microbatches, uses(f"{stage}9", delays=late)) == pytest.approx(free, rel=0.02)


@pytest.mark.parametrize(
    ("shared", "delays", "said"),
    [
        (["9"], {}, "every batch steps layer '9' on stage 0"),
        (["29"], {}, "layer '29' on stage 2.*about 67% as fast"),
        (["39"], {}, ""),  # no stage waits for the last stage
        (["9"], {"9": Delayed(4)}, ""),
        ([], {}, ""),
    ],
)
def test_it_is_said_once(shared: list[str], delays: dict[str, Delayed], said: str) -> None:
    """Check the warning about a layer that every batch steps, and that it appears once."""
    look, made = Overlap(), plan(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for use in uses(*shared, delays=delays)[: 2 * MIN_STEPPED_BATCHES]:
            look.count_batch(use, made)
    assert len(caught) == bool(said)
    assert all(re.search(said, str(each.message)) for each in caught)


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(3, 3) for _ in range(6))


def adam(of: nn.ModuleList) -> torch.optim.Optimizer:
    parts = [[p for n, p in of.named_parameters() if n.endswith(end)] for end in ("weight", "bias")]
    return torch.optim.Adam([{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1], "lr": 0.5}])


def test_steps_are_those_of_what_has_gradients() -> None:
    ours, theirs = layers(), layers()
    own, plain = adam(ours), adam(theirs)
    steps = PartialSteps([own])
    for number, chosen in enumerate([(0, 3), (3, 5), (1,), (0, 3)]):
        for each in (ours, theirs):
            x = torch.full((2, 3), float(number + 1))
            sum(each[n](x).square().sum() for n in chosen).backward()
        others = [p for n, layer in enumerate(ours) if n not in chosen for p in layer.parameters()]
        for p in others:
            p.grad = torch.ones_like(p)  # of batches in flight
        with steps.restrict_optimizer(0, own, [p for n in reversed(chosen) for p in ours[n].parameters()]):
            assert [len(group["params"]) for group in own.param_groups] == [len(chosen)] * 2
            own.step()
            own.zero_grad()
        plain.step()
        plain.zero_grad()
        assert all(p.grad is not None for p in others)
        assert all(p.grad is None for n in chosen for p in ours[n].parameters())
        for p in others:
            p.grad = None
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert str(own.state_dict()) == str(plain.state_dict())


def test_all_is_as_before_after_a_failure() -> None:
    optimizer = adam(layers())
    before = [list(group["params"]) for group in copy.copy(optimizer.param_groups)]
    strange = nn.Parameter(torch.zeros(1))

    def failing() -> None:
        with PartialSteps([optimizer]).restrict_optimizer(0, optimizer, [strange]):
            assert [group["params"] for group in optimizer.param_groups] == [[], []]
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        failing()
    assert all(
        a is b for x, y in zip(before, optimizer.param_groups, strict=True) for a, b in zip(x, y["params"], strict=True)
    )
