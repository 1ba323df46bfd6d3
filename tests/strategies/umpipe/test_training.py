"""Check that training with unequal micro-batches gives the result of one process, for every scheme."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import WIDTH, Case, Lit, differences, train, train_cases

SCHEDULES = ("umpipe", "um1f1b")
RANDOM = 25
"""The number of random schemes for each number of ranks."""

# Table 7 of the paper: the numbers of micro-batches of five layers, forward and backward. A link has the number of its
# sender.
MNIST = {
    "Or": (1, 1, 1, 1, 1),
    "GPipe-2": (2, 2, 2, 2, 2),
    "U1": (2, 2, 2, 1, 2),
    "U2": (2, 2, 1, 2, 1),
    "U3": (2, 2, 2, 2, 4),
    "U4": (2, 8, 4, 1, 1),
    "U5": (4, 2, 4, 8, 1),
}
CIFAR10 = {
    "U1": (2, 2, 1, 2, 2),
    "U2": (2, 2, 1, 1, 2),
    "U3": (2, 1, 2, 2, 1),
    "U4": (8, 2, 1, 1, 1),
    "U5": (2, 2, 4, 2, 2),
}


class LitConv(Lit):
    """The network of the paper, with four 3 x 3 convolutions and a linear layer, for small images."""

    channels = (1, 20, 40, 80, 160)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        convolutions = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU())
            for a, b in zip(self.channels, self.channels[1:], strict=False)
        ]
        first = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, self.channels[0], 1), *convolutions.pop(0))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.channels[-1], 3))
        self.model = nn.Sequential(first, *convolutions, head)


class LitConv3(LitConv):
    """The same network for color images."""

    channels = (3, 16, 32, 64, 128)


class Positions(nn.Module):
    """A layer that turns each sample into a sequence and adds a trained (T, T) mask that all samples share."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, length).view(length, 1))
        self.mask = nn.Parameter(torch.linspace(0, 1, length * length).view(length, length))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.unsqueeze(1) * self.scale, self.mask.tril()


class Attention(nn.Module):
    """A layer that attends with the mask and passes the mask on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = pair
        return (self.linear(x) @ x.transpose(1, 2) + mask).softmax(-1) @ x, mask


class MeanOfPositions(nn.Linear):
    """A layer that computes logits from the mean over positions."""

    def forward(self, input: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(input[0].mean(1))


class LitMask(Lit):
    """A model whose mask has 4 entries, which is also the number of samples of some micro-batches."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.model = nn.Sequential(Positions(4), Attention(), Attention(), MeanOfPositions(WIDTH, 3))


def case(module: type[Lit], ranks: int, schedule: str, **counts: tuple[int, ...]) -> Case:
    partition = list(range(1, ranks))
    return Case(module, strategy={"schedule": schedule, "schedule_args": counts, "partition": partition})


def of_table_7(ranks: int) -> dict[str, Case]:
    """Return the cases of table 7; with fewer ranks than layers, the ranks use the numbers of the first layers."""
    found = {}
    for data, module, schemes in (("MNIST", LitConv, MNIST), ("CIFAR10", LitConv3, CIFAR10)):
        for name, counts in schemes.items():
            for schedule in SCHEDULES if ranks == 2 else SCHEDULES[:1]:
                found[f"{data} {name}, {schedule}"] = case(module, ranks, schedule, forward=counts[:ranks])
    return found


def at_random(ranks: int) -> dict[str, Case]:
    """Return random cases in which stages, directions and links all differ.

    Some numbers do not divide the batch, and some are larger than the batch.
    """
    draw = random.Random(ranks)

    def counts(entries: int) -> tuple[int, ...]:
        return tuple(draw.choice((1, 2, 3, 4, 5, 8, 9)) for _ in range(entries))

    found = {}
    for n in range(RANDOM):
        names = ("forward", "backward", "forward_links", "backward_links")
        drawn = {name: counts(ranks - name.endswith("links")) for name in names[: draw.choice((1, 2, 3, 4))]}
        schedule = SCHEDULES[n % 2]
        found[f"{n}, {schedule}, {drawn}"] = case(Lit, ranks, schedule, **drawn)
    return found


def cases(ranks: int, slow: bool) -> dict[str, Case]:
    """Return the cases that always run, or with `slow` all other cases.

    The cases that always run are the most different schemes of table 7 and a few random schemes.
    """
    every = {**of_table_7(ranks), **(at_random(ranks) if ranks < 5 else {})}
    if ranks == 2:
        every["several stages a rank"] = two_a_rank()
        every["a mask as long as the sender's micro-batches, cut"] = case(LitMask, 2, "umpipe", forward=(2, 4))
        every["a mask as long as the sender's micro-batches, joined"] = case(LitMask, 2, "um1f1b", forward=(2, 1))
        every["a mask as long as the receiver's micro-batches"] = case(LitMask, 2, "umpipe", forward=(1, 2))
        every["a mask as long as joined backwards"] = case(LitMask, 2, "umpipe", forward=(2, 4), backward=(4, 2))
    few = {
        name
        for name in every
        if "several" in name
        or "mask" in name
        or "U4, umpipe" in name
        or "U5, um1f1b" in name
        or name[:2] in ("0,", "1,", "2,")
    }
    return {name: case for name, case in every.items() if (name in few and ranks < 5) != slow}


TWO_A_RANK = (2, 8, 4, 1)
"""The micro-batches of four stages on two ranks."""


def two_a_rank() -> Case:
    settings = {"forward": TWO_A_RANK, "backward": (4, 2, 8, 1), "stages_per_rank": 2}
    return Case(LitConv, strategy={"schedule": "um1f1b", "schedule_args": settings, "partition": [1, 2, 3]})


CASES = {(ranks, slow): cases(ranks, slow) for ranks in (2, 4, 5) for slow in (False, True)}


@cache
def in_a_pipeline(ranks: int, slow: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each rank by case; all cases with the same number of ranks run in the same processes."""
    chosen = CASES[ranks, slow]
    found = run_ranks(train_cases, ranks, list(chosen.values()), ranks, mkdtemp(), timeout=120)
    return {name: [of_rank[n] for of_rank in found] for n, name in enumerate(chosen)}


@cache
def on_one_process(module: type[Lit]) -> dict[str, Any]:
    return train(Case(module), 1, Path(mkdtemp()))


@pytest.mark.parametrize(
    ("ranks", "slow", "name"),
    [
        pytest.param(ranks, slow, name, id=f"{name} on {ranks}", marks=[pytest.mark.slow] if slow else [])
        for (ranks, slow), chosen in CASES.items()
        for name in chosen
    ],
)
def test_gradients_weights_and_logs_equal_one_process(ranks: int, slow: bool, name: str) -> None:
    alone = on_one_process(CASES[ranks, slow][name].module)
    found = in_a_pipeline(ranks, slow)[name]
    assert differences(found[0]["rows"], alone["rows"]) == []
    for each in found:
        for what in ("outputs", "weights", "metrics", "rates", "steps"):
            assert differences(each[what], alone[what], at=what) == []
    for *parts, whole in zip(*(each["gradients"] for each in found), alone["gradients"], strict=True):
        assert {n for part in parts for n in part} == set(whole)
        for part in parts:
            assert differences(part, {n: whole[n] for n in part}) == []
