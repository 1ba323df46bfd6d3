"""Compare windows without flushes with one process that trains with weights of the age that the papers specify."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from lightning_pipes.engine import Item
from lightning_pipes.ir import Plan, Program, Schedule, adapt_plan
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.testing.reference import Loopback
from tests.cases import for_each
from tests.engine.pipes import ROWS, assert_close, batch, connect, layers, make_stages, sgd_step, squared_error, weights

DEPTH = 4


def planned(name: str, stages: int, microbatches: int, recompute: bool = False) -> tuple[Plan, Program]:
    """Return a plan for a schedule, and the program of the schedule for this plan."""
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    plan = adapt_plan(Plan.even(stages, microbatches, ROWS, recompute=[recompute] * stages), schedule)
    return plan, schedule.program(plan)


def stale(delays: list[int], batches: int) -> list[nn.Module]:
    """Train with stale weights, without a pipeline and without micro-batches.

    Batch n runs forward and backward through stage s with the weights after `n - delays[s]` updates. Then every stage
    is updated with its gradient.
    """
    model = layers(DEPTH)
    stages = [
        nn.Sequential(*model[s * DEPTH // len(delays) : (s + 1) * DEPTH // len(delays)]) for s in range(len(delays))
    ]
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9) for stage in stages]
    history = [[weights([stage])] for stage in stages]
    for n in range(batches):
        x, target = batch(n)
        read = []
        for s, stage in enumerate(stages):
            old = history[s][max(0, n - delays[s])]
            read.append({name[2:]: w.clone().requires_grad_() for name, w in old.items()})
            x = functional_call(stage, read[s], (x,))
        flat = [w for weights_of in read for w in weights_of.values()]
        found = iter(torch.autograd.grad(squared_error(x, target), flat))
        for s, stage in enumerate(stages):
            for p in stage.parameters():
                p.grad = next(found)
            optimizers[s].step()
            history[s].append(weights([stage]))
    return model


def delays_of(name: str, stages: int, microbatches: int) -> list[int]:
    """Return the delay of each stage in updates, by Section 3.3 of PipeDream with stages from 0; for 2BW always one."""
    if name == "pipedream_2bw":
        return [1] * stages
    return [-(-(stages - 1 - s) // microbatches) for s in range(stages)]


CASES = [
    ("pipedream", 2, 1),
    ("pipedream", 4, 1),
    ("pipedream", 4, 2),
    ("pipedream", 4, 8),
    ("pipedream", 1, 2),
    ("pipedream_2bw", 1, 2),
    ("pipedream_2bw", 2, 2),
    ("pipedream_2bw", 4, 4),
    ("pipedream_2bw", 4, 3),
]


@for_each("recompute", [False, True])
@for_each("batches", [1, 2, 9])
@for_each(("name", "stages", "microbatches"), CASES)
def test_weights_are_as_old_as_the_papers_say(
    name: str, stages: int, microbatches: int, batches: int, recompute: bool
) -> None:
    """The weights equal the weights of `stale` with the delays of the papers."""
    plan, program = planned(name, stages, microbatches, recompute)
    model = layers(DEPTH)
    pipe = Loopback(plan, program, lambda r: make_stages(plan, r, model, sgd_step()))
    for n in range(batches):
        pipe.inject(lambda n=n: Item(n, ROWS, batch(n)))  # type: ignore[misc]
        pipe.progress()
    pipe.drain()
    assert_close(weights(model), weights(stale(delays_of(name, stages, microbatches), batches)))


def test_old_weights_are_another_result() -> None:
    """Training with stale weights differs from training without delays, so the other tests compare something."""
    assert not torch.equal(stale([1, 0], 5)[0][0].weight, stale([0, 0], 5)[0][0].weight)  # type: ignore[index,arg-type]


def test_two_windows() -> None:
    """After a drain, every stage has the newest weights, and the next window starts without delays."""
    plan, program = planned("pipedream", 2, 2)
    model, reference = layers(DEPTH), layers(DEPTH)
    pipe = Loopback(plan, program, lambda r: make_stages(plan, r, model, sgd_step()))
    for n in (0, 1):  # one batch per window gives the same as training without a pipeline
        pipe.inject(lambda n=n: Item(n, ROWS, batch(n)))  # type: ignore[misc]
        pipe.drain()
    optimizer = torch.optim.SGD(nn.Sequential(*reference).parameters(), lr=0.1, momentum=0.9)
    for n in (0, 1):
        x, target = batch(n)
        optimizer.zero_grad()
        squared_error(nn.Sequential(*reference)(x), target).backward()
        optimizer.step()
    assert_close(weights(model), weights(reference))


def stream(rank: int, name: str, stages: int, microbatches: int, batches: int) -> dict[str, Any]:
    """Train on one rank without flushes between batches, and return the weights of its stages."""
    from lightning_pipes.engine import Engine

    plan, program = planned(name, stages, microbatches)
    watch, transport = connect(rank, plan)
    model = layers(DEPTH)
    engine = Engine(plan, program, make_stages(plan, rank, model, sgd_step()), transport, rank=rank, watch=watch)
    for n in range(batches):
        engine.inject(Item(n, ROWS, batch(n)))
        engine.progress()
    engine.drain()
    engine.close()
    watch.close()
    mine = [str(n) for stage in engine._stages for n in stage.layers]
    return {n: w for n, w in weights(model).items() if n.split(".")[0] in mine}


@pytest.mark.parametrize(("name", "stages", "microbatches"), [("pipedream", 4, 1), ("pipedream_2bw", 2, 2)])
def test_on_processes(name: str, stages: int, microbatches: int) -> None:
    parts = run_ranks(stream, stages, name, stages, microbatches, 7)
    got = {n: w for part in parts for n, w in part.items()}
    wanted = weights(stale(delays_of(name, stages, microbatches), 7))
    assert_close({n: got[n] for n in wanted}, wanted)
