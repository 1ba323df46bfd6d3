"""Cases that the pipelining of torch 2.13 computes incorrectly without an error, tested on this engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.engine import Item, Stage
from lightning_pipes.ir import Plan, Schedule, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.reference import Loopback
from tests.engine.pipes import ROWS, WIDTH, assert_close, batch, body, gradients, layers, make_stages, squared_error


def pipe_of(model: list[nn.Module], microbatches: int = 4, name: str = "1f1b", make_body: Any = body) -> Loopback:
    """Return a pipeline of two stages, with both ranks in this process."""
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    plan = Plan.even(2, microbatches, ROWS)
    return Loopback(plan, schedule.program(plan), lambda r: make_stages(plan, r, model, body=make_body))


def run(pipe: Loopback, number: int = 0, data: Any = None, rows: int = ROWS) -> None:
    """Run one training batch to its end."""
    pipe.inject(lambda: Item(number, rows, batch(0, rows) if data is None else data))
    pipe.drain()


def evaluate(pipe: Loopback, rows: int, data: Any = None) -> torch.Tensor:
    """Run only forwards, one rank after the other. Messages wait in the mailboxes in between."""
    outputs = [engine.evaluate(Item(0, rows, batch(1, rows) if data is None else data)) for engine in pipe.engines]
    assert outputs[0] == []
    return torch.cat([output for _, output in outputs[-1]])


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_two_steps_accumulate_twice_the_gradient(name: str) -> None:
    model = layers()
    pipe = pipe_of(model, name=name)
    run(pipe)
    once = {n: g.clone() for n, g in gradients(model).items() if g is not None}
    run(pipe)
    assert_close(gradients(model), {n: 2 * g for n, g in once.items()})


def test_evaluation_between_step_and_optimizer_changes_nothing() -> None:
    model = layers()
    pipe = pipe_of(model)
    run(pipe)
    before = {n: g.clone() for n, g in gradients(model).items() if g is not None}
    with torch.no_grad():
        evaluate(pipe, 5)
    assert_close(gradients(model), before, exact=True)


@pytest.mark.parametrize("rows", [8, 4, 3, 1, 13])
def test_forward_returns_the_rows_of_its_batch_only(rows: int) -> None:
    model = layers()
    pipe = pipe_of(model)
    with torch.no_grad():
        evaluate(pipe, ROWS)  # a full batch first, whose rows must not appear in later outputs
        torch.testing.assert_close(
            evaluate(pipe, rows), nn.Sequential(*model)(batch(1, rows)[0]), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(("recompute", "early"), [(False, False), (True, False), (True, True)])
def test_batch_norm_counts_each_micro_batch_once(recompute: bool, early: bool) -> None:
    """BatchNorm updates its statistics once per micro-batch: the engine runs no extra forward to find shapes.

    A second forward for recomputation does not update them either.
    """
    model: list[nn.Module] = [nn.BatchNorm1d(WIDTH).double(), nn.BatchNorm1d(WIDTH).double()]
    schedule = make_schedule("1f1b")
    assert isinstance(schedule, Schedule)
    plan = replace(Plan.even(2, 4, ROWS, recompute=[recompute] * 2), early_recompute=early)
    pipe = Loopback(plan, schedule.program(plan), lambda r: make_stages(plan, r, model))
    counts = []
    for training in (True, True, False, True):
        for m in model:
            m.train(training)
        if training:
            run(pipe)
        else:
            with torch.no_grad():
                evaluate(pipe, ROWS)
        counts.append([int(m.num_batches_tracked) for m in model])  # type: ignore[arg-type]
    assert counts == [[4, 4], [8, 8], [8, 8], [12, 12]]
    reference = nn.BatchNorm1d(WIDTH).double()
    for _ in range(3):
        for rows in batch()[0].split(2):
            reference(rows)
    torch.testing.assert_close(model[0].running_mean, reference.running_mean, rtol=1e-12, atol=1e-12)


def test_targets_in_a_dict() -> None:
    def with_dict(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        x = item.data["x"][span.start : span.stop] if received is None else received
        out = stage.run_layers(item, span, x)
        if stage.number == 0:
            return out
        return squared_error(out, item.data["target"]["y"][span.start : span.stop]) * span.rows / item.rows

    model, reference = layers(), nn.Sequential(*layers())
    x, target = batch()
    run(pipe_of(model, make_body=with_dict), data={"x": x, "target": {"y": target}})
    squared_error(reference(x), target).backward()  # type: ignore[no-untyped-call]
    assert_close(gradients(model), gradients(list(reference)))


def test_dropout_does_not_depend_on_the_number_of_stages() -> None:
    found = []
    for stages in (1, 2, 4):
        model = layers(dropout=0.5)
        schedule = make_schedule("1f1b")
        assert isinstance(schedule, Schedule)
        plan = Plan.even(stages, 4, ROWS)
        pipe = Loopback(plan, schedule.program(plan), lambda r, p=plan, m=model: make_stages(p, r, m, seed=3))
        torch.manual_seed(100 * stages)  # the result must not depend on the global generators
        run(pipe, number=5)
        found.append(gradients(model))
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])
    other = layers(dropout=0.5)
    pipe = pipe_of(other)
    run(pipe, number=6)
    assert not torch.allclose(next(iter(gradients(other).values())), next(iter(found[0].values())))  # type: ignore[arg-type]


def test_dropout_is_the_same_when_forward_runs_again() -> None:
    found = []
    for recompute in (False, True):
        model = layers(dropout=0.5)
        schedule = make_schedule("gpipe")
        assert isinstance(schedule, Schedule)
        plan = Plan.even(2, 4, ROWS, recompute=[recompute] * 2)
        run(Loopback(plan, schedule.program(plan), lambda r, p=plan, m=model: make_stages(p, r, m)))
        found.append(gradients(model))
    assert_close(found[1], found[0], exact=True)
