"""Profiles of layers: bytes computed by hand, times on a virtual clock, and peaks of memory as measured."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipes.cost import Cluster, Device, ModelProfile
from lightning_pipes.engine import Engine, Item, Stage
from lightning_pipes.engine.compute import profiler
from lightning_pipes.engine.compute.footprint import measure_footprint
from lightning_pipes.engine.compute.profiler import profile_layers
from lightning_pipes.ir import Kind, Plan, PlanError, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.fit import evaluate_plan
from lightning_pipes.testing.ranks import run_ranks
from tests.engine.pipes import connect
from tests.virtual_clock import VirtualClock

CPU = torch.device("cpu")


class Slow(nn.Module):
    """A layer whose forward takes a fixed time plus a time per row, and whose backward takes twice as long."""

    def __init__(self, clock: VirtualClock, fixed: float, by_row: float) -> None:
        super().__init__()
        self.clock, self.fixed, self.by_row = clock, fixed, by_row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Tick.apply(x, self.clock, self.fixed + self.by_row * len(x))


class _Tick(torch.autograd.Function):
    """An identity function that advances the clock in forward, and by twice the time in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: VirtualClock, seconds: float) -> torch.Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.clock.sleep(2 * ctx.seconds)
        return gradient, None, None


def test_times_are_not_proportional_to_rows(monkeypatch):
    """Measured times include the fixed part of each layer, and are interpolated and added for stages."""
    clock = VirtualClock()
    clock.patch(monkeypatch)
    x = torch.randn(8, 4)
    layers = [nn.Linear(4, 4), Slow(clock, 0.010, 0.001), Slow(clock, 0.004, 0.0)]
    found = profile_layers(layers, {rows: x[:rows] for rows in (1, 4, 8)}, repeats=3)
    for rows in (1, 2, 4, 8):
        assert found.seconds(Kind.F, 1, rows) == pytest.approx(0.010 + 0.001 * rows)
        assert found.seconds(Kind.B, 1, rows) == pytest.approx(0.020 + 0.002 * rows)
    costs = found.stage_costs([Span(0, 2), Span(2, 3)])
    assert costs.seconds_at(Kind.B, 0, 8) == pytest.approx(0.036)
    assert costs.seconds_at(Kind.F, 1, 8) == pytest.approx(0.004)


def test_joining_is_measured_and_priced(monkeypatch):
    """The profile measures the seconds per byte of `torch.cat`, and keeps the value in its JSON and in stage costs."""
    clock, join = VirtualClock(), torch.cat

    def cat(tensors):
        clock.sleep(1e-9 * sum(t.nbytes for t in tensors))
        return join(tensors)

    clock.patch(monkeypatch)
    monkeypatch.setattr(torch, "cat", cat)
    x = torch.randn(8, 4)
    profile = profile_layers([nn.Linear(4, 4), nn.Linear(4, 4)], {8: x}, repeats=1)
    assert profile.joining == pytest.approx(1e-9)
    assert ModelProfile.from_dict(json.loads(json.dumps(profile.to_dict()))).joining == profile.joining
    assert profile.stage_costs([Span(0, 1), Span(1, 2)]).joining == profile.joining


class ProductCounter(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_gradient_of_the_input_is_measured_if_something_before_is_trained(
    trained: bool, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that counts products of matrices shows which gradients each backward computes."""
    rows, width = 4, 32
    layer = nn.Linear(width, width).requires_grad_(not frozen)
    with ProductCounter() as counter:
        monkeypatch.setattr(profiler, "read_seconds", lambda: counter.count)
        inputs = {rows: torch.randn(rows, width)}
        (found,) = profile_layers([layer], inputs, split=True, repeats=1, flags={rows: (trained,)}).layers
    assert dict(found.forward) == {rows: 1}
    of_input, of_weights = int(trained), int(not frozen)
    if of_input or of_weights:
        assert dict(found.input_backward) == {rows: of_input}
        assert dict(found.weight_backward) == {rows: of_weights}
        assert dict(found.backward) == {rows: of_input + of_weights}
    else:
        assert not found.backward


def test_bytes_by_hand():
    """The bytes of saved tensors, outputs, weights and optimizer states are compared with values computed by hand."""
    layers = [nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 32), nn.GELU(), nn.LayerNorm(32)]
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()])
    found = profile_layers(layers, {8: torch.randn(8, 64)}, optimizer=optimizer, repeats=1, split=True).layers
    x, wide, thin = 8 * 64 * 4, 8 * 128 * 4, 8 * 32 * 4
    # Linear saves its input, ReLU its output, Dropout its mask, Linear the output of Dropout, GELU its input, LayerNorm
    # its input and the mean and deviation of each row.
    assert [dict(layer.saved)[8] for layer in found] == [x, wide, wide, wide, thin, thin + 2 * 8 * 4]
    assert [dict(layer.output)[8] for layer in found] == [wide, wide, wide, thin, thin, thin]
    assert not any(layer.keeps_input for layer in found)
    assert [layer.weight_bytes for layer in found] == [4 * 65 * 128, 0, 0, 4 * 129 * 32, 0, 4 * 64]
    assert [layer.gradient_bytes for layer in found] == [layer.weight_bytes for layer in found]
    # two moments, and a step count for each parameter
    assert found[0].optimizer_bytes == 2 * found[0].weight_bytes + 2 * 4
    assert found[0].step > 0

    shared = [nn.Sigmoid(), nn.Linear(16, 16)]  # the output of the first layer is the input of the second
    one, two = profile_layers(shared, {4: torch.randn(4, 16, requires_grad=True)}, repeats=1).layers
    assert (one.keeps_input, two.keeps_input) == (False, True) or dict(two.saved)[4] == 4 * 16 * 4
    profile = ModelProfile((one, two))
    apart = [profile.activation_bytes([Span(0, 1), Span(1, 2)], s) for s in range(2)]
    assert apart[1] == 16 * 4  # on a separate stage, the second layer keeps its input


def test_nothing_is_changed():
    """Profiling changes neither weights and buffers nor gradients."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)), nn.Linear(4, 4)]
    layers[1].weight.grad = torch.full((4, 4), 7.0)
    before = {n: t.clone() for n, t in nn.ModuleList(layers).state_dict().items()}
    state = torch.get_rng_state()
    profile_layers(layers, {4: torch.randn(4, 4)}, optimizer=torch.optim.SGD(layers[1].parameters(), 1.0), repeats=1)
    torch.set_rng_state(state)
    after = nn.ModuleList(layers).state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert layers[1].weight.grad.tolist() == [[7.0] * 4] * 4
    assert layers[0][0].weight.grad is None


def test_saved_and_loaded(tmp_path):
    found = profile_layers([nn.Linear(4, 4), nn.Tanh()], {r: torch.randn(r, 4) for r in (1, 4)}, repeats=1)
    found.save(tmp_path / "profile.json")
    assert ModelProfile.load(tmp_path / "profile.json") == found
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(PlanError, match="is not a profile"):
        ModelProfile.load(tmp_path / "other.json")


def test_nothing_to_profile():
    with pytest.raises(PlanError, match="0 layers, 1 inputs"):
        profile_layers([], {1: torch.ones(1)})


def test_footprint_counts_storages_until_they_are_gone():
    with measure_footprint(CPU) as found:
        a = torch.ones(100)
        b = a.view(10, 10)[2:]
        assert found.live_bytes == 400
        del a
        assert found.live_bytes == 400
        del b
        assert (found.live_bytes, found.peak_bytes) == (0, 400)
        found.reset_peak()
        c = torch.ones(10) + 1
        assert found.peak_bytes == 80
        del c


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, width = x.shape
        q, k, v = self.mix(self.one(x)).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, width))
        return x + self.feed(self.two(x))


def convolutions() -> list[nn.Module]:
    """Return a convolutional network as a list of layers."""
    torch.manual_seed(0)
    widths = [3, 16, 16, 32, 32, 32, 64, 64]
    made = []
    for a, b in itertools.pairwise(widths):
        made.append(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU()))
    return [*made, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))]


def blocks() -> list[nn.Module]:
    """Return a transformer as a list of layers."""
    torch.manual_seed(0)
    return [Block() for _ in range(6)]


MODELS: dict[str, Any] = {"transformer": (blocks, (32, 64)), "convolutions": (convolutions, (3, 16, 16))}
ROWS, MICROBATCHES = 16, 8


def measured_peak(rank: int, model: str, schedule: str, recompute: bool, kept: tuple[int, int]) -> list[int]:
    """Return the peak bytes of the tensors that the second step creates, measured and predicted by the profile."""
    make, shape = MODELS[model]
    layers = make()
    half = len(layers) // 2
    cuts = (Span(0, half), Span(half, len(layers)))
    again = (recompute, False) if recompute else ()
    plan = replace(Plan.even(2, MICROBATCHES, ROWS, layers=cuts, recompute=again), kept_microbatches=(kept, (0, 1)))
    profile = profile_layers(layers, {2: torch.randn(2, *shape)}, repeats=1)
    order = make_schedule(schedule).program(plan)
    fit = evaluate_plan(profile, order, plan, Cluster((Device(), Device())))

    def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        out = stage.run_layers(item, span, item.data[span.start : span.stop] if received is None else received)
        return out.square().mean() * (span.rows / item.rows) if stage.number else out

    watch, transport = connect(rank, plan)
    mine = {n: layers[n] for n in range(*cuts[rank])}
    engine = Engine(plan, order, [Stage(rank, mine, body)], transport, rank=rank)
    x = torch.randn(ROWS, *shape)
    for number in range(2):  # gradients are allocated from the second step on
        with measure_footprint(CPU) as found:
            engine.inject(Item(number, ROWS, x))
            engine.drain()
        peak = found.peak_bytes
    engine.close()
    watch.close()
    return [peak, fit.peak_bytes[rank] - fit.costs.resident_bytes(rank, plan)]


@pytest.mark.parametrize(("recompute", "kept"), [(False, (0, 1)), (True, (0, 1)), (True, (1, 2))])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("model", MODELS)
def test_the_memory_model_predicts_the_measured_peak(model, schedule, recompute, kept):
    for measured, predicted in run_ranks(measured_peak, 2, model, schedule, recompute, kept, timeout=60):
        assert predicted == pytest.approx(measured, rel=0.1)


def test_memory_is_between_that_of_no_and_all_recomputation():
    settings = [(False, (0, 1)), (True, (3, 4)), (True, (1, 2)), (True, (1, 4)), (True, (0, 1))]
    peaks = [run_ranks(measured_peak, 2, "transformer", "gpipe", *each, timeout=60)[0] for each in settings]
    for at in (0, 1):  # measured and predicted
        found = [peak[at] for peak in peaks]
        assert found == sorted(found, reverse=True)
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("split", [False, True])
def test_layers_that_work_in_place(split: bool) -> None:
    """Layers that change their input in place have the profile of other layers, and the sample is not changed."""

    def layers(in_place: bool) -> list[nn.Module]:
        return [
            nn.ReLU(in_place),
            nn.Conv2d(3, 4, 3),
            nn.ReLU(in_place),
            nn.Sequential(nn.ReLU(in_place), nn.Flatten()),
        ]

    x = torch.randn(2, 3, 8, 8)
    before = x.clone()
    found = profile_layers(layers(True), {2: x}, split=split)
    plain = profile_layers(layers(False), {2: x}, split=split)
    assert torch.equal(x, before)
    assert [layer.output for layer in found.layers] == [layer.output for layer in plain.layers]
    assert all(layer.forward[0][1] > 0 for layer in found.layers)
    assert [bool(layer.backward[-1][1]) if layer.backward else False for layer in found.layers] == [
        bool(layer.backward[-1][1]) if layer.backward else False for layer in plain.layers
    ]
