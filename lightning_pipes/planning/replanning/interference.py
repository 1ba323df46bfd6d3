"""The interface between planners and predictors of interference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


class HostedStage(NamedTuple):
    """A stage that a device hosts, or would host, in a few numbers; bytes are for one micro-batch where they depend on
    samples.

    Attributes:
        layers: how many.
        rows: samples of a micro-batch.
        forward: seconds that a forward takes alone on the device.
        backward: the same of a backward.
        weights: bytes.
        states: bytes of gradients and optimizer.
        saved: bytes that are kept from forward to backward.
        sent: bytes of the message to the next stage.
    """

    layers: float
    rows: float
    forward: float
    backward: float
    weights: float
    states: float
    saved: float
    sent: float


class Predicted(NamedTuple):
    """For each row the time as a multiple of that on a device without neighbours, about 1 or more, and whether the
    predictor has seen the like; where it has not, its ratio is not to be used."""

    ratios: npt.NDArray[np.float64]
    known: npt.NDArray[np.bool_]


@runtime_checkable
class Interference(Protocol):
    """Predicts by how much stages are slowed down by neighbours (DynPipe, S V-A). Planners use it as a ratio only: of
    the stage that runs there is a measurement, so a constant bias cancels."""

    def predict(self, rows: Sequence[tuple[Mapping[str, float], HostedStage]]) -> Predicted:
        """All rows in one call: what was seen of a device, and the stage that it would host."""
