"""Tests that values logged for each micro-batch are merged into the values of the whole batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_pipes.ir import Span
from lightning_pipes.trainer.results.logs import (
    GradientLogs,
    LogCall,
    merge,
    merge_over_ranks,
    merge_returned,
    recorded,
)
from lightning_pipes.trainer.user.patches import Patches
from tests.trainer.lit import Lit


def test_merged_calls():
    def calls(mean: float, total: int, most: float, twice: list[float], size: int | None = None) -> list[LogCall]:
        return [
            LogCall("mean", torch.tensor(mean), {"prog_bar": True}),
            LogCall("sum", total, {"reduce_fx": "sum"}),
            LogCall("max", torch.tensor(most), {"reduce_fx": torch.max}),
            *(LogCall("twice", value) for value in twice),
            *([LogCall("sized", mean, {"batch_size": size})] if size else []),
        ]

    merged = merge([calls(1.0, 2, 5.0, [1.0, 10.0], 7), calls(4.0, 3, -1.0, [3.0, 30.0], 14)], [1, 2])
    by_name = [(c.name, float(c.value), c.options["batch_size"]) for c in merged]
    assert by_name == [
        ("mean", 3.0, 3),
        ("sum", 5.0, 3),
        ("max", 5.0, 3),
        ("twice", pytest.approx(7 / 3), 3),
        ("twice", pytest.approx(70 / 3), 3),
        ("sized", pytest.approx(3.0), 21),
    ]
    assert merged[0].options["prog_bar"]


def test_constant_batch_size_is_the_size_of_the_whole_batch() -> None:
    """Check that samples have equal weights, as in one process that logs with this batch size."""
    of_parts = [[LogCall("loss", value, {"batch_size": 1})] for value in (1.0, 2.0, 6.0)]
    (merged,) = merge(of_parts, [3, 3, 2])
    assert merged.value == pytest.approx((3 * 1.0 + 3 * 2.0 + 2 * 6.0) / 8)
    assert merged.options["batch_size"] == 1


def test_returned_lists_with_an_entry_for_each_sample_are_joined() -> None:
    spans = [Span(0, 2), Span(2, 4)]
    extras = [{"names": ["a", "b"], "pair": [1.0, 3.0]}, {"names": ["c", "d"], "pair": [3.0, 5.0]}]
    assert merge_returned(extras, spans, {}) == {"names": ["a", "b", "c", "d"], "pair": [2.0, 4.0]}
    unequal = [{"numbers": [1.0, 2.0], "n": 5.0}, {"numbers": [3.0], "n": 5.0}]
    assert merge_returned(unequal, [Span(0, 2), Span(2, 3)], {}) == {"numbers": [1.0, 2.0, 3.0], "n": 5.0}


def test_recording_leaves_the_module_as_it_was():
    module = Lit()
    with recorded(module) as calls:
        module.log("a", 1.0, True, on_epoch=True)
        module.log_dict({"b": torch.tensor(2.0), "c": 3}, batch_size=4)
    assert [(c.name, float(c.value)) for c in calls] == [("a", 1.0), ("b", 2.0), ("c", 3.0)]
    assert calls[0].options == {"prog_bar": True, "on_epoch": True}
    assert calls[1].options["batch_size"] == 4
    assert "log" not in vars(module)


def with_gradients() -> nn.Sequential:
    g = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)).double()
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype)
    return module


def calls(norms: dict[str, Any], prefix: str = "") -> list[LogCall]:
    return [LogCall(f"{prefix}{name}", value) for name, value in norms.items()]


def test_norms_of_several_ranks_equal_one_module() -> None:
    module = with_gradients()
    for p in (1, 2, "inf"):
        for prefix in ("", "train/"):
            whole = {call.name: float(call.value) for call in calls(grad_norm(module, p), prefix)}
            # Both parts have the middle layer.
            parts = [grad_norm(nn.ModuleDict({n: module[int(n)] for n in held}), p) for held in ("12", "01")]
            found, doubtful = merge_over_ranks([calls(part, prefix) for part in parts], last=0)
            assert doubtful == []
            assert {call.name: float(call.value) for call in found}.keys() == whole.keys()
            assert all(abs(float(call.value) - whole[call.name]) < 1e-12 for call in found)


def test_other_values_are_those_of_the_last_stage_and_doubtful() -> None:
    first = [LogCall("total", torch.tensor(1.0)), LogCall("step", 3), LogCall("of the first", 7.0)]
    last = [LogCall("total", torch.tensor(2.0)), LogCall("step", 3)]
    found, doubtful = merge_over_ranks([last, first], last=0)
    assert {call.name: float(call.value) for call in found} == {"total": 2.0, "step": 3.0, "of the first": 7.0}
    assert doubtful == ["total"]
    found, doubtful = merge_over_ranks([last, first], last=1)
    assert {call.name: float(call.value) for call in found} == {"total": 1.0, "step": 3.0, "of the first": 7.0}


def test_a_total_alone_is_doubtful() -> None:
    norms = [{"grad_2.0_norm_total": 1.0}, {"grad_2.0_norm_total": 2.0}]
    _, doubtful = merge_over_ranks([calls(part) for part in norms], last=0)
    assert doubtful == ["grad_2.0_norm_total"]


def test_hooks_are_wrapped_and_come_back() -> None:
    """Check that hooks are wrapped and restored, including a hook that a LambdaCallback stores on itself."""

    class Logging(Lit):
        def on_after_backward(self) -> None:
            self.log("own", 1.0)

    module = Logging()
    callback = LambdaCallback(on_before_optimizer_step=lambda trainer, module, optimizer: module.log("lambda", 2.0))
    mine = callback.on_before_optimizer_step
    logged: list[LogCall] = []
    alone: Any = SimpleNamespace(ranks=(0,), all_gather=lambda calls: [calls])
    replay: Any = SimpleNamespace(pack_calls=list, replay_calls=logged.extend)
    patches = Patches()
    GradientLogs(module, [callback, Callback()], alone, replay, 0, patches)
    module.on_after_backward()
    callback.on_before_optimizer_step(None, module, None)  # type: ignore[arg-type]
    assert [(call.name, call.value) for call in logged] == [("own", 1.0), ("lambda", 2.0)]
    patches.close()
    assert callback.on_before_optimizer_step is mine
    assert "on_after_backward" not in vars(module)
