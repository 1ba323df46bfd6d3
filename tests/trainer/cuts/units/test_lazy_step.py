"""Tests of stages that run one after another in one process, compared with the unsplit model."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from lightning_pipes.engine.compute.rng import AFTER_LAYERS, BEFORE_LAYERS
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.units.borders import Borders, find_slices, match_starts, merge_units
from lightning_pipes.trainer.cuts.units.fake_run import FakeRun
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from lightning_pipes.trainer.cuts.units.lazy_step import LazyStep
from lightning_pipes.trainer.cuts.units.recording import StepRecord, record_step
from lightning_pipes.trainer.cuts.units.sequential_slices import SequentialSlices
from lightning_pipes.trainer.cuts.units.timing import SavedByUnits, measure_units
from lightning_pipes.trainer.cuts.units.trace import map_leaves, tensors_of
from lightning_pipes.trainer.user.unchanged import keep_unchanged
from lightning_pipes.trainer.weights.private_transformers import install_output_hooks
from tests.trainer.cuts.units.library_zoo import HUGGING_FACE, VISION
from tests.trainer.cuts.units.zoo import CASES, WIDTH, Case, Checkpoints, classify, numbers
from tests.virtual_clock import VirtualClock

CPU = torch.device("cpu")


def cloned(batch: Any) -> Any:
    """Return a copy of a batch with cloned tensors."""
    return map_leaves(batch, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


def run_in(case: Case, work: Callable[[], Any]) -> Any:
    """Do some work with a case, and leave its model and torch's random numbers unchanged."""
    with keep_unchanged(case.model), torch.random.fork_rng():
        return work()


def record(
    case: Case, choose: Any = None, fake: FakeRun | None = None, slices: SequentialSlices | None = None
) -> StepRecord:
    """Record the step of a case."""
    step, batch = partial(case.step, case.model), partial(cloned, case.batch)
    return record_step(case.model, partial(run_in, case), step, batch, (), CPU, choose, fake=fake, slices=slices)


def measure(case: Case, found: StepRecord) -> list[float] | None:
    """Return the measured seconds of each unit, or None if the measured step ran differently."""
    step, batch = partial(case.step, case.model), partial(cloned, case.batch)
    measured = measure_units(case.model, found, partial(run_in, case), step, batch, (), CPU, lambda loss: loss)
    return None if measured is None else [each.forward + each.backward for each in measured]


def cut(case: Case, stages: int, measured: bool = False) -> UnitLayout:
    """Return the layout of a case, with a single unit for each module that no border divides."""
    install_output_hooks(case.model)
    found = record(case)
    starts = Borders(found, measure(case, found) if measured else None).choose(stages)
    merged = record(case, partial(merge_units, case.model, found, starts))
    places = match_starts(found, merged, starts)
    assert places is not None
    return UnitLayout.from_record(merged, places)


class Stages:
    """Runs the stages of a model in one process. Each stage has a copy of the model without the weights of others."""

    def __init__(self, case: Case, layout: UnitLayout) -> None:
        self.case = case
        self.models = [copy.deepcopy(case.model) for _ in layout.starts]
        for stage, model in enumerate(self.models):
            put_on_meta(model, {name for name, stages in layout.parts_of.items() if stage not in stages})
        self.seconds = [0.0 for _ in layout.starts]
        """Processor seconds of each stage in the last batch, forward and backward, for `benchmarks/any_model.py`."""
        self.steps = [LazyStep(model, layout, stage, CPU) for stage, model in enumerate(self.models)]

    def train(self, batch: Any, seed: Callable[[int], None] | None = None) -> torch.Tensor:
        """Run one batch, forward and backward, and return its loss.

        Args:
            seed: as for `LazyStep.run`.
        """
        sent: Any = None
        entered: list[list[torch.Tensor]] = []
        left: list[Any] = []
        for stage, (lazy, model) in enumerate(zip(self.steps, self.models, strict=True)):
            if sent is not None:
                sent = (tuple(t.detach().requires_grad_(t.requires_grad) for t in sent[0]), sent[1])
                entered.append(list(sent[0]))
            if seed is not None:
                seed(BEFORE_LAYERS)  # every process begins with this stream
            begun = time.thread_time()
            sent = lazy.run(lambda given, model=model: self.case.step(model, given), cloned(batch), (), sent, seed)
            self.seconds[stage] = time.thread_time() - begun
            left.append(sent)
        begun = time.thread_time()
        sent.backward()
        self.seconds[-1] += time.thread_time() - begun
        for stage in reversed(range(len(entered))):
            values, (outputs, _) = entered[stage], left[stage]
            begun = time.thread_time()
            pairs = [(o, v.grad) for o, v in zip(outputs, values, strict=True) if v.grad is not None]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            self.seconds[stage] += time.thread_time() - begun
        return sent.detach()

    def gradients(self) -> dict[str, torch.Tensor]:
        total: dict[str, torch.Tensor] = {}
        for model in self.models:
            for name, p in model.named_parameters():
                if p.grad is not None and not p.is_meta:
                    total[name] = total[name] + p.grad if name in total else p.grad
        return total


def put_on_meta(model: nn.Module, names: set[str]) -> None:
    """Put weights on the meta device, with all names of a weight. Weights that the record has not seen stay."""
    made: dict[int, nn.Parameter] = {}
    canonical = {id(p): name for name, p in model.named_parameters()}
    for part in model.modules():
        for name, p in part._parameters.items():
            if p is not None and canonical.get(id(p), "") in names:
                stand = made.setdefault(id(p), nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad))
                part._parameters[name] = stand


def batches(case: Case) -> list[Any]:
    """Return three batches: the recorded batch, one with one sample less, and one with other values."""
    rows = len(tensors_of(case.batch)[0])

    def change(number: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or len(leaf) != rows:
            return leaf
        return leaf[:-1] if number == 1 else leaf.flip(-1) if number == 2 else leaf

    return [map_leaves(case.batch, partial(change, number)) for number in range(3)]


def check_exact(name: str, case: Case, layout: UnitLayout, given: list[Any]) -> None:
    """Check losses, gradients and buffers of stages against the unsplit model."""
    stages, whole = Stages(case, layout), copy.deepcopy(case.model)
    for number, batch in enumerate(given):
        torch.manual_seed(number)
        loss = stages.train(batch)
        torch.manual_seed(number)
        expected = case.step(whole, cloned(batch))
        expected.backward()
        assert abs(float(loss - expected.detach())) < 1e-12, (name, number)
    found = stages.gradients()
    for weight, p in whole.named_parameters():
        if p.grad is not None:
            assert weight in found or not p.grad.any(), f"{name}: no stage has a gradient of {weight}"
            worst = float((found[weight] - p.grad).abs().max()) if weight in found else 0.0
            assert worst < 1e-12, f"{name}: {weight} is off by {worst}"
    for buffer, value in whole.named_buffers():
        users = layout.parts_of.get(buffer, range(layout.n_parts))
        assert torch.equal(stages.models[users[-1]].get_buffer(buffer), value), f"{name}: {buffer}"


def check_cut(name: str, make: Callable[[], Case], stages: int) -> None:
    """Cut a case into a number of stages and compare these with the unsplit model."""
    layout, case = cut(make(), stages), make()
    check_exact(name, case, layout, batches(case))


def check_borders(name: str, make: Callable[[], Case], seeds: int) -> None:
    """Compare the stages of a case with the unsplit model, for random cuts."""
    found = record(make())
    borders = Borders(found)
    possible = [n for n in range(1, len(found.units)) if borders.is_possible(n)]
    for seed in range(seeds):
        choice = random.Random(seed)
        starts = (0, *sorted(choice.sample(possible, min(len(possible), choice.randint(1, 3)))))
        case = make()
        check_exact(f"{name} {starts}", case, UnitLayout.from_record(found, starts), [case.batch])


BY_WEIGHTS = {
    ".item() control flow": r"zoo\.py:\d+ \(if h\.mean\(\)\.item\(\) > 1e9:\) can't .*: aten\S+ reads a value",
    "experts by hand": r"zoo\.py:\d+ \(at, place = .*nonzero\(as_tuple=True\)\) can't .*: the shape of",
    "things left behind": r"zoo\.py:\d+ \(self\.share = 0\.5 \+ float\(.*\) can't .*: aten\S+ reads a value",
}
"""Cases whose steps read numbers from weights, with the error of a recording without values."""


@pytest.mark.parametrize("name", CASES)
def test_record_without_values_equals_the_record_of_a_step(name: str) -> None:
    case = CASES[name]()
    put_on_meta(case.model, {name for name, _ in case.model.named_parameters()})
    if name in BY_WEIGHTS:
        with pytest.raises(PipelineError, match=f"weights are on the meta device.*{BY_WEIGHTS[name]}"):
            record(case, fake=FakeRun(CPU))
        return
    found, expected = record(case, fake=FakeRun(CPU)), record(CASES[name]())
    assert all(p.is_meta and type(p) is nn.Parameter for p in case.model.parameters())
    units = [[replace(unit, drew=False) for unit in each.units] for each in (found, expected)]
    assert units[0] == units[1]
    assert found.drawing >= expected.drawing, "what may draw counts"
    assert (found.bytes, found.results, found.calls) == (expected.bytes, expected.results, expected.calls)
    borders = [Borders(each) for each in (found, expected)]
    possible = [[each.is_possible(n) for n in range(1, len(found.units))] for each in borders]
    assert possible[0] == possible[1]


class ByBatch(nn.Module):
    """A module that selects entries and branches by the batch, and writes results into a tensor that it creates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0] > 0
        x = self.first(x) if chosen.any() else x
        x[:, 0] = 0
        out = torch.zeros_like(x, requires_grad=False)
        out[: int(chosen.sum())] = self.last(x)[chosen]
        return out[chosen.long().argsort()] + x[0, chosen[:4]].sum()


def test_numbers_of_the_batch_are_known_without_those_of_weights() -> None:
    """Check that a recording without weights still reads values of the batch, and equals a recording with weights."""

    def make() -> Case:
        torch.manual_seed(0)
        return Case(ByBatch().double(), (torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 4), classify)

    case = make()
    case.model.to("meta")
    assert record(case, fake=FakeRun(CPU)).units == record(make()).units


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_stages_are_exact(name: str, stages: int) -> None:
    check_cut(name, CASES[name], stages)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_are_parts_and_draw_what_they_draw_in_any_cut(reentrant: bool) -> None:
    def make() -> Case:
        torch.manual_seed(0)
        return CASES["checkpoints in a row"]()._replace(model=Checkpoints(0.5, reentrant).double())

    found = record(make())
    borders, held = Borders(found), [unit.held for unit in found.units]
    firsts = [held.index(number) for number in range(1, 5)]
    assert all(map(borders.is_possible, firsts))
    assert not any(borders.is_possible(n) for n in range(firsts[0], len(held)) if held[n] and held[n] == held[n - 1])
    losses, gradients = [], []
    for starts in [(0,), *((0, n) for n in firsts), (0, *firsts)]:
        stages = Stages(make(), UnitLayout.from_record(found, starts))
        losses.append(float(stages.train(stages.case.batch, torch.manual_seed)))
        gradients.append(stages.gradients())
    assert losses == [losses[0]] * len(losses)
    for other in gradients[1:]:
        assert other.keys() == gradients[0].keys()
        assert all(torch.allclose(other[name], g, rtol=0, atol=1e-12) for name, g in gradients[0].items())
    changed = []
    for change in (1e-6, -1e-6):  # backward must draw the same numbers as forward
        case = make()
        case.model.get_parameter("inlet.bias").data[0] += change
        stages = Stages(case, UnitLayout.from_record(found, (0, firsts[1])))
        changed.append(float(stages.train(case.batch, torch.manual_seed)))
    slope = float(gradients[0]["inlet.bias"][0])
    assert (changed[0] - changed[1]) / 2e-6 == pytest.approx(slope, rel=1e-6)


MODES: list[int] = []
"""The number of modes of torch functions that were active in each call of a `NoisyBlock`."""


class NoisyBlock(nn.Module):
    """A layer that draws random numbers at several places, also in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.join = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def run_inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.mix(x), 0.4).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        MODES.append(len(_get_current_function_mode_stack()))
        x = F.dropout(x, 0.3)
        x = x + checkpoint(self.run_inner, x, use_reentrant=False)
        return F.dropout(self.join(x), 0.2) + checkpoint(self.run_inner, x, use_reentrant=False)


class NoisyNet(nn.Module):
    """Layers that draw random numbers, between other code that does.

    Args:
        kind: whether the layers are "called" at once, as an nn.Sequential, or in a "loop", or in "checkpoints".
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.depth = kind, 6
        self.inlet, self.outlet, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        layers = [NoisyBlock(), nn.Dropout(0.2), NoisyBlock(), NoisyBlock(), nn.Linear(WIDTH, WIDTH), NoisyBlock()]
        self.layers = nn.Sequential(*layers) if kind == "called" else nn.ModuleList(layers)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(BEFORE_LAYERS)
        x = F.dropout(self.inlet(F.dropout(x, 0.1)), 0.1)
        if self.kind == "called":
            x = self.layers(x)
        else:
            for layer in self.layers[: self.depth]:
                x = layer(x) if self.kind == "loop" else checkpoint(layer, x, use_reentrant=False)
                x = F.dropout(x * 1.5, 0.05)
        return F.dropout(self.last(self.drop(F.dropout(self.outlet(self.drop(x)), 0.1))), 0.1)


@pytest.mark.parametrize("kind", ["called", "loop", "checkpoints"])
def test_random_numbers_are_those_of_layers_with_their_own_streams_in_any_cut(kind: str) -> None:
    """The borders are between layers, inside a layer, and in the code around layers, where a stage passes its state."""

    def make() -> Case:
        torch.manual_seed(0)
        return Case(NoisyNet(kind).double(), numbers(), lambda model, x: model(x).square().mean())

    whole = make().model
    for number, layer in enumerate(whole.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: torch.manual_seed(number) and None)
    layer.register_forward_hook(lambda *_: torch.manual_seed(AFTER_LAYERS) and None)
    expected = whole(make().batch).square().mean()
    expected.backward()
    found = record(make())
    inside = [] if kind == "checkpoints" else ["layers.3.join"]
    between = [["layers.2"], ["layers.5"], ["layers.2", "layers.3", "layers.4"]]
    for names in ([], *between, ["layers.0"], ["outlet", "last"], [*inside, "last"], ["layers.2", *inside]):
        starts, case = Borders(found).at(names), make()
        streams = [f"layers.{n}" for n in range(6)]
        slices, places = find_slices(case.model, found, starts, streams)
        assert (slices is not None) is (kind == "called" and names in between)
        choose = partial(merge_units, case.model, found, starts, layers=() if slices is None else streams)
        merged = record(case, choose, slices=slices)
        assert places.keys() <= {unit.name for unit in merged.units}
        layout = UnitLayout.from_record(merged, match_starts(found, merged, starts, places), slices, tuple(streams))
        stages = Stages(make(), layout)
        for _ in range(2):  # the second trace is compared with the first one
            MODES.clear()
            for model in stages.models:
                model.zero_grad()
            assert torch.equal(stages.train(stages.case.batch, torch.manual_seed), expected.detach()), names
            assert sum(MODES[:4]) <= 2 * ("layers.3.join" in names)  # only in a layer that a border divides
        for name, gradient in stages.gradients().items():
            assert torch.allclose(gradient, whole.get_parameter(name).grad, rtol=0, atol=1e-12), (names, name)
        for model in (whole, *stages.models):
            model.depth = 1  # a step that leaves out layers continues with the random numbers of the last one
        if kind != "called":
            assert torch.equal(stages.train(stages.case.batch, torch.manual_seed), whole(make().batch).square().mean())
        whole.depth = 6


@pytest.mark.parametrize("name", CASES)
def test_borders_anywhere_are_exact(name: str) -> None:
    check_borders(name, CASES[name], 4)


def test_modules_that_no_border_divides_are_one_unit() -> None:
    case = HUGGING_FACE["llama tied"]()
    layout = cut(case, 2)
    blocks = [n for n in layout.names if n.startswith("model.layers.")]
    assert len(blocks) - len({n.split(".")[2] for n in blocks}) < 20, "one block is open at most"
    assert len(layout.names) < 60
    opened = {*cut(CASES["things left behind"](), 2).names}
    assert "out" in opened
    assert not {"counting", "writing", "deferring"} & opened, "these leave something behind"


class Counting(nn.Module):
    """A layer without children that counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.scale


def test_modules_that_change_their_buffers_are_opened() -> None:
    """Check that a counter is no part of a unit, so that its values are merged. A batch norm is a unit."""
    layers = nn.Sequential(nn.Linear(6, 6), Counting(), nn.Sequential(nn.Linear(6, 6), Counting()), nn.BatchNorm1d(6))
    case = Case(layers, torch.ones(4, 6), lambda model, batch: model(batch).sum())
    found = record(case)
    assert found.atomic == ("0", "2.0", "3")
    assert {"1", "2.1"} <= found.stateful
    assert not any("calls" in name for unit in found.units for name in unit.weights)
    assert merge_units(layers, found, (0,), ()).keys() == {"0", "2.0", "3"}


CLOCK = VirtualClock()


class Sleep(torch.autograd.Function):
    """Returns its input. Forward and backward take the given seconds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        CLOCK.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        CLOCK.sleep(ctx.seconds)
        return gradient, None, None


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in (1, 4):
                x = Sleep.apply(x, 0.04, 0.0) if number == 1 else Sleep.apply(x, 0.0, 0.08)
        return x


def test_borders_balance_measured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK.patch(monkeypatch)
    torch.manual_seed(0)
    case = Case(Slow().double(), (torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 4), classify)
    found = record(case)
    seconds = measure(case, found)
    assert seconds is not None
    sleeps = [n for n, unit in enumerate(found.units) if unit.name == "Sleep.apply"]
    assert [seconds[n] for n in sleeps] == pytest.approx([0.04, 0.08], abs=1e-4)
    assert sum(seconds) == pytest.approx(0.12, abs=1e-3), "the others have none of it"
    border = Borders(found, seconds).choose(2)[1]
    assert sleeps[0] < border <= sleeps[1]


@pytest.mark.parametrize(
    ("others", "expected"),
    [((), (4, 4, 4)), ((0, 6, 0), (6, 1, 5)), ((3, 0, 0), (2, 5, 5)), ((50, 0, 0), (1, 5, 6)), ((2, 1, 6), (5, 6, 1))],
)
def test_borders_level_the_work_with_other_work(others: tuple[float, ...], expected: tuple[int, ...]) -> None:
    """Check the units of each stage if units are equal, and stages have other work of their own."""
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12))).double()
    case = Case(layers, (torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 4), classify)
    found = record(case)
    seconds = [float(unit.name.isdigit()) for unit in found.units]
    assert sum(seconds) == 12
    starts = Borders(found, seconds).choose(3, others=others)
    assert tuple(round(sum(seconds[a:b])) for a, b in pairwise((*starts, len(seconds)))) == expected


def test_units_count_the_bytes_that_they_save() -> None:
    """Check the bytes saved by each unit against values computed by hand.

    A linear layer saves its input, and tanh its result. A tensor that is saved twice counts once.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    case = Case(model, (torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 4), classify)
    found = record(case)
    saved = SavedByUnits({path: model.get_submodule(path) for path in found.atomic})
    counted = saved.measure(model, partial(case.step, model), partial(cloned, case.batch), ())
    of_units = dict(zip([unit.name for unit in found.units], counted, strict=True))
    assert (of_units["0"], of_units["1"], of_units["2"]) == (8 * 4 * 8, 8 * 5 * 8, 0)


class Catching(nn.Module):
    """A module whose bare `except` handles the end of a stage like an error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.layers(x)
        except:  # noqa: E722
            return torch.tanh(x)


def test_a_bare_except_does_not_run_another_way() -> None:
    def make() -> Case:
        torch.manual_seed(0)
        x = torch.randn(8, 4, dtype=torch.float64)
        return Case(Catching().double(), (x, torch.arange(8) % 4), classify)

    check_cut("bare except", make, 3)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_stages_of_hugging_face_are_exact(name: str) -> None:
    check_cut(name, HUGGING_FACE[name], 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_borders_anywhere_in_hugging_face_are_exact(name: str) -> None:
    check_borders(name, HUGGING_FACE[name], 4)


@pytest.mark.slow
@pytest.mark.skipif(not VISION, reason="torchvision and timm are not installed")
@pytest.mark.parametrize("name", VISION)
def test_stages_of_vision_models_are_exact(name: str) -> None:
    check_cut(name, VISION[name], 3)
    check_borders(name, VISION[name], 2)


@pytest.mark.parametrize("name", ["grad", "backward"])
def test_gradients_within_a_step_are_refused(name):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone().requires_grad_()
        loss = model(x).sum()
        if name == "backward":
            loss.backward(retain_graph=True)
            return loss
        (g,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
        return loss + g.sum()

    case = Case(model, torch.ones(3, 2), step)
    with pytest.raises(PipelineError, match=f"a step calls torch's {name} between its modules"):
        record(case)
