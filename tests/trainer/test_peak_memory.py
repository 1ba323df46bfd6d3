"""Tests of the peak memory of tensors in each phase of a run, in units of the weights or the output of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.engine.compute.footprint import measure_footprint
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan import decider, layer_profiler
from lightning_pipes.trainer.setup import module_setup, prepare
from tests.trainer.lit import quiet
from tests.trainers import make_trainer

WIDTH, LAYERS = 512, 8
LAYER = 4 * WIDTH * (WIDTH + 1)
HALF = LAYERS // 2


class LitWide(pl.LightningModule):
    """A module of equal linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def phases(rank: int, width: int, rows: int, unit: int) -> dict[str, tuple[float, float]]:
    """Return, by phase, the peak number of live bytes and the number that are left at its end, in units of `unit`
    bytes.

    Args:
        rank: this rank.
        width: width of each layer.
        rows: samples in a batch.
        unit: bytes of one unit.
    """
    quiet()
    found: dict[str, tuple[float, float]] = {}
    with pytest.MonkeyPatch.context() as patch, measure_footprint(torch.device("cpu")) as count:

        def end(phase: str) -> None:
            peak = found.get(phase, (0.0, 0.0))[0]
            found[phase] = max(peak, count.peak_bytes / unit), count.live_bytes / unit
            count.reset_peak()

        def watch(owner: Any, name: str, phase: str) -> None:
            """Make a phase end each time the method `name` of `owner` returns."""
            plain: Callable[..., Any] = getattr(owner, name)

            def watched(*args: Any, **kwargs: Any) -> Any:
                result = plain(*args, **kwargs)
                end(phase)
                return result

            patch.setattr(owner, name, watched)

        watch(prepare, "equalize_weights", "setup")
        watch(layer_profiler.LayerProfiler, "profile", "measuring")
        watch(prepare, "decide", "trial")
        watch(module_setup, "ContainerCut", "cut")
        watch(PipelineStrategy, "training_step", "batch")
        watch(PipelineStrategy, "optimizer_step", "step")
        watch(PipelineStrategy, "teardown", "end")
        patch.setattr(layer_profiler, "MIN_MEASURED_SECONDS", 0.0)
        patch.setattr(layer_profiler, "LAYER_SECONDS", 0.1)
        patch.setattr(decider, "MEASURING_SECONDS", 0.3)
        patch.setattr("lightning_pipes.planning.balance.MIN_CUT_GAIN", 1.0)  # the cut stays even on a busy machine
        trainer = make_trainer(strategy=PipelineStrategy("1f1b", microbatches=2, gather="all"), max_epochs=1)
        trainer.fit(LitWide(width), DataLoader(torch.randn(3 * rows, width), batch_size=rows))
    return found


WHOLE = LAYERS + 0.75
"""All weights, and the values from which their checksums are computed."""
TRAINED = 4 * HALF + 0.75
"""Half of the layers with gradients and the two AdamW states of each weight, the values for checksums, and
activations."""
MOST: dict[str, tuple[float, float]] = {
    "setup": (WHOLE + 0.5, WHOLE),
    "measuring": (WHOLE + 8, WHOLE),  # of one layer: copied weights, gradients, and optimizer states
    "trial": (WHOLE + HALF + 1, WHOLE),  # the gradients of a stage
    "cut": (WHOLE, HALF + 0.75),
    # The gradients of a whole batch and of its parts, and the values that are needed to compare one layer.
    "batch": (TRAINED + 2 * HALF + 11, TRAINED),
    "step": (TRAINED + 2.25, TRAINED),  # AdamW computes on copies of one layer at a time
    "end": (TRAINED + HALF + 0.25, TRAINED + HALF),  # the layers of the other rank are received again
}
"""The largest number of layers that a phase may hold at its peak and at its end."""


SAMPLES, NARROW = 8192, 64
ACTIVATION = 4 * SAMPLES * NARROW
"""Bytes of a layer's output for a batch."""
DATA = 3.5
"""Three batches of data, the values for checksums, and all weights."""
MOST_ACTIVATIONS: dict[str, tuple[float, float]] = {
    "setup": (DATA + 0.25, DATA),
    "measuring": (DATA + 5.5, DATA),  # at most one micro-batch, and the values computed from it in a layer
    "trial": (DATA + 5.75, DATA),
    "cut": (DATA, DATA),
    "batch": (DATA + 12, DATA + 1),  # Lightning keeps the batch; a whole batch goes forward and backward
    "step": (DATA + 1, DATA + 1),
    "end": (DATA + 1, DATA),
}
"""The largest number of activations that a phase may hold at its peak and at its end."""


@pytest.mark.parametrize(
    ("width", "rows", "unit", "most"),
    [(WIDTH, 4, LAYER, MOST), (NARROW, SAMPLES, ACTIVATION, MOST_ACTIVATIONS)],
    ids=["weights", "activations"],
)
def test_no_phase_holds_more_than_it_needs(
    width: int, rows: int, unit: int, most: dict[str, tuple[float, float]]
) -> None:
    """The peak memory of each phase, and the memory at its end, stay below their limits.

    One case has large weights, and one has large activations.
    """
    for found in run_ranks(phases, 2, width, rows, unit, timeout=120):
        assert found.keys() == most.keys()
        for phase, numbers in found.items():
            assert all(n <= m for n, m in zip(numbers, most[phase], strict=True)), (phase, numbers, most[phase])
