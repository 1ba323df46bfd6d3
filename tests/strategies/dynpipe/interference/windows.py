"""Generated windows of measurements, from which predictors of interference learn in tests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_pipes.planning.replanning import HostedStage
from lightning_pipes.strategies.dynpipe.interference.features import RUN_SHARE_METRIC, WAIT_SHARE_METRIC

BUSY = "host.machine_busy_share"


def hosting(forward: float = 0.002, weights: float = 1e6) -> HostedStage:
    return HostedStage(1, 8, forward, 2 * forward, weights, 2 * weights, 1e5, 1e4)


def device(run: float = 0.5, wait: float = 0.5, busy: float = 0.5) -> dict[str, float]:
    return {RUN_SHARE_METRIC: run, WAIT_SHARE_METRIC: wait, BUSY: busy}


def data(rows: int = 400, seed: int = 0) -> tuple[list[tuple[dict[str, float], HostedStage]], npt.NDArray[np.float64]]:
    """Return data in which a busy machine slows down stages with large weights, in addition to waiting."""
    random = np.random.default_rng(seed)
    pairs, ratios = [], []
    for _ in range(rows):
        run, wait, busy = random.uniform(0.2, 1), random.uniform(0, 1), random.uniform(0, 1)
        stage = hosting(random.uniform(0.001, 0.004), random.choice([1e5, 1e8]))
        pairs.append((device(run, wait, busy), stage))
        ratios.append((run + wait) / run * (1 + busy * (stage.weights > 1e7)))
    return pairs, np.array(ratios)
