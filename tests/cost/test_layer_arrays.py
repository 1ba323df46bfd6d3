"""Compare the costs of stages from arrays with sums over single layers."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.ir import Kind, Span


def random_layer(rng: np.random.Generator, name: str) -> LayerProfile:
    def table(numbers: int) -> tuple[tuple[int, float], ...]:
        rows = sorted(rng.choice(np.arange(1, 33), size=numbers, replace=False).tolist())
        return tuple((r, 1 + 0.1 * r + float(rng.uniform(0, 0.02))) for r in rows)  # never negative

    sizes = rng.integers(0, 10**12, 3).tolist()
    kinds = {
        name: table(int(rng.integers(1, 4))) for name in ("forward", "backward", "input_backward", "weight_backward")
    }
    return LayerProfile(
        name,
        **kinds,
        step=float(rng.uniform()),
        weight_bytes=sizes[0],
        gradient_bytes=sizes[1] + 1,
        optimizer_bytes=sizes[2],
        saved=((4, float(rng.integers(0, 1000))),),
        keeps_input=bool(rng.integers(2)),
        output=((2, float(rng.integers(1, 1000))),),
        working=((8, float(rng.integers(0, 1000))),),
    )


@pytest.mark.parametrize("seed", range(5))
def test_stages_are_the_sums_of_their_layers(seed):
    rng = np.random.default_rng(seed)
    *layers, before, after = (random_layer(rng, str(n)) for n in range(9))
    profile = ModelProfile(tuple(layers), before, after)
    # the second stage is empty, and the last one has only the loss
    cuts = [Span(0, 2), Span(2, 2), Span(2, 7), Span(7, 7)]
    speeds = (1.0, 2.0, 0.5, 3.0)
    costs = profile.stage_costs(cuts, speeds)
    parts = [(before, *layers[0:2]), (), layers[2:7], (after,)]
    for stage, own in enumerate(parts):
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            for rows in (1, 3, 16, 32):
                wanted = sum(ModelProfile((part,)).seconds(kind, 0, rows) for part in own) / speeds[stage]
                assert costs.seconds_at(kind, stage, rows) == pytest.approx(wanted, rel=1e-12, abs=1e-15)
        assert costs.seconds_at(Kind.STEP, stage) == pytest.approx(sum(part.step for part in own) / speeds[stage])
        assert costs.weight_bytes[stage] == sum(part.weight_bytes for part in own)
        assert costs.state_bytes[stage] == sum(part.gradient_bytes + part.optimizer_bytes for part in own)
        assert costs.working_bytes[stage] == max((part.working[0][1] / 8 for part in own), default=0)
