"""Tests that an evolution finds better subnets, and chooses the same ones again after it is restored."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_pipes.ir import InputError, PipelineError
from lightning_pipes.supernets import (
    Evolution,
    ExplorerFeedback,
    RoundRobin,
    SearchSpace,
    Subnet,
    SubnetStream,
    Uniform,
)

SPACE = SearchSpace.from_sizes([6] * 8)


def loss(choices: tuple[int, ...]) -> float:
    """Return a loss that is smallest if all choices are 3."""
    return float(sum(abs(choice - 3) for choice in choices))


def run(stream: SubnetStream, count: int) -> list[Subnet]:
    found = []
    for _ in range(count):
        found.append(next(stream))
        stream.report_loss(found[-1], loss(found[-1].choices))
    return found


def made(seed: int = 0) -> Evolution:
    return Evolution(SPACE, population=20, parents=5, mutation=0.2, seed=seed)


def test_reported_losses_improve_it() -> None:
    """Check that later subnets have smaller losses than the first generation."""
    explorer = made()
    found = [loss(subnet.choices) for subnet in run(SubnetStream(explorer), 300)]
    first, last = found[:20], found[-20:]
    assert sum(last) < 0.5 * sum(first)
    assert explorer.best_subnets[0][0] == min(found)


def test_descendants_come_from_the_best_of_generations_that_are_over() -> None:
    stream = SubnetStream(made())
    found = run(stream, 60)
    for number in range(20, 60):
        over = found[: number // 20 * 20]
        best = sorted(over, key=lambda subnet: (loss(subnet.choices), subnet.id))[:5]
        child = found[number].choices
        pools = [{parent.choices[block] for parent in best} for block in range(8)]
        if number % 2:
            assert all(choice in pool for choice, pool in zip(child, pools, strict=True))
        else:
            assert max(sum(map(int.__eq__, child, parent.choices)) for parent in best) >= 3


@pytest.mark.parametrize("told", [0, 7, 20, 47])
def test_it_continues_from_a_checkpoint(told: int) -> None:
    """Check that an evolution that is restored from a checkpoint chooses the same subnets as without a break."""
    whole = run(SubnetStream(made(3)), 80)
    stream = SubnetStream(made(3))
    run(stream, told)
    other = SubnetStream(made(3))
    other.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert run(other, 80 - told) == whole[told:]


def test_batches_under_way_change_nothing() -> None:
    """Check that losses which arrive as late as the end of their generation do not change the choices."""
    stream, whole, found, late = SubnetStream(made(3)), run(SubnetStream(made(3)), 80), [], []
    for number in range(80):
        found.append(next(stream))
        late.append(found[-1])
        while late and (len(late) > 6 or stream.must_wait_after(number)):
            subnet = late.pop(0)
            stream.report_loss(subnet, loss(subnet.choices))
    assert found == whole


def test_asking_too_early_is_refused() -> None:
    """Check the errors for subnets that are requested too early, and for losses in the wrong order."""
    stream = SubnetStream(made())
    found = [next(stream) for _ in range(20)]
    with pytest.raises(InputError, match="subnet 20 depends on the results of the 20 before, and 0 were reported"):
        next(stream)
    stream.report_loss(found[0], float("nan"))
    with pytest.raises(InputError, match="loss of subnet 5 was reported; the next one is subnet 1"):
        stream.report_loss(found[5], 1.0)


@pytest.mark.parametrize("wrong", [{"population": 0}, {"parents": 21}, {"mutation": 1.5}])
def test_refuses_numbers_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Evolution(SPACE, **{"population": 20, **wrong})  # type: ignore[arg-type]


def test_replicas_would_learn_from_different_losses() -> None:
    """Check that explorers that learn from losses are refused with several replicas."""
    trainer: Any = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2}, strategy=None)
    for explorer in (made(), RoundRobin(Uniform(SPACE), made())):
        with pytest.raises(PipelineError, match="learns from losses, but each of 2 replicas"):
            ExplorerFeedback(SubnetStream(explorer)).on_train_start(trainer, pl.LightningModule())
    ExplorerFeedback(SubnetStream(RoundRobin(Uniform(SPACE)))).on_train_start(trainer, pl.LightningModule())
