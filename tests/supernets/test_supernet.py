"""Tests for supernets in plain torch: their outputs, the layers that a subnet uses, and invalid arguments."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.ir import Delayed, InputError
from lightning_pipes.supernets import ChoiceBlock, SharedLayer, Subnet, Supernet, measure_layer_costs
from lightning_pipes.supernets.layers import PerChoice
from tests.virtual_clock import VirtualClock


def linear() -> nn.Linear:
    return nn.Linear(3, 3)


def block(n: int = 3) -> ChoiceBlock:
    return ChoiceBlock([*(linear() for _ in range(n - 1)), nn.Identity()])


def net(**options: Any) -> Supernet:
    torch.manual_seed(0)
    return Supernet(linear(), block(), nn.ReLU(), block(2), nn.LayerNorm(3), **options)


@pytest.mark.parametrize("choices", [(0, 0), (1, 1), (2, 0), (2, 1)])
@pytest.mark.parametrize("shared", ["sequential", "frozen", "per_choice"])
def test_a_subnet_is_the_layers_that_it_chooses(choices: tuple[int, int], shared: str) -> None:
    """Check that a supernet computes the same as the chosen layers one after another."""
    made, x = net(shared=shared), torch.randn(4, 3)
    for subnet in (choices, list(choices), Subnet(choices, id=7)):
        by_hand = x
        for layer, choice in zip(made, (choices[0], choices[0], None, *choices[1:], choices[1]), strict=True):
            one: Any = layer.layer if isinstance(layer, SharedLayer) else layer[choice]
            by_hand = one(by_hand)
        assert torch.equal(made((x, subnet)), by_hand)
        assert torch.equal(made.extract_subnet(subnet)(x), by_hand)


@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({}, {"0": True, "1.1": True, "3.0": True, "4": True}),
        ({"shared": "frozen"}, {"0": False, "1.1": True, "3.0": True, "4": False}),
        ({"shared": "per_choice"}, {"0.1": True, "1.1": True, "3.0": True, "4.0": True}),
        ({"shared": "delayed", "delay": 8}, {"0": Delayed(8), "1.1": True, "3.0": True, "4": Delayed(8)}),
    ],
)
def test_layers_of_a_subnet(options: Any, used: dict[str, Any]) -> None:
    made = net(**options)
    assert made.layers_of((1, 0)) == used
    assert list(used) == list(made.layers_of(Subnet((1, 0))))
    for name in used:
        made.get_submodule(name)


def test_a_candidate_without_weights_is_nobodys() -> None:
    """Check that candidates without weights are not among the layers of a subnet."""
    assert net().layers_of((2, 1)) == {"0": True, "4": True}
    assert net().space.blocks == ((0, 1, 2), (0, 1))


def test_statistics_without_weights_count() -> None:
    """Check that a candidate with statistics but without weights is among the layers of a subnet."""
    made = Supernet(ChoiceBlock([nn.BatchNorm1d(3, affine=False), nn.Identity()]))
    assert (made.layers_of((0,)), made.layers_of((1,))) == ({"0.0": True}, {})


def test_each_layer_may_say_for_itself() -> None:
    """Check that shared layers can be shared in different ways."""
    made = Supernet(SharedLayer(linear(), "frozen"), block(), SharedLayer(linear(), "delayed", 4), linear())
    assert made.layers_of((0,)) == {"0": False, "1.0": True, "2": Delayed(4), "3": True}


def test_per_choice_belongs_to_the_block_that_follows_or_the_last() -> None:
    """Check that a shared layer has one copy for each candidate of the next block, or of the last block."""
    made = Supernet(linear(), block(3), linear(), block(2), linear(), nn.ReLU(), shared="per_choice")
    copies = [layer for layer in made if isinstance(layer, PerChoice)]
    assert [len(each) for each in copies] == [3, 2, 2]
    assert made.layers_of((2, 0)) == {"0.2": True, "2.0": True, "3.0": True, "4.0": True}
    assert torch.equal(copies[0][0].weight, copies[0][2].weight)  # equal only at the start


def test_frozen_layers_do_not_change() -> None:
    """Check that frozen layers keep their weights and statistics, while dropout stays active."""
    made = Supernet(nn.Sequential(linear(), nn.BatchNorm1d(3), nn.Dropout()), block(), linear(), shared="frozen")
    before = {n: t.clone() for n, t in made[0].state_dict().items()}
    made.train()
    loss = made((torch.randn(4, 3), (0,))).sum()
    loss.backward()
    torch.optim.SGD(made.parameters(), lr=1.0).step()
    assert all(torch.equal(t, before[n]) for n, t in made[0].state_dict().items())
    assert [part.training for part in made[0].layer] == [True, False, True]
    assert made[1][0].weight.grad is not None


def test_names_of_layers_may_be_given() -> None:
    made = Supernet(OrderedDict(stem=linear(), choice=block(2), head=linear()))
    assert made.layers_of((0,)) == {"stem": True, "choice.0": True, "head": True}


def test_it_can_be_copied_saved_and_sent() -> None:
    made, x = net(), torch.randn(4, 3)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other((x, (1, 0))), made((x, (1, 0))))
    fresh = net()
    fresh.load_state_dict(made.state_dict())


def test_a_slice_leaves_the_whole_as_it_was() -> None:
    """Check that a slice of a supernet computes a part of it, and does not change it."""
    made, x = net(), torch.randn(4, 3)
    before = made((x, (1, 0)))
    assert made[:2]((x, (1, 0)))[1] == (1, 0)
    assert torch.equal(made((x, (1, 0))), before)


def test_parts_that_candidates_of_a_block_share_make_it_one_layer() -> None:
    one = linear()
    made = Supernet(ChoiceBlock([one, nn.Sequential(one, nn.ReLU()), linear(), nn.Identity()]), linear())
    assert [[*made.layers_of((n,))] for n in range(4)] == [["0", "1"], ["0", "1"], ["0", "1"], ["1"]]


def test_a_subnet_that_uses_a_layer_twice_is_refused() -> None:
    one = linear()
    made = Supernet(ChoiceBlock([one, linear()]), ChoiceBlock([linear(), one]), linear())
    assert made.layers_of((0, 0)) == {"0.0": True, "1.0": True, "2": True}
    with pytest.raises(InputError, match=r"subnet \(0, 1\) uses a layer twice: 0.0 and 1.1 have parameters"):
        made.layers_of((0, 1))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ChoiceBlock([]), "needs candidates"),
        (lambda: Supernet(linear()), "needs a ChoiceBlock among its layers"),
        (lambda: Supernet(*[block()] * 2), "layer 1 is a ChoiceBlock that occurs before"),
        (lambda: Supernet(nn.Sequential(block()), block()), "layer 0, a Sequential, has a ChoiceBlock inside"),
        (lambda: net(shared="sometimes"), "shared must be 'sequential' or 'frozen' or 'per_choice' or 'delayed'"),
        (lambda: net(shared="delayed"), "which needs one: as many subnets"),
        (lambda: net(delay=3), "a delay belongs to shared='delayed'"),
        (lambda: net(shared="delayed", delay=0), "delay must be at least 1, got 0"),
        (lambda: Supernet(nn.BatchNorm1d(3), block(), shared="delayed", delay=2), "BatchNorm1d and can't be read late"),
    ],
)
def test_refuses_what_makes_no_supernet(make: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()


@pytest.mark.parametrize(
    ("subnet", "said"),
    [
        ((3, 0), "candidate 3 of block 0, which has"),
        ((-1, 0), "candidate -1 of block 0, which has"),
        ((0,), "it needs one for each"),
    ],
)
def test_refuses_choices_that_there_are_not(subnet: Any, said: str) -> None:
    made = net()
    with pytest.raises(InputError, match=said):
        made((torch.randn(4, 3), subnet))
    with pytest.raises(InputError, match=said):
        made.layers_of(subnet)


def test_refuses_an_input_without_a_subnet() -> None:
    with pytest.raises(InputError, match=r"takes \(x, subnet\), got 'Tensor'"):
        net()(torch.randn(4, 3))
    with pytest.raises(InputError, match="put it into a Supernet"):
        block()((torch.randn(4, 3), (0, 0)))


TIME = VirtualClock()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        TIME.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        TIME.sleep(2 * ctx.seconds)
        return gradients[0], None


class Slow(nn.Module):
    """A layer whose forward and backward together take three times `seconds`, and which draws a random number."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.lin, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(self.lin(x) + torch.rand(1), self.seconds)  # type: ignore[no-any-return,no-untyped-call]


def network() -> Supernet:
    first = ChoiceBlock([Slow(0.001), Slow(0.03), Slow(0.002)])
    return Supernet(nn.Linear(4, 4), first, ChoiceBlock([Slow(0.02), nn.Identity()]), nn.Linear(4, 2))


def test_each_candidate_takes_its_time(monkeypatch):
    """Check the measured costs of candidates with known durations, and the mean of each block."""
    TIME.patch(monkeypatch)
    net = network()
    costs = measure_layer_costs(net, torch.randn(2, 4))
    takes = {"0": 0, "1.0": 0.003, "1.1": 0.09, "1.2": 0.006, "2.0": 0.06, "2.1": 0, "3": 0}
    assert {*costs} == {*takes, "1", "2"}
    assert {name: costs[name] for name in takes} == pytest.approx(takes)
    assert costs["1"] == pytest.approx((costs["1.0"] + costs["1.1"] + costs["1.2"]) / 3)
    for subnet in ((0, 0), (1, 1), (2, 0)):
        assert {*net.layers_of(subnet)} <= {*costs}


def test_layers_without_a_backward(monkeypatch):
    """Check the costs if no layer before the first candidate is trained."""
    TIME.patch(monkeypatch)
    first = nn.Linear(4, 4)
    costs = measure_layer_costs(
        Supernet(first, ChoiceBlock([Slow(0.02)]), nn.Linear(4, 2), shared="frozen"), torch.ones(2, 4)
    )
    assert (costs["0"], costs["1.0"]) == (0, pytest.approx(0.06))


def test_nothing_changes():
    """Check that measuring costs does not change weights, gradients, modes or random numbers."""
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
        (lambda: measure_layer_costs(network().to("meta"), torch.randn(2, 4)), "only if the network is complete"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(InputError, match=words):
        make()
