"""Plans whose forwards and backwards divide a batch differently: the passes that run, their cost, and their results."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipes.cost import CostModel, Link, Table
from lightning_pipes.engine import Item, Stage
from lightning_pipes.engine.compute.executor import Executor
from lightning_pipes.engine.compute.footprint import measure_footprint
from lightning_pipes.engine.compute.rng import AFTER_LAYERS, BEFORE_LAYERS
from lightning_pipes.ir import STEP, B, Cut, F, I, Instruction, Kind, Plan, PlanError, Program, Span, W
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.bounds import least_step
from lightning_pipes.planning.measured import Averages, StepSample
from lightning_pipes.planning.memory import peak_bytes, stage_peak
from lightning_pipes.sim import simulate
from lightning_pipes.sim.records.record import plan_data
from lightning_pipes.sim.records.record import plan_of as plan_of_data
from lightning_pipes.testing.generators import random_costs, random_plan
from lightning_pipes.testing.reference import Loopback
from tests.engine.pipes import WIDTH, assert_close, batch, body, cut, gradients, layers, make_stages, squared_error

FINER = Cut(4, (cut(4), cut(4)), (cut(1, 1, 2), cut(4)))
"""Stage 0 runs one forward of 4 samples, and backwards of 1, 1 and 2 samples."""
COARSER = Cut(4, (cut(1, 3), cut(4)), (cut(2, 2), cut(4)))
"""On stage 0, the forwards have 1 and 3 samples and the backwards 2 and 2, so neither division refines the other."""
SETTINGS = {
    "split": {},
    "whole": {"whole_forward": (True, False)},
    "recompute": {"recompute": (True, False)},
    "both": {"whole_forward": (True, False), "recompute": (True, False)},
}
TIMES: dict[Kind, Table] = {  # neither proportional nor affine, so that no other division has the same sum
    Kind.F: ((1, 3e-9), (2, 4e-9), (3, 9e-9), (4, 11e-9)),
    Kind.B: ((1, 5e-9), (2, 8e-9), (3, 19e-9), (4, 23e-9)),
    Kind.I: ((1, 2e-9), (2, 7e-9), (3, 10e-9), (4, 29e-9)),
    Kind.W: ((1, 1e-9), (2, 12e-9), (3, 14e-9), (4, 31e-9)),
}
COSTS = CostModel({(kind, s): table for kind, table in TIMES.items() for s in (0, 1)})
BYTES = replace(COSTS, forward_bytes=(10.0,), activation_bytes=(0, 100), working_bytes=(0.0, 7.0))


def program(plan: Plan) -> Program:
    """Return a program in which every stage runs all forwards and then all backwards."""
    late = (I, W) if plan.split_backward else (B,)
    rows = []
    for s in range(plan.n_stages):
        forwards = [F(s, span) for span in plan.spans(Kind.F, s)]
        rows.append((*forwards, *(make(s, span) for span in plan.spans(Kind.B, s) for make in late), STEP(s)))
    return Program(tuple(rows))


def plan_of(spans: Cut, setting: str, split_backward: bool) -> Plan:
    """Return a plan of two stages with the given spans and one of `SETTINGS`."""
    return Plan((0, 1), (spans,), split_backward=split_backward, **SETTINGS[setting])  # type: ignore[arg-type]


Ran = dict[Instruction, list[int]]
"""The number of samples in each run of the layers of stage 0, by the instruction that caused the run."""


def run(plan: Plan, model: list[nn.Module], make_body: Callable[..., Any] = body, rows: int = 4) -> Ran:
    """Run one batch with all ranks in this process, and return the runs of the layers of stage 0."""
    ran: Ran = {}
    current: list[Instruction] = []

    def counting(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        if stage.number == 0:
            ran.setdefault(current[-1], []).append(span.rows)
        return make_body(stage, item, span, received)

    class Noting(Executor):
        def run(self, i: Instruction) -> None:
            current.append(i)
            super().run(i)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_pipes.engine.engine.Executor", Noting)
        pipe = Loopback(plan, program(plan), lambda rank: make_stages(plan, rank, model, body=counting))
        pipe.inject(lambda: Item(0, rows, batch(0, rows)))
        pipe.drain()
    return ran


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("spans", [FINER, COARSER])
def test_a_forward_is_priced_as_it_runs_and_gradients_are_those_of_one_process(
    spans: Cut, setting: str, split_backward: bool
) -> None:
    """The simulated duration of each instruction is the sum of the passes that the engine runs for it.

    The gradients are compared with one process without a pipeline.
    """
    plan = plan_of(spans, setting, split_backward)
    model, alone = layers(), nn.Sequential(*layers())
    ran = run(plan, model)
    x, target = batch(0, 4)
    squared_error(alone(x), target).backward()
    assert_close(gradients(model), gradients(list(alone)))

    if spans is FINER:
        forward, backward = F(0, Span(0, 4)), I if split_backward else B
        again = {backward(0, span): [span.rows] for span in cut(1, 1, 2)}
        wanted = {
            "split": {forward: [1, 1, 2]},
            "whole": {forward: [4]} | again,
            "recompute": {forward: [1, 1, 2]} | again,
            "both": {forward: [4]} | again,
        }
        assert ran == wanted[setting]
    timeline = simulate(program(plan), plan, COSTS)
    priced = {e.instruction: e.end - e.start for e in timeline.events if e.rank == 0}
    atoms = {B: [[1, 1], [2]]} if spans is COARSER else {B: [[1], [1], [2]]}
    for kind in (Kind.I, Kind.W) if split_backward else (Kind.B,):
        for span, parts in zip(plan.spans(kind, 0), atoms[B], strict=True):
            i = Instruction(kind, 0, span=span)
            own = sum(dict(TIMES[kind])[rows] for rows in parts)
            forwards = sum(dict(TIMES[Kind.F])[rows] for rows in ran.get(i, ()))
            assert priced[i] == round((own + forwards) * 1e9), i
    for span in plan.spans(Kind.F, 0):
        i = F(0, span)
        assert priced[i] == round(sum(dict(TIMES[Kind.F])[rows] for rows in ran[i]) * 1e9), i


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_short_batch(setting: str) -> None:
    """A batch of 3 samples in a plan for 4 gives the gradients of one process, and runs passes of its own samples."""
    plan = plan_of(FINER, setting, False)
    model, alone = layers(), nn.Sequential(*layers())
    ran = run(plan, model, rows=3)
    x, target = batch(0, 3)
    squared_error(alone(x), target).backward()
    assert_close(gradients(model), gradients(list(alone)))
    assert ran[F(0, Span(0, 4))] == ([3] if "whole" in setting or setting == "both" else [1, 1, 1])


LATER = Cut(4, (cut(4), cut(4), cut(4)), (cut(4), cut(1, 1, 2), cut(4)))
"""The spans of `FINER` on stage 1 of three stages, which keeps its received input."""


@pytest.mark.parametrize(
    ("whole", "peak"),
    [
        # split: F takes 4 x 100, and 7 per sample of the running part. The largest part, 2 samples, comes last
        (False, 4 * 100 + 2 * 7),
        # whole: keeps 4 x 10 of input, plus 4 x 7 while F runs. The last B makes 2 x 100 again, with 2 x 10 left
        (True, max(4 * 10 + 4 * 7, 2 * 10 + 2 * 100 + 2 * 7, 4 * 10 + 100 + 7)),
    ],
)
def test_the_peak_of_memory_follows(whole: bool, peak: int) -> None:
    """The peak memory of stage 1, by simulation and by `peak_bytes`, is the value computed by hand."""
    plan = Plan((0, 1, 2), (LATER,), whole_forward=(False, whole, False))
    costs = CostModel(
        {(kind, s): table for kind, table in TIMES.items() for s in range(3)},
        forward_bytes=(10.0, 10.0),
        activation_bytes=(0, 100, 0),
        working_bytes=(0.0, 7.0, 0.0),
    )
    assert simulate(program(plan), plan, costs).peak_bytes[1] == peak
    assert peak_bytes(program(plan), plan, costs)[1] == peak
    for i in (F(1, Span(0, 4)), *(B(1, span) for span in cut(1, 1, 2))):
        assert min(costs.memory_change(i, plan)) >= 0
    held = [costs.memory_change(i, plan) for i in program(plan).head[1][:-1]]
    assert sum(taken for taken, _ in held) == sum(freed for _, freed in held)


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_held_is_what_is_said(whole: bool) -> None:
    """As measured on one rank, a forward in one piece keeps only its input, and each backward frees its rows of it."""
    plan = Plan((0, 0, 0), (LATER,), whole_forward=(False, whole, False))
    width = 1000

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):  # each operation keeps its own input
                x = torch.sin(x * self.weight)
            return x

    def stages_body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        x = 2 * item.data[span.start : span.stop] if stage.number == 0 else received
        out = stage.run_layers(item, span, x)
        return out.sum() if stage.number == 2 else out

    stages = [Stage(0, {}, stages_body), Stage(1, {0: Wide()}, stages_body), Stage(2, {}, stages_body)]
    executor = Executor(plan, stages, None, 0, 0)  # type: ignore[arg-type]  # nothing is sent
    row = 4 * width  # bytes
    wanted = {}
    order = [F(0, Span(0, 4)), F(1, Span(0, 4)), F(2, Span(0, 4)), B(2, Span(0, 4))]
    order += [B(1, span) for span in cut(1, 1, 2)]
    with measure_footprint(torch.device("cpu")) as found:
        executor.add(Item(0, 4, torch.rand(4, width, requires_grad=False)), 0)
        before = 0
        for i in order:
            executor.run(i)
            wanted[i] = found.live_bytes - before
            before = found.live_bytes
    activations = 10 * row  # inputs of five products and of five sines; the weights are not activations
    kept = row if whole else activations
    forward = wanted[F(0, Span(0, 4))] + wanted[F(1, Span(0, 4))]  # F1 takes over the output of F0
    assert 4 * kept <= forward - 4 * width * 4 <= 4 * kept + 2 * 4 * row  # the batch, and the messages between stages
    if whole:
        for span in cut(1, 1, 2)[:2]:
            gained = wanted[B(1, span)] - (row if span.start == 0 else 0)  # the first B allocates the weight's gradient
            assert gained <= -span.rows * row, "a backward gives its rows of the input back"


class Noise(nn.Module):
    """A layer that draws random numbers with `torch.randn`, and only in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape[1], dtype=x.dtype) if self.training else x


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Dropout(0.5), "layer 1 draws random numbers"),
        (Noise(), "layer 1 draws random numbers"),
        (nn.Sequential(nn.BatchNorm1d(WIDTH).double()), "layer 1 holds a BatchNorm1d"),
    ],
)
def test_forwards_that_give_other_results_in_parts_are_refused(layer: nn.Module, why: str) -> None:
    """A forward in one piece is refused if running it again in parts would give another result.

    Random numbers and batch normalization are examples. In evaluation mode, and if forward and backward have the same
    spans, the plan is accepted.
    """
    model = layers()
    model[1] = layer
    halves = Cut(4, (cut(4), cut(4)), (cut(2, 2), cut(4)))
    run(plan_of(halves, "split", False), model)
    with pytest.raises(PlanError, match=f"samples 0:4 in one piece.*{why}.*without whole_forward"):
        run(plan_of(halves, "whole", False), model)
    alike = Plan((0, 1), (Cut.even(4, 2, 2),), whole_forward=(True, False))
    run(alike, model)  # runs nothing in parts
    run(plan_of(halves, "whole", False), [m.eval() for m in model])


@pytest.mark.parametrize("where", [BEFORE_LAYERS, AFTER_LAYERS])
def test_user_code_around_the_layers_may_not_draw_either(where: int) -> None:
    """A forward in one piece is refused if user code before or after the layers draws random numbers."""

    def noisy(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        def user_code(layer: int) -> None:
            if stage.number == 0:
                stage.seed_user_code(item, span, layer)
                if item.data[2] and layer == where:
                    item.data[2]()

        user_code(BEFORE_LAYERS)
        out = body(stage, Item(item.number, item.rows, item.data[:2]), span, received)
        user_code(AFTER_LAYERS)
        return out

    def go(draw: Callable[[], Any] | None) -> None:
        plan = plan_of(FINER, "whole", False)
        pipe = Loopback(plan, program(plan), lambda rank: make_stages(plan, rank, layers(), body=noisy))
        pipe.inject(lambda: Item(0, 4, (*batch(0, 4), draw)))
        pipe.drain()

    go(None)
    for draw in (lambda: torch.rand(1), random.random, np.random.rand):
        with pytest.raises(PlanError, match="the step around the layers draws"):
            go(draw)


def test_layers_that_work_in_place() -> None:
    """Gradients are correct if a layer changes its input in place, although the forward runs twice."""
    plan = Plan((0, 1, 2), (LATER,), whole_forward=(False, True, False))

    def make() -> list[nn.Module]:
        model = layers(6)
        model[1] = model[1][0]  # tanh keeps its output  # type: ignore[index]
        model[2] = nn.Sequential(nn.ReLU(inplace=True), model[2])
        return model

    model, alone = make(), nn.Sequential(*make())
    run(plan, model)
    x, target = batch(0, 4)
    squared_error(alone(x), target).backward()
    assert_close(gradients(model), gradients(list(alone)))


@pytest.mark.parametrize("split_backward", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("spans", [FINER, COARSER])
def test_costs_are_measured_by_pass(spans: Cut, setting: str, split_backward: bool) -> None:
    """Costs measured from a timeline equal the true costs, and a simulation with them has the same makespan.

    The true times are proportional to the number of samples.
    """
    times = {Kind.F: 30, Kind.B: 70, Kind.I: 40, Kind.W: 50}
    true = CostModel({(kind, s): ((0, 0.0), (1, t * 1e-9)) for kind, t in times.items() for s in (0, 1)})
    true = replace(true, link=Link(latency=5e-9))
    plan = plan_of(spans, setting, split_backward)
    timeline = simulate(program(plan), plan, true)
    averages = Averages()
    averages.add([StepSample.from_events([e for e in timeline.events if e.rank == rank], plan) for rank in (0, 1)])
    for measured in (CostModel.from_timelines(timeline), averages.costs(overhead=False)):
        for kind in (Kind.F, Kind.I, Kind.W) if split_backward else (Kind.F, Kind.B):
            assert measured.seconds_at(kind, 0, 1) == pytest.approx(times[kind] * 1e-9)
        assert simulate(program(plan), plan, measured).makespan == timeline.makespan
    assert averages.has_measured(plan)


def test_plans_say_which_forwards_are_whole() -> None:
    """`whole_forward` is validated, survives conversion to plain data, and cannot be changed by `adopt`."""
    with pytest.raises(PlanError, match="whole_forward has 1 entries for 2 stages"):
        Plan((0, 1), (FINER,), whole_forward=(True,))
    with pytest.raises(PlanError, match="is True for the last stage"):
        Plan((0, 1), (FINER,), whole_forward=(True, True))
    plan = plan_of(FINER, "whole", False)
    assert plan_of_data(plan_data(plan)) == plan
    old = plan_data(plan)
    del old["whole_forward"]  # as written by earlier versions
    assert plan_of_data(old) == plan_of(FINER, "split", False)
    model = layers()
    pipe = Loopback(plan, program(plan), lambda rank: make_stages(plan, rank, model))
    with pytest.raises(PlanError, match="whole_forward"):
        pipe.adopt(replace(plan, whole_forward=()), program(plan))


def test_equal_spans_whose_forwards_run_otherwise_are_not_taken_for_equal() -> None:
    """Two forwards of two samples each have different durations if the backwards divide only the first of them."""
    plan = Plan((0, 1), (Cut(4, (cut(2, 2), cut(4)), (cut(1, 1, 2), cut(4))),))
    for order in (program(plan), make_schedule("ready")):
        timeline = simulate(order, plan, COSTS)  # type: ignore[arg-type]
        spent = {e.instruction: e.end - e.start for e in timeline.events}
        assert [spent[F(0, span)] for span in cut(2, 2)] == [2 * 3, 4]
        assert least_step(plan, COSTS) <= timeline.makespan


@pytest.mark.parametrize("seed", range(8))
def test_needs_of_a_stage_are_at_least_what_it_holds(seed: int) -> None:
    """For random plans, the bound `stage_peak` is at least the peak memory of the simulation."""
    rng = random.Random(seed)
    plan = random_plan(seed)
    n = plan.n_stages
    plan = replace(plan, whole_forward=(*(rng.random() < 0.5 for _ in range(n - 1)), False))
    costs = replace(
        random_costs(plan, seed),
        activation_bytes=tuple(rng.randrange(50) for _ in range(n)),
        working_bytes=tuple(float(rng.randrange(50)) for _ in range(n)),
        forward_bytes=tuple(float(rng.randrange(20)) for _ in range(n - 1)),
    )
    peak = peak_bytes(program(plan), plan, costs)
    assert peak == simulate(program(plan), plan, costs).peak_bytes
    for s in range(n):
        assert stage_peak(plan, costs, s, len(plan.spans(Kind.F, s))) >= peak[s]
