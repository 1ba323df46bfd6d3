"""The samples that the cost model counts as concatenated, compared with the samples that the engine concatenates."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from lightning_pipes.cost import CostModel
from lightning_pipes.engine import Item
from lightning_pipes.engine.compute.executor import Executor
from lightning_pipes.ir import COMPUTE_KINDS, Cut, Kind, Plan, cost_classes, count_concatenated, lower
from lightning_pipes.sim import makespan
from lightning_pipes.strategies.umpipe import UMPipe
from lightning_pipes.strategies.umpipe.planner import spans_of
from lightning_pipes.testing.reference import Loopback
from tests.cases import for_each
from tests.engine.pipes import WIDTH, layers, make_stages

BATCH = 12
COUNTS = (1, 2, 3, 4, 6, 12)


def drawn(seed: int) -> Plan:
    """Return a random plan in which each stage, direction and link divides the batch differently."""
    draw = random.Random(seed)
    ranks = draw.choice([(0, 1, 2), (0, 1, 0, 1), (0, 0, 1), (0, 1)])

    def table() -> tuple[Any, ...]:
        return tuple(spans_of(BATCH, draw.choice(COUNTS)) for _ in ranks)

    forward, backward = table(), table()
    there, back = (*table()[:-1], forward[-1]), (backward[0], *table()[1:])
    whole = (*(draw.random() < 0.5 for _ in ranks[:-1]), False)
    recompute = tuple(draw.random() < 0.3 for _ in ranks)
    cut = Cut(BATCH, forward, backward, there, back)
    return Plan(ranks, (cut,), whole_forward=whole, recompute=recompute, early_recompute=draw.random() < 0.5)


@pytest.mark.parametrize("seed", range(40))
def test_predicted_concatenations_happen(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that `torch.cat` returns in each kind of instruction are the rows that `count_concatenated` predicts."""
    plan = drawn(seed)
    program = UMPipe().program(plan)
    found: Counter[tuple[Kind, int]] = Counter()
    doing: list[Any] = []
    run, cat = Executor.run, torch.cat

    def seen(self: Executor, i: Any) -> None:
        doing.append(i)
        run(self, i)
        doing.pop()

    def counted(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = cat(tensors, *args, **kwargs)
        found[doing[-1].kind, doing[-1].stage] += len(out)
        return out

    monkeypatch.setattr(Executor, "run", seen)
    monkeypatch.setattr(torch, "cat", counted)
    model = layers(len(plan.ranks))
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64)
    pipe = Loopback(plan, program, lambda rank: make_stages(plan, rank, model))
    pipe.inject(lambda: Item(0, BATCH, (x, x)))
    pipe.drain()
    wanted: Counter[tuple[Kind, int]] = Counter()
    for row in lower(program, plan).head:
        for i in row:
            if i.kind in COMPUTE_KINDS:
                each = count_concatenated(i, plan)
                wanted[i.kind, i.stage] += each.inputs
                wanted[Kind.SF if i.kind is Kind.F else Kind.SB, i.stage] += each.outputs
    assert +found == +wanted


@for_each("seed", range(10))
def test_who_joins_takes_longer_by_what_is_joined(seed: int) -> None:
    """A cost per concatenated byte increases each duration, and the makespan on one rank, by exactly that cost."""
    plan = drawn(seed)
    n = plan.n_stages
    bytes_ = {"forward_bytes": (8.0,) * (n - 1), "backward_bytes": (16.0,) * (n - 1)}
    seconds = {(kind, s): ((1, 1e-3), (BATCH, 2e-3)) for kind in (Kind.F, Kind.B) for s in range(n)}
    free, priced = (CostModel(seconds, **bytes_, joining=each) for each in (0.0, 1e-6))
    more = 0
    for kind, size in ((Kind.F, 8000), (Kind.B, 16000)):
        for stage in range(n):
            for i, count in cost_classes(kind, stage, plan):
                longer = priced.duration_ns(i, plan) - free.duration_ns(i, plan)
                assert longer == sum(count_concatenated(i, plan)) * size
                more += count * longer
    one_rank = Plan((0,) * n, plan.jobs, whole_forward=plan.whole_forward, recompute=plan.recompute)
    program = UMPipe().program(one_rank)
    inside = sum(
        sum(count_concatenated(i, one_rank)) * (8000 if i.kind is Kind.F else 16000)
        for i in program.iter_instructions()
    )
    assert makespan(program, one_rank, priced) == makespan(program, one_rank, free) + inside
    assert more
