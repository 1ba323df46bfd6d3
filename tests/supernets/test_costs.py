"""What candidates cost, measured where the network is whole."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.ir import InputError
from lightning_pipes.supernets import ChoiceBlock, Supernet, measure_layer_costs


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Slow(nn.Module):
    """Takes three times so many seconds, and draws a number."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.lin, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(self.lin(x) + torch.rand(1), self.seconds)  # type: ignore[no-any-return,no-untyped-call]


def network() -> Supernet:
    first = ChoiceBlock([Slow(0.001), Slow(0.03), Slow(0.002)])
    return Supernet(nn.Linear(4, 4), first, ChoiceBlock([Slow(0.02), nn.Identity()]), nn.Linear(4, 2))


def test_each_candidate_takes_its_time():
    net = network()
    costs = measure_layer_costs(net, torch.randn(2, 4))
    least = {"0": 0, "1.0": 0.003, "1.1": 0.09, "1.2": 0.006, "2.0": 0.06, "2.1": 0, "3": 0}
    assert {*costs} == {*least, "1", "2"}
    assert all(costs[name] >= seconds for name, seconds in least.items())
    assert costs["1"] == pytest.approx((costs["1.0"] + costs["1.1"] + costs["1.2"]) / 3)
    for subnet in ((0, 0), (1, 1), (2, 0)):
        assert {*net.layers_of(subnet)} <= {*costs}


def test_layers_without_a_backward():
    """Nothing before the first candidate is trained."""
    first = nn.Linear(4, 4)
    costs = measure_layer_costs(
        Supernet(first, ChoiceBlock([Slow(0.001)]), nn.Linear(4, 2), shared="frozen"), torch.ones(2, 4)
    )
    assert costs["0"] < costs["1.0"]


def test_nothing_changes():
    net = network()
    net[1].eval()
    before = {name: t.clone() for name, t in net.state_dict().items()}
    state = torch.get_rng_state()
    measure_layer_costs(net, torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), repeats=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert net.training
    assert not net[1].training


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: measure_layer_costs(network(), torch.tensor(1.0)), "samples on axis 0"),
        (lambda: measure_layer_costs(network(), torch.randn(2, 4), repeats=0), "repeats"),
        (lambda: measure_layer_costs(network().to("meta"), torch.randn(2, 4)), "where the network is whole"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(InputError, match=words):
        make()
