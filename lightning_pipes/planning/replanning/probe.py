"""Samples of gradients for the theory of stale gradients."""

from __future__ import annotations

from typing import NamedTuple


class GradientSample(NamedTuple):
    """One iteration's part in an estimate; norms are over all parameters.

    Attributes:
        moved: of the difference of the weights to those of the iteration before.
        changed: of the difference of the gradients at both, on one and the same probe batch.
        squared: the squared norm of the gradient of the iteration's own mini-batch.
    """

    moved: float
    changed: float
    squared: float
