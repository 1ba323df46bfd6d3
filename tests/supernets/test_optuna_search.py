"""Tests for subnets that Optuna chooses."""

from __future__ import annotations

import json

import pytest
from optuna.samplers import TPESampler

from lightning_pipes.ir import InputError
from lightning_pipes.supernets import OptunaExplorer, SearchSpace, Subnet, SubnetStream

SPACE = SearchSpace.from_sizes([5] * 4)


def made() -> OptunaExplorer:
    return OptunaExplorer(SPACE, lambda: TPESampler(seed=2, n_startup_trials=10), population=10)


def run(stream: SubnetStream, count: int) -> list[Subnet]:
    found = []
    for _ in range(count):
        found.append(next(stream))
        stream.report_loss(found[-1], float(sum(found[-1].choices)))
    return found


def test_it_searches_and_continues_from_a_checkpoint() -> None:
    """Check that Optuna finds better subnets, and the same ones after its state was restored."""
    explorer = made()
    whole = run(SubnetStream(explorer), 60)
    assert sum(map(sum, (s.choices for s in whole[-10:]))) < 0.8 * sum(map(sum, (s.choices for s in whole[:10])))
    assert len(explorer.study.get_trials()) == 60
    for told in (10, 37):
        stream, other = SubnetStream(made()), SubnetStream(made())
        run(stream, told)
        other.load_state_dict(json.loads(json.dumps(stream.state_dict())))
        assert run(other, 60 - told) == whole[told:]


def test_loss_that_is_not_a_number_fails_the_trial() -> None:
    explorer = made()
    stream = SubnetStream(explorer)
    for subnet in [next(stream) for _ in range(10)]:
        stream.report_loss(subnet, float("nan") if subnet.id == 3 else 1.0)
    assert [t.state.name for t in explorer.study.get_trials()].count("FAIL") == 1
    with pytest.raises(InputError, match="the next one is subnet 10"):
        explorer.report_loss(12, 1.0)
