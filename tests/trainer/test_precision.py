"""Tests of mixed precision: all stages use the precision plugin and skip the same steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_pipes.testing.ranks import run_ranks
from tests.cases import selected_values
from tests.trainer.lit import Case, Lit, differences, train, train_cases


class LitFloat(Lit):
    """A module with single-precision inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.float())


class Burst(nn.Module):
    """A layer whose gradient is infinite in the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(6))
        self.batches = 0
        self.offset.register_hook(self.burst)

    def burst(self, gradient: torch.Tensor) -> torch.Tensor:
        self.batches += 1
        return gradient * torch.inf if self.batches == 1 else gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


class LitBurst(LitFloat):
    """A module whose gradients overflow on the first stage only."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.model[1] = Burst()


class Scales(Callback):
    """A callback that logs the scale of the gradient scaler after every batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        scale = trainer.precision_plugin.scaler.get_scale()
        module.log("scale", scale, on_step=True, on_epoch=False)


def half(initial: float, clip: float | None, strategy: dict[str, Any] | None, module: type[Lit] = LitFloat) -> Case:
    """Return a run in half precision with the given initial scale and gradient clipping."""
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=2)
    options = {
        "precision": None,
        "plugins": [MixedPrecision("16-mixed", "cpu", scaler)],
        "callbacks": [Scales()],
        "gradient_clip_val": clip,
        "max_epochs": 2,
    }
    return Case(module, {"optimizer": "sgd"}, strategy, options)


def bfloat(strategy: dict[str, Any] | None) -> Case:
    return Case(LitFloat, {"optimizer": "sgd"}, strategy, {"precision": "bf16-mixed"})


ONE = {"schedule": "1f1b", "microbatches": 1}
FOUR = {"schedule": "1f1b", "microbatches": 4}
# With one micro-batch, rounding equals the rounding of one process. Several micro-batches round different sums.
SETTINGS = [
    ("half", (2.0**10, 0.05), ONE, 1e-6),
    ("half with overflow", (2.0**40, None), ONE, 1e-6),
    ("half with overflow on one stage", (2.0**10, None, LitBurst), ONE, 1e-6),
    ("half, four micro-batches", (2.0**10, 0.05), FOUR, 5e-3),
    ("bfloat16", None, ONE, 1e-6),
    ("bfloat16, four micro-batches", None, FOUR, 2e-2),
]


def case(arguments: Any, strategy: dict[str, Any] | None) -> Case:
    """Return the run of a setting."""
    if arguments is None:
        return bfloat(strategy)
    initial, clip, *module = arguments
    return half(initial, clip, strategy, *module)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> dict[int, Any]:
    """Return the results of three ranks for each selected setting."""
    numbers = selected_values(test_precision, "number")
    cases = [case(arguments, strategy) for _, arguments, strategy, _ in (SETTINGS[number] for number in numbers)]
    folder = str(tmp_path_factory.mktemp("precision"))
    by_case = zip(*run_ranks(train_cases, 3, cases, 3, folder, timeout=60), strict=True)
    return dict(zip(numbers, by_case, strict=True))


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=[name for name, *_ in SETTINGS])
def test_precision(number, ranks, tmp_path):
    """Weights and scales equal the results of one process, and an overflow lowers the scale on all stages."""
    name, arguments, _, tolerance = SETTINGS[number]
    plain = train(case(arguments, None), 1, tmp_path)
    for found in ranks[number]:
        assert differences(found["weights"], plain["weights"], tolerance) == []
    scales = [[row["scale"] for row in run["rows"] if "scale" in row] for run in (ranks[number][0], plain)]
    assert scales[0] == scales[1]
    if "overflow" in name:
        assert scales[1][0] < arguments[0]
