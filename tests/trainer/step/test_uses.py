"""The layers that batches use: whether one that all of them step keeps them from overlapping."""

from __future__ import annotations

import re
import warnings

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Delayed, LayerUse, Plan, Span
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.trainer.step.uses import LOOKED_AT, Overlap, speed_behind

STAGES, BATCHES = 4, 100
LAYERS = [Span(10 * s, 10 * s + 10) for s in range(STAGES)]


def plan(microbatches: int) -> Plan:
    return Plan.even(STAGES, microbatches, layers=LAYERS)


def uses(*shared: str, delays: dict[str, Delayed] | None = None) -> list[LayerUse]:
    """Batches that share nothing with their neighbours but the last layer of some stages."""
    own = [[str(10 * s + n % 9) for s in range(STAGES)] for n in range(BATCHES)]
    return [LayerUse.from_names([*names, *shared], LAYERS, delays=delays) for names in own]


def seconds(microbatches: int, batches: list[LayerUse]) -> float:
    costs = CostModel.uniform(STAGES, 1.0, 2.0)
    return simulate(CSP(depth=8), plan(microbatches), costs, batches=batches).makespan


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.parametrize("stage", [0, 2])
def test_the_speed_is_what_a_simulation_says(stage: int, microbatches: int) -> None:
    free, shared = seconds(microbatches, uses()), seconds(microbatches, uses(f"{stage}9"))
    assert free / shared == pytest.approx(speed_behind(plan(microbatches), stage), rel=0.06)
    late = {f"{stage}9": Delayed(8)}
    assert seconds(microbatches, uses(f"{stage}9", delays=late)) == pytest.approx(free, rel=0.02)


@pytest.mark.parametrize(
    ("shared", "delays", "said"),
    [
        (["9"], {}, "every batch steps layer '9' on stage 0"),
        (["29"], {}, "layer '29' on stage 2.*about 67% of the speed"),
        (["39"], {}, ""),  # on the last stage nobody waits
        (["9"], {"9": Delayed(4)}, ""),
        ([], {}, ""),
    ],
)
def test_it_is_said_once(shared: list[str], delays: dict[str, Delayed], said: str) -> None:
    look, made = Overlap(), plan(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for use in uses(*shared, delays=delays)[: 2 * LOOKED_AT]:
            look.count_batch(use, made)
    assert len(caught) == bool(said)
    assert all(re.search(said, str(each.message)) for each in caught)
