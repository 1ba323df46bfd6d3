"""Small handwritten programs of every kind that schedules can generate, run with real tensors and optimizers.

Each result is compared with the same training without a pipeline. The programs run on two processes over gloo, and with
all ranks in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipes.engine import Engine, Item, Stage
from lightning_pipes.ir import (
    STEP,
    B,
    Cut,
    F,
    I,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Policy,
    Program,
    RankView,
    Span,
    W,
    verify,
)
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.testing.reference import Loopback
from tests.engine.pipes import (
    ROWS,
    TRANSPORTS,
    WIDTH,
    assert_close,
    batch,
    body,
    connect,
    cut,
    layers,
    make_stages,
    sgd_step,
    squared_error,
    weights,
)

Script = Callable[[Engine, int], None]
"""A function that drives the engine of one rank. Both ranks run the same function."""


@dataclass(frozen=True)
class Case:
    """The configuration of one engine: a plan, an order, the stages of each rank, and the batches to inject."""

    plan: Plan
    order: Program | Policy
    stages: Callable[[int], list[Stage]]
    items: Sequence[Callable[[], Item]]


def on_two_processes(
    make: Callable[[], tuple[Case, list[nn.Module]]], transport: str = "gloo"
) -> dict[str, torch.Tensor]:
    """Run a case on two processes and return the weights, each taken from the process that trains it."""
    parts = run_ranks(_run_case, 2, make, transport, timeout=60)
    return {n: w for part in parts for n, w in part.items()}


def _run_case(
    rank: int, make: Callable[[], tuple[Case, list[nn.Module]]], transport_name: str
) -> dict[str, torch.Tensor]:
    case, model = make()
    watch, transport = connect(rank, case.plan, transport_name)
    stages = case.stages(rank)
    engine = Engine(case.plan, case.order, stages, transport, rank=rank, watch=watch)
    for item in case.items:
        engine.inject(item())
    engine.drain()
    engine.close()
    watch.close()
    mine = {id(p) for s in stages for layer in s.layers.values() for p in layer.parameters()}
    return {n: p.detach().clone() for n, p in nn.ModuleList(model).named_parameters() if id(p) in mine}


def in_one_process(case: Case, model: list[nn.Module]) -> dict[str, torch.Tensor]:
    """Run a case with all ranks in this process and return the weights."""
    pipe = Loopback(case.plan, case.order, case.stages)
    for item in case.items:
        pipe.inject(item)
        pipe.progress()
    pipe.drain()
    return weights(model)


def check(make: Callable[[], tuple[Case, list[nn.Module]]], wanted: dict[str, torch.Tensor]) -> None:
    """Compare the weights of a case with `wanted`, in one process and on two processes."""
    case, model = make()
    if isinstance(case.order, Program):
        verify(case.order, case.plan)
    assert_close(in_one_process(case, model), wanted)
    got = on_two_processes(make)
    assert_close({n: got[n] for n in wanted}, wanted)


# Two jobs with different batch sizes, interleaved in one window -----------------------------------------------------


def two_jobs() -> tuple[Case, list[nn.Module]]:
    """Return a case with two jobs, whose micro-batches alternate in one window."""
    plan = Plan((0, 1), (Cut.even(8, 2, 2), Cut.even(6, 3, 2)))
    a, b = plan.spans(Kind.F, 0, 0), plan.spans(Kind.F, 0, 1)

    def row(s: int) -> tuple[Instruction, ...]:
        forwards = [F(s, a[0]), F(s, b[0], 1), F(s, a[1]), F(s, b[1], 1), F(s, b[2], 1)]
        backwards = [B(s, b[0], 1), B(s, a[0]), B(s, a[1]), STEP(s), B(s, b[1], 1), B(s, b[2], 1), STEP(s, 1)]
        return (*forwards, *backwards)

    models = [layers(seed=1), layers(seed=2)]

    def stages(rank: int) -> list[Stage]:
        return [
            s for job, m in enumerate(models) for s in make_stages(plan, rank, m, sgd_step(0.1 * (job + 1)), job=job)
        ]

    items = [lambda: Item(0, 8, batch(0, 8)), lambda: Item(0, 6, batch(0, 6, job=1), job=1)]
    return Case(plan, Program((row(0), row(1))), stages, items), [*models[0], *models[1]]


def test_two_jobs() -> None:
    wanted = []
    for job, rows in ((0, 8), (1, 6)):
        net = nn.Sequential(*layers(seed=job + 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * (job + 1), momentum=0.9)
        x, target = batch(0, rows, job)
        squared_error(net(x), target).backward()
        optimizer.step()
        wanted += list(net)
    check(two_jobs, weights(wanted))


# Spans that differ between forward and backward, between stages, and on links ---------------------------------------


UNEQUAL = {
    "backward 1+1+2": Cut(4, (cut(2, 2), cut(2, 2)), (cut(1, 1, 2), cut(1, 1, 2))),
    "per stage": Cut(4, (cut(1, 1, 1, 1), cut(3, 1)), (cut(4), cut(2, 2))),
    "links": Cut(4, (cut(2, 2), cut(4)), (cut(1, 3), cut(1, 2, 1)), (cut(1, 3), cut(4)), (cut(4), cut(2, 2))),
}


def unequal(name: str, rows: int) -> tuple[Case, list[nn.Module]]:
    """Return a case in which every stage runs all forwards and then all backwards, with spans from `UNEQUAL`."""
    plan = Plan((0, 1), (UNEQUAL[name],))
    rows_of = [
        (*(F(s, x) for x in plan.spans(Kind.F, s)), *(B(s, x) for x in plan.spans(Kind.B, s)), STEP(s)) for s in (0, 1)
    ]
    model = layers(seed=3)
    stages = lambda rank: make_stages(plan, rank, model, sgd_step())  # noqa: E731
    return Case(plan, Program(tuple(rows_of)), stages, [lambda: Item(0, rows, batch(0, rows))]), model


class Unequal:
    """A picklable call of `unequal`, which each process makes again."""

    def __init__(self, name: str, rows: int) -> None:
        self.name, self.rows = name, rows

    def __call__(self) -> tuple[Case, list[nn.Module]]:
        return unequal(self.name, self.rows)


@pytest.mark.parametrize("name", UNEQUAL)
@pytest.mark.parametrize("rows", [4, 3])
def test_unequal_spans(name: str, rows: int) -> None:
    """The weights equal training without a pipeline, also for a batch that is shorter than the plan."""
    net = nn.Sequential(*layers(seed=3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, target = batch(0, rows)
    squared_error(net(x), target).backward()
    optimizer.step()
    wanted = weights(list(net))
    case, model = unequal(name, rows)
    verify(case.order, case.plan)  # type: ignore[arg-type]
    assert_close(in_one_process(case, model), wanted)
    if rows == 4:
        got = on_two_processes(Unequal(name, rows))
        assert_close({n: got[n] for n in wanted}, wanted)


# An asynchronous window: each B uses the weight version of its F ----------------------------------------------------


class Asynchronous:
    """A picklable call of `asynchronous`, which each process makes again."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __call__(self) -> tuple[Case, list[nn.Module]]:
        return asynchronous(self.batches)


def asynchronous(batches: int) -> tuple[Case, list[nn.Module]]:
    """Return a case of 1F1B across batches, in which stage 0 runs one batch ahead and stores two weight versions."""
    plan = Plan((0, 1), (Cut.even(4, 1, 2),), batches=batches, versions=(2, 1))
    span = Span(0, 4)
    head = ((F(0, span),), (F(1, span), B(1, span), STEP(1)))
    cycle = (
        (F(0, span, batch=1), B(0, span), STEP(0)),
        (F(1, span, batch=1), B(1, span, batch=1), STEP(1, batch=1)),
    )
    tail = ((B(0, span), STEP(0)), ())
    model = layers(seed=4)
    stages = lambda rank: make_stages(plan, rank, model, sgd_step())  # noqa: E731
    items = [lambda n=n: Item(n, 4, batch(n, 4)) for n in range(batches)]
    return Case(plan, Program(head, cycle, tail), stages, items), model


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_asynchronous_weight_versions(batches: int) -> None:
    """Compare with a loop in which stage 0 uses its weights after update n - 2 for forward and backward of batch n."""
    first, last = nn.Sequential(*layers(seed=4)[:2]), nn.Sequential(*layers(seed=4)[2:])
    steps = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (first, last)]
    pending: list[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]] = []

    def finish() -> None:
        copies, hidden, gradient = pending.pop(0)
        found = torch.autograd.grad(hidden, copies, gradient)
        for p, g in zip(first.parameters(), found, strict=True):
            p.grad = g
        steps[0].step()

    for n in range(batches):
        x, target = batch(n, 4)
        copies = [p.detach().clone().requires_grad_() for p in first.parameters()]
        names = [name for name, _ in first.named_parameters()]
        hidden = torch.func.functional_call(first, dict(zip(names, copies, strict=True)), (x,))
        entering = hidden.detach().requires_grad_()
        steps[1].zero_grad()
        squared_error(last(entering), target).backward()
        steps[1].step()
        assert entering.grad is not None
        pending.append((copies, hidden, entering.grad))
        if n >= 1:
            finish()
    finish()
    case, _ = asynchronous(batches)
    assert isinstance(case.order, Program)
    assert verify(case.order, case.plan, batches).versions == (min(batches, 2), 1)
    check(Asynchronous(batches), weights([*first, *last]))


# A policy that runs the instructions that are ready -----------------------------------------------------------------


@dataclass(frozen=True)
class LastSamplesFirst(Policy):
    """A policy that runs forwards from the last micro-batch to the first, and backwards as soon as possible.

    No static schedule sends messages in this order.
    """

    name: str = "last samples first"

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return max(ready, key=lambda i: (i.kind is not Kind.F, i.span.start))


def by_policy() -> tuple[Case, list[nn.Module]]:
    """Return a case that is ordered by `LastSamplesFirst`."""
    plan = Plan.even(2, 4, ROWS)
    model = layers(seed=5)
    stages = lambda rank: make_stages(plan, rank, model, sgd_step())  # noqa: E731
    return Case(plan, LastSamplesFirst(), stages, [lambda: Item(0, ROWS, batch())]), model


def test_policy() -> None:
    net = nn.Sequential(*layers(seed=5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, target = batch()
    squared_error(net(x), target).backward()
    optimizer.step()
    check(by_policy, weights(list(net)))


def test_policy_decides_the_order() -> None:
    plan = Plan.even(2, 4, ROWS)
    pipe = Loopback(plan, LastSamplesFirst(), lambda r: make_stages(plan, r, layers()))
    pipe.inject(lambda: Item(0, ROWS, batch()))
    pipe.drain()
    forwards = [e.instruction.span.start for e in pipe.engines[0].events if e.instruction.kind is Kind.F]
    assert forwards == [6, 4, 2, 0]


@pytest.mark.parametrize("rows", [3, 8])
def test_policy_with_a_short_batch_and_several_steps(rows: int) -> None:
    plan = Plan.even(2, 4, ROWS)
    model, reference = layers(), nn.Sequential(*layers())
    pipe = Loopback(plan, LastSamplesFirst(), lambda r: make_stages(plan, r, model, sgd_step()))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        pipe.inject(lambda n=number: Item(n, rows, batch(n, rows)))  # type: ignore[misc]
        pipe.drain()
        optimizer.zero_grad()
        x, target = batch(number, rows)
        squared_error(reference(x), target).backward()
        optimizer.step()
    assert_close(weights(model), weights(list(reference)))


# A program changed between two steps; input and weight gradients computed separately --------------------------------


def split_program(plan: Plan) -> Program:
    """Return a program in GPipe's order with I and W instead of B, in which all W come last."""
    return Program(
        tuple(
            (
                *(F(s, x) for x in plan.spans(Kind.F, s)),
                *(I(s, x) for x in plan.spans(Kind.I, s)),
                *(W(s, x) for x in plan.spans(Kind.W, s)),
                STEP(s),
            )
            for s in range(plan.n_stages)
        )
    )


def test_swap_between_steps() -> None:
    """Adopting another plan and order before each step gives the weights of training without a pipeline."""
    even = Plan.even(2, 4, ROWS)
    other = Plan.even(2, 2, ROWS)
    split = Plan((0, 1), (Cut.even(ROWS, 3, 2),), split_backward=True)
    model, reference = layers(), nn.Sequential(*layers())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    pipe = Loopback(even, make_schedule("1f1b").program(even), lambda r: make_stages(even, r, model, sgd_step()))
    swaps = [
        None,
        (even, make_schedule("gpipe").program(even)),
        (other, make_schedule("kfkb", k=2).program(other)),
        (split, split_program(split)),
        (even, LastSamplesFirst()),
    ]
    for number, swap in enumerate(swaps):
        if swap is not None:
            pipe.adopt(*swap)
        pipe.inject(lambda n=number: Item(n, ROWS, batch(n)))  # type: ignore[misc]
        pipe.drain()
        optimizer.zero_grad()
        x, target = batch(number)
        squared_error(reference(x), target).backward()
        optimizer.step()
    assert_close(weights(model), weights(list(reference)))


def test_no_swap_in_a_window() -> None:
    """Adopting an order while batches are in flight is refused."""
    plan = Plan.even(2, 4, ROWS)
    pipe = Loopback(plan, make_schedule("1f1b").program(plan), lambda r: make_stages(plan, r, layers()))
    pipe.inject(lambda: Item(0, ROWS, batch()))
    with pytest.raises(PlanError, match="drain first"):
        pipe.adopt(plan, make_schedule("gpipe").program(plan))


# Edges that carry any tree; shapes that change every step -----------------------------------------------------------


class Fork(nn.Module):
    """A layer whose output is a dictionary of tensors, None, an int, and a mask whose first axis is not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "pair": (self.a(x), self.b(x).t().contiguous().t()),
            "none": None,
            "power": 2,
            "mask": torch.ones(3, 6).double(),
            "ids": x.long(),
        }


class Join(nn.Module):
    """A layer that receives the dictionary of `Fork` and returns one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 6).double()

    def forward(self, edge: dict[str, Any]) -> torch.Tensor:
        a, b = edge["pair"]
        assert edge["none"] is None
        assert not edge["ids"].is_floating_point()
        out = self.c(a * edge["mask"][0]) ** edge["power"]
        return out + b  # type: ignore[no-any-return]


def trees() -> tuple[Case, list[nn.Module]]:
    """Return a case with `Fork` on the first stage and `Join` on the second."""
    torch.manual_seed(6)
    model: list[nn.Module] = [Fork(), Join()]
    plan = Plan.even(2, 3, ROWS)
    stages = lambda rank: make_stages(plan, rank, model, sgd_step())  # noqa: E731
    return Case(plan, make_schedule("1f1b").program(plan), stages, [lambda: Item(0, ROWS, batch())]), model  # type: ignore[union-attr]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tree_on_the_edge(transport: str) -> None:
    torch.manual_seed(6)
    net: list[nn.Module] = [Fork(), Join()]
    optimizer = torch.optim.SGD(nn.ModuleList(net).parameters(), lr=0.1, momentum=0.9)
    x, target = batch()
    squared_error(net[1](net[0](x)), target).backward()
    optimizer.step()
    check(trees, weights(net))
    got, wanted = on_two_processes(trees, transport), weights(net)
    assert_close({n: got[n] for n in wanted}, wanted)


def shapes(rank: int, name: str) -> list[torch.Tensor]:
    """Return the gradients of a stage for steps whose messages have different shapes, small and large in turn."""
    torch.manual_seed(7)
    model = [nn.Linear(1, 1).double(), nn.Linear(1, 1).double()]
    plan = Plan.even(2, 2, 4)
    watch, transport = connect(rank, plan, name)
    engine = Engine(
        plan, make_schedule("1f1b").program(plan), make_stages(plan, rank, model), transport, rank=rank, watch=watch
    )  # type: ignore[union-attr]
    found = []
    for n, width in enumerate((3, 20_000, 5, 70_000, 1)):
        x = torch.full((4, width, 1), 0.5).double()
        engine.inject(Item(n, 4, (x, torch.zeros_like(x))))
        engine.drain()
        found += [p.grad.clone() for p in model[rank].parameters() if p.grad is not None]
        model[rank].zero_grad()
    engine.close()
    watch.close()
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shapes_change_every_step(transport: str) -> None:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(1, 1).double(), nn.Linear(1, 1).double())
    wanted: list[list[torch.Tensor]] = [[], []]
    for width in (3, 20_000, 5, 70_000, 1):
        x = torch.full((4, width, 1), 0.5).double()
        net.zero_grad()
        (net(x) ** 2).mean().backward()
        for rank in (0, 1):
            wanted[rank] += [p.grad.clone() for p in net[rank].parameters() if p.grad is not None]
    for got, want in zip(run_ranks(shapes, 2, transport), wanted, strict=True):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


# Tied weights on the first and the last stage -----------------------------------------------------------------------


def tied(rank: int) -> torch.Tensor:
    """Train two layers with the same weight on two ranks, which sum its gradients, and return the weight."""
    torch.manual_seed(8)
    model = [nn.Linear(6, 6, bias=False).double(), nn.Linear(6, 6, bias=False).double()]
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())  # each rank has a copy
    plan = Plan.even(2, 4, ROWS)
    watch, transport = connect(rank, plan)
    optimizer = torch.optim.SGD(model[rank].parameters(), lr=0.1)

    def step(item: Item) -> None:
        for p in model[rank].parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()

    stages = make_stages(plan, rank, model, lambda _: step)
    engine = Engine(plan, make_schedule("1f1b").program(plan), stages, transport, rank=rank, watch=watch)  # type: ignore[union-attr]
    for n in range(3):
        engine.inject(Item(n, ROWS, batch(n)))
        engine.drain()
    engine.close()
    watch.close()
    return model[rank].weight.detach()


def test_tied_weights() -> None:
    """The shared weight on both ranks equals training in one process."""
    torch.manual_seed(8)
    weight = nn.Parameter(nn.Linear(6, 6, bias=False).double().weight.detach().clone())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for n in range(3):
        x, target = batch(n)
        optimizer.zero_grad()
        squared_error(x @ weight.t() @ weight.t(), target).backward()
        optimizer.step()
    for got in run_ranks(tied, 2):
        torch.testing.assert_close(got, weight.detach(), rtol=1e-10, atol=1e-12)


# Layers that are difficult for autograd -----------------------------------------------------------------------------


class InPlace(nn.Module):
    """A layer that changes its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x.mul_(2)


class Transposed(nn.Module):
    """A layer whose output is a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).unsqueeze(0).transpose(0, 1)[:, 0]


@pytest.mark.parametrize("odd", [InPlace, Transposed])
@pytest.mark.parametrize("where", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_odd_layers(odd: type[nn.Module], where: int, recompute: bool) -> None:
    """Layers that work in place or return views have correct gradients at each position, also with recomputation."""

    def build() -> list[nn.Module]:
        torch.manual_seed(9)  # no Tanh, because its output must not be changed, even without a pipeline
        made: list[nn.Module] = [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]
        made[where] = odd()
        return made

    plan = Plan.even(4, 4, ROWS, recompute=[recompute] * 4)
    model = build()
    pipe = Loopback(plan, make_schedule("1f1b").program(plan), lambda r: make_stages(plan, r, model))  # type: ignore[union-attr]
    pipe.inject(lambda: Item(0, ROWS, tuple(t.clone() for t in batch())))
    pipe.drain()
    reference = build()
    x, target = batch()
    squared_error(nn.Sequential(*reference)(x.clone()), target).backward()
    got = {n: p.grad for n, p in nn.ModuleList(model).named_parameters()}
    assert_close(got, {n: p.grad for n, p in nn.ModuleList(reference).named_parameters()})


def test_frozen_first_stage_and_empty_stage() -> None:
    """Gradients are correct if the first stage is frozen and the second stage has no layers."""
    plan = Plan.even(3, 4, ROWS)
    model, reference = layers(2), nn.Sequential(*layers(2))
    for m in (model[0], reference[0]):
        m.requires_grad_(False)

    def stages(rank: int) -> list[Stage]:
        stage = Stage(rank, {0: {0: model[0]}, 1: {}, 2: {1: model[1]}}[rank], body)
        stage.is_last_of_test = rank == 2  # type: ignore[attr-defined]
        return [stage]

    pipe = Loopback(plan, make_schedule("1f1b").program(plan), stages)  # type: ignore[union-attr]
    pipe.inject(lambda: Item(0, ROWS, batch()))
    pipe.drain()
    x, target = batch()
    squared_error(reference(x), target).backward()
    got = {n: p.grad for n, p in nn.ModuleList(model).named_parameters()}
    assert_close(got, {n: p.grad for n, p in nn.ModuleList(list(reference)).named_parameters()})
