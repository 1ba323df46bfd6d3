"""Streams of batches that use different layers, ordered by a policy.

The weights are compared bit by bit with training on one batch after another.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from lightning_pipes.engine import Engine, Item, PeerFailure, Stage
from lightning_pipes.engine.compute.rng import seed_all, stream_seed
from lightning_pipes.ir import (
    Delayed,
    Instruction,
    Kind,
    LayerUse,
    Plan,
    PlanError,
    RankView,
    Schedule,
    Span,
    adapt_plan,
)
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from lightning_pipes.testing.reference import Loopback
from tests.cases import for_each
from tests.engine.jumbled import Jumbled
from tests.engine.pipes import ROWS, WIDTH, assert_close, connect, divide_evenly, squared_error, weights
from tests.engine.pipes import batch as float64_batch

BATCHES = 24
DEPTH = 8
planned = partial(divide_evenly, DEPTH)
batch = partial(float64_batch, dtype=torch.float32)
WHOLE = ("0", "1", "2", "3", "5", "6", "7")


class Optional(nn.Module):
    """A layer that is applied only to the batches that have chosen it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.name = str(number)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.2), nn.Tanh())

    def forward(self, given: Any) -> Any:
        x, chosen = given
        return (self.net(x) if self.name in chosen else x), chosen


class Either(nn.Module):
    """A layer with two alternatives, of which a batch chooses at most one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.names = [f"{number}.nets.{n}" for n in range(2)]
        self.nets = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, given: Any) -> Any:
        x, chosen = given
        for name, net in zip(self.names, self.nets, strict=True):
            if name in chosen:
                return net(x).tanh(), chosen
        return given


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Either(n) if n == 4 else Optional(n) for n in range(DEPTH)]


def chosen(number: int) -> tuple[str, ...]:
    """Return the names of the layers that a batch uses."""
    rng = random.Random(number)
    return (*(n for n in WHOLE if rng.random() < 0.4), f"4.nets.{rng.randrange(2)}")


def stepped(number: int) -> tuple[str, ...] | None:
    """Return the layers that the optimizer updates after a batch; None means all layers that the batch uses.

    Every third batch updates only some of its layers.
    """
    return chosen(number)[::2] if number % 3 == 2 else None


def rows_of(number: int) -> int:
    """Return the number of samples in a batch. Every fifth batch is shorter."""
    return 5 if number % 5 == 4 else ROWS


def parts_of(layers: Sequence[nn.Module], names: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters of the layers with the given names."""
    return [p for name in names for p in nn.ModuleList(layers).get_submodule(name).parameters()]


Late = Callable[[int], Mapping[str, int]]
"""A function that returns the layers whose stale weights a batch reads, and the age of the weights in batches."""


def never(number: int) -> Mapping[str, int]:
    """Return no layers: no batch reads stale weights."""
    return {}


@cache
def one_after_another(batches: int, spans: tuple[Span, ...], late: Late = never) -> dict[str, torch.Tensor]:
    """Train on one batch after another without a pipeline, and return the weights.

    Adam updates the layers that the batch steps, and counts the updates of each layer separately. While a batch reads
    stale weights, the older values temporarily replace the newest ones.
    """
    layers = model()
    optimizer = torch.optim.Adam(nn.ModuleList(layers).parameters(), lr=0.02, weight_decay=0.1)
    # the weights at the start and after each batch
    left = [[p.detach().clone() for p in nn.ModuleList(layers).parameters()]]
    for number in range(batches):
        rows = rows_of(number)
        for name, by in late(number).items():
            older = {
                id(p): v for p, v in zip(nn.ModuleList(layers).parameters(), left[max(0, number + 1 - by)], strict=True)
            }
            for p in parts_of(layers, [name]):
                p.data = older[id(p)].clone()
        x, target = batch(number, rows)
        for span in spans:
            part = span.clip_to(rows)
            if not part.rows:
                continue
            out = x[part.start : part.stop], chosen(number)
            for n, layer in enumerate(layers):
                seed_all(stream_seed(0, 0, n, number, part), torch.device("cpu"))
                out = layer(out)
            loss = squared_error(out[0], target[part.start : part.stop]) * part.rows / rows
            if loss.requires_grad:
                loss.backward()
        names = stepped(number) if late is never else None
        mine = {id(p) for p in parts_of(layers, chosen(number) if names is None else names)}
        for p, newest in zip(nn.ModuleList(layers).parameters(), left[-1], strict=True):
            p.data = newest.clone()
            if id(p) not in mine:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        left.append([p.detach().clone() for p in nn.ModuleList(layers).parameters()])
    return weights(layers)


def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
    """Run the layers of a stage on one micro-batch; the last stage returns its share of the loss."""
    x, target = item.data
    out = stage.run_layers(
        item, span, (x[span.start : span.stop], chosen(item.number)) if received is None else received
    )
    if stage.number < stage.last:  # type: ignore[attr-defined]
        return out
    return squared_error(out[0], target[span.start : span.stop]) * span.rows / item.rows


def stages_of(plan: Plan, rank: int, layers: Sequence[nn.Module], body: Any = body) -> list[Stage]:
    """Return the stages of one rank, each with an Adam optimizer."""
    made = []
    for number in plan.stages[rank]:
        mine = {n: layers[n] for n in range(*plan.layers[number])}
        optimizer = torch.optim.Adam(
            nn.ModuleDict({str(n): m for n, m in mine.items()}).parameters(), 0.02, weight_decay=0.1
        )
        stage = Stage(number, mine, body)
        stage.last = plan.n_stages - 1  # type: ignore[attr-defined]
        stage.step = lambda item, stage=stage, optimizer=optimizer: step(stage, item, optimizer)  # type: ignore[misc]
        made.append(stage)
    return made


def step(stage: Stage, item: Item, optimizer: torch.optim.Optimizer) -> None:
    """Update only the parameters that a batch steps, and keep the gradients of all others."""
    mine = {id(p) for p in stage.stepped_parameters(item)}
    others = {p: p.grad for g in optimizer.param_groups for p in g["params"] if id(p) not in mine}
    for p in others:
        p.grad = None
    optimizer.step()
    optimizer.zero_grad()
    for p, gradient in others.items():
        p.grad = gradient


def item(number: int, plan: Plan, late: Late = never) -> Item:
    """Return a batch with the layers that it uses, steps, and reads late."""
    rows = rows_of(number)
    names, steps = chosen(number), stepped(number)
    if late is not never:
        steps = None
    delays = {name: Delayed(by) for name, by in late(number).items() if name in names}
    use = LayerUse.from_names(names, plan.layers, steps, delays)
    return Item(number, rows, batch(number, rows), use=use)


def overlaps(events: Sequence[Any]) -> int:
    """Return the number of times that a batch began on a stage before the STEP of an earlier batch on that stage."""
    begun = {
        (e.instruction.stage, e.instruction.batch): e.start for e in reversed(events) if e.instruction.kind is Kind.F
    }
    over = {(e.instruction.stage, e.instruction.batch): e.end for e in events if e.instruction.kind is Kind.STEP}
    return sum(start < over[stage, n] for (stage, b), start in begun.items() for n in range(b))


PLANS = {
    "1 stage": planned(1, 2),
    "2 stages": planned(2, 2),
    "whole batches": planned(2, 1),
    "4 stages": planned(4, 2),
    "2 stages a rank": planned(4, 2, ranks=(0, 1, 0, 1)),
    "recomputed": planned(4, 2, recompute=True),
    "split backward": replace(planned(4, 2), split_backward=True),
}


@pytest.mark.parametrize("what", PLANS)
def test_weights_equal_one_after_another(what: str) -> None:
    """The weights equal the weights of sequential training bit by bit, although batches overlap."""
    plan, layers = PLANS[what], model()
    pipe = Loopback(plan, Jumbled(len(what)), lambda r: stages_of(plan, r, layers))
    for number in range(BATCHES):
        pipe.inject(lambda n=number: item(n, plan))  # type: ignore[misc]
        if number % 6 == 5:
            pipe.progress()
    pipe.drain()
    assert_close(weights(layers), one_after_another(BATCHES, plan.spans(Kind.F, 0)), exact=True)
    assert overlaps([e for engine in pipe.engines for e in engine.events]) >= 5


def some(number: int) -> Mapping[str, int]:
    """Return constant delays for two layers and for both alternatives of layer 4."""
    return {"1": 3, "6": 1, "4.nets.0": 4, "4.nets.1": 4}


def bulks(number: int) -> Mapping[str, int]:
    """Return delays with which every batch reads all weights as of the start of its group of four batches."""
    return dict.fromkeys((*WHOLE, "4.nets.0", "4.nets.1"), number % 4 + 1)


@for_each("late", [some, bulks])
@for_each("what", ["1 stage", "2 stages", "2 stages a rank", "recomputed", "split backward"])
def test_late_reads_get_older_values(what: str, late: Late) -> None:
    """Reading stale weights gives the same weights, bit by bit, as sequential training with the older values."""
    plan, layers = PLANS[what], model()
    pipe = Loopback(plan, Jumbled(len(what)), lambda r: stages_of(plan, r, layers))
    for number in range(BATCHES):
        pipe.inject(lambda n=number: item(n, plan, late))  # type: ignore[misc]
        if number % 6 == 5:
            pipe.progress()
    pipe.drain()
    wanted = one_after_another(BATCHES, plan.spans(Kind.F, 0), late)
    assert_close(weights(layers), wanted, exact=True)
    assert any(not torch.equal(w, wanted[n]) for n, w in one_after_another(BATCHES, plan.spans(Kind.F, 0)).items())


def test_a_program_can_not_read_late() -> None:
    """A schedule with a fixed order refuses batches that read stale weights."""
    schedule = make_schedule("pipedream")
    assert isinstance(schedule, Schedule)
    plan, layers = adapt_plan(planned(1, 2), schedule), model()
    pipe = Loopback(plan, schedule.program(plan), lambda r: stages_of(plan, r, layers))
    with pytest.raises(PlanError, match=r"reads layer '.*' late, but this schedule fixes its order"):
        pipe.inject(lambda: item(next(n for n in range(9) if "1" in chosen(n)), plan, some))


@pytest.mark.parametrize("shared", [{"steps": []}, {"delays": {"0": Delayed(1)}}])
def test_statistics_of_what_batches_share_must_not_change(shared: dict[str, Any]) -> None:
    """Running statistics are refused in a layer that a batch does not step, or whose weights it reads late."""
    plan = planned(1, 1)
    layers = [nn.BatchNorm1d(WIDTH) if n == 0 else nn.Linear(WIDTH, WIDTH) for n in range(DEPTH)]

    def straight(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        return squared_error(stage.run_layers(item, span, item.data[0]), item.data[1])

    pipe = Loopback(plan, Jumbled(), lambda r: stages_of(plan, r, layers, straight))
    use = LayerUse.from_names(["0"], plan.layers, **shared)
    pipe.inject(lambda: Item(0, ROWS, batch(0), use=use))
    with pytest.raises(PlanError, match=r"batch 0 changes 0\.\w+ on stage 0.*running statistics"):
        pipe.drain()


def test_batches_that_do_not_say_what_they_use_use_all() -> None:
    """Batches without a layer use do not overlap, and give the weights of GPipe on one stage bit by bit."""
    plan, layers, alone = planned(2, 2), model(), model()
    pipe = Loopback(plan, Jumbled(), lambda r: stages_of(plan, r, layers))
    for number in range(4):
        pipe.inject(lambda n=number: replace(item(n, plan), use=None))  # type: ignore[misc]
    pipe.drain()
    assert overlaps([e for engine in pipe.engines for e in engine.events]) == 0
    single = planned(1, 2)
    pipe = Loopback(single, make_program("gpipe", single), lambda r: stages_of(single, r, alone))
    for number in range(4):
        pipe.inject(lambda n=number: replace(item(n, single), use=None))  # type: ignore[misc]
        pipe.drain()
    assert_close(weights(layers), weights(alone), exact=True)


def make_program(name: str, plan: Plan) -> Any:
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    return schedule.program(plan)


def test_a_program_steps_what_batches_step() -> None:
    """On one stage, PipeDream gives the weights of sequential training, and updates only what each batch steps."""
    schedule = make_schedule("pipedream")
    assert isinstance(schedule, Schedule)
    plan, layers = adapt_plan(planned(1, 2), schedule), model()
    pipe = Loopback(plan, schedule.program(plan), lambda r: stages_of(plan, r, layers))
    for number in range(9):
        pipe.inject(lambda n=number: item(n, plan))  # type: ignore[misc]
        pipe.progress()
    pipe.drain()
    assert_close(weights(layers), one_after_another(9, plan.spans(Kind.F, 0)), exact=True)


@dataclass(frozen=True)
class Looking(Jumbled):
    """A policy that records every view that it receives."""

    seen: ClassVar[list[RankView]] = []

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction:
        self.seen.append(replace(view, uses=dict(view.uses), versions=dict(view.versions)))
        return ready[0]


def test_the_policy_sees_versions_and_uses() -> None:
    """The view of a policy contains the layers that batches use, and the number and last batch of their updates."""
    plan, layers = planned(1, 2), model()
    Looking.seen.clear()
    pipe = Loopback(plan, Looking(), lambda r: stages_of(plan, r, layers))
    for number in range(6):
        pipe.inject(lambda n=number: item(n, plan))  # type: ignore[misc]
    pipe.drain()
    first, last = Looking.seen[0], Looking.seen[-1]
    assert (list(first.uses), first.versions) == (list(range(6)), {})
    assert first.uses[3] == LayerUse.from_names(chosen(3), plan.layers)
    assert list(last.uses) == [5]
    for name, (times, by) in last.versions.items():
        users = [n for n in range(5) if name in (stepped(n) or (chosen(n) if stepped(n) is None else ()))]
        assert (times, by) == (len(users), users[-1])
    assert last.versions


def test_depth_is_what_may_be_under_way() -> None:
    """The engine requests batches until `depth` of them are in flight."""
    plan, layers = planned(2, 2), model()
    pipe = Loopback(plan, Jumbled(depth=3), lambda r: stages_of(plan, r, layers))
    engine = pipe.engines[1]  # receives nothing as long as the first stage does not run
    for number in range(3):
        assert engine.is_satisfied
        engine.inject(item(number, plan))
    assert not engine.is_satisfied


def test_nothing_is_kept_of_batches_that_are_over() -> None:
    """The size of the data that the order keeps is the same after 20 and after 60 batches."""
    plan, layers = planned(2, 2), model()
    pipe = Loopback(plan, Jumbled(), lambda r: stages_of(plan, r, layers))
    sizes = []
    for number in range(60):
        pipe.inject(lambda n=number: item(n, plan))  # type: ignore[misc]
        pipe.progress()
        if number in (19, 59):
            order = pipe.engines[0]._window.order  # type: ignore[union-attr]
            kept = [*vars(order).values(), *vars(order._tracker).values(), *vars(order._ledger).values()]  # type: ignore[attr-defined]
            sizes.append(sum(len(each) for each in kept if isinstance(each, (dict, list, set))))
    assert sizes[1] == sizes[0]


@pytest.mark.parametrize("name", ["8", "0.other", "7"])
def test_refuses_layers_that_are_not_here(name: str) -> None:
    plan, layers = planned(2, 2), model()
    pipe = Loopback(plan, Jumbled(), lambda r: stages_of(plan, r, layers))
    use = LayerUse((frozenset({name}), frozenset()))
    with pytest.raises(PlanError, match=f"layer '{name}' on stage 0.*layers are 0, 1, 2, 3"):
        pipe.inject(lambda: replace(item(0, plan), use=use))


def test_refuses_a_plan_that_it_can_not_order() -> None:
    """A policy without flushes refuses a plan with several weight versions."""
    plan, layers = replace(planned(2, 2), versions=(2, 1)), model()
    with pytest.raises(PlanError, match="one version"):
        Loopback(plan, Jumbled(), lambda r: stages_of(plan, r, layers))


# On processes -----------------------------------------------------------------------------------------------------


def on_a_process(rank: int, stages: int, victim: int | None) -> dict[str, torch.Tensor]:
    """Train on one rank and return the weights of its stage. The rank `victim` kills itself in batch 13."""
    torch.set_num_threads(1)
    plan, layers = planned(stages, 2), model()

    def killed(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        if rank == victim and item.number == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return body(stage, item, span, received)

    watch, transport = connect(rank, plan)
    stages_here = stages_of(plan, rank, layers, killed)
    engine = Engine(plan, Jumbled(rank), stages_here, transport, rank=rank, watch=watch)
    try:
        for number in range(BATCHES):
            engine.inject(item(number, plan))
            engine.progress()
        engine.drain()
    finally:
        engine.close()
        watch.close()
    mine = [str(n) for n in range(*plan.layers[rank])]
    return {n: w for n, w in weights(layers).items() if n.split(".")[0] in mine}


def test_on_processes() -> None:
    parts = run_ranks(on_a_process, 4, 4, None)
    wanted = one_after_another(BATCHES, planned(4, 2).spans(Kind.F, 0))
    got = {n: w for part in parts for n, w in part.items()}
    assert_close({n: got[n] for n in wanted}, wanted, exact=True)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all(victim: int) -> None:
    outcomes = watch_ranks(on_a_process, 3, 3, victim, timeout=30)
    assert "exit code -9" in outcomes[victim].error
    for rank in {0, 1, 2} - {victim}:
        assert PeerFailure.__name__ in outcomes[rank].error
        assert f"rank {victim}" in outcomes[rank].error
