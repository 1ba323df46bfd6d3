"""The times of the steps of a training, and the decision whether times that were measured in turn are valid."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import psutil

MAX_BUSY = 25.0
"""The largest percentage of the processor that other programs may use before a measurement."""
MAX_SPREAD = 0.05
"""The largest size of the middle half of ratios, relative to their median."""
MAX_RANGE = 0.1
"""The largest relative difference of two ratios, if there are too few of them for quartiles."""


def measure_load() -> float:
    """Return the percentage of the processor that other programs use, which takes a second."""
    return psutil.cpu_percent(interval=1.0)


def relative_spread(ratios: Sequence[float]) -> float:
    """Return the size of the middle half of the ratios, relative to their median."""
    low, middle, high = statistics.quantiles(ratios)
    return (high - low) / middle


def relative_range(ratios: Sequence[float]) -> float:
    """Return the relative difference between the largest and the smallest ratio."""
    return max(ratios) / min(ratios) - 1


def explain_noise(load: float, differing: float, most: float) -> str:
    """Return the reason why ratios of times that two sides took in turn are not valid, or an empty text.

    Args:
        load: the result of `measure_load` before the measurement.
        differing: the spread or the range of the ratios.
        most: the largest valid value of it.
    """
    if load <= MAX_BUSY and differing <= most:
        return ""
    return (
        f"not valid: other programs use {load:.0f} % of the processor, and repeated measurements differ by "
        f"{differing:.0%}; repeat it on a quiet machine"
    )


class StepTimer(L.Callback):
    """Records the seconds and the loss of each batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._began = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.losses.append(float(outputs["loss"]))
