"""Compare the layers of each rank with brute force, under memory limits and on slow devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from lightning_pipes.cost import Cluster, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.ir import Plan, PlanError, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.fit import Fit, evaluate_plan, fit_layers
from lightning_pipes.planning.partition import StageLoad, balanced_partitions
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import simulate
from tests.cases import for_each

MIB = 2**20


def layer(forward: float, kept: int = 0, output: int = 0, weights: int = 0) -> LayerProfile:
    """Return a layer whose backward takes twice its forward; bytes are per row."""
    return LayerProfile(
        "layer",
        ((0, 0.0), (1, forward)),
        ((0, 0.0), (1, 2 * forward)),
        weight_bytes=weights,
        saved=((1, kept),),
        output=((1, output),),
    )


def profile(seed: int, n: int = 8) -> ModelProfile:
    rng = np.random.default_rng(seed)
    return ModelProfile(
        tuple(
            layer(t * 1e-3, 1000, int(b)) for t, b in zip(rng.integers(1, 9, n), rng.integers(0, 5000, n), strict=True)
        )
    )


def every_partition(n: int, stages: int) -> list[tuple[Span, ...]]:
    cuts = ([0, *inner, n] for inner in combinations(range(1, n), stages - 1))
    return [tuple(Span(a, b) for a, b in pairwise(edges)) for edges in cuts]


def exhaustive(model: ModelProfile, schedule: str, plan: Plan, cluster: Cluster, **settings: int) -> Fit:
    order = make_schedule(schedule, **settings).program(plan)
    every = every_partition(len(model.layers), plan.n_stages)
    return min(
        (evaluate_plan(model, order, replace(plan, layers=p), cluster) for p in every), key=lambda fit: fit.seconds
    )


@pytest.mark.parametrize("schedule", ["pipedream", "dynpipe"])
def test_step_of_overlapping_batches_is_the_time_between_them(schedule):
    model, plan = profile(3), even_plan(make_schedule(schedule), 3, 4, 8)
    fit = fit_layers(model, make_schedule(schedule), plan)
    order = make_schedule(schedule).program(plan)
    few, many = (simulate(order, replace(plan, layers=()), fit.costs, batches=n) for n in (20, 60))
    assert fit.seconds == pytest.approx((many.makespan - few.makespan) / 40 / 1e9, rel=1e-6)
    assert fit.bubble == pytest.approx(1 - (sum(many.busy) - sum(few.busy)) / 3 / (many.makespan - few.makespan))
    best = exhaustive(model, schedule, plan, Cluster((Device(),) * 3))
    assert best.seconds <= fit.seconds <= 1.02 * best.seconds
    work = [sum(layer.forward[-1][1] * 3 * 8 for layer in model.layers[slice(*span)]) for span in fit.plan.layers]
    assert fit.seconds >= max(work) - 1e-9


@for_each("seed", range(6))
@for_each(("schedule", "settings"), [("1f1b", {}), ("gpipe", {}), ("kfkb", {"k": 2})])
def test_close_to_the_best_of_all_partitions(seed, schedule, settings):
    model = profile(seed)
    plan = Plan.even(3, 6, 12)
    cluster = Cluster((Device(), Device(speed=1.0 / 1.5), Device()), inside=Link(bandwidth=3e6, latency=1e-4))
    fit = fit_layers(model, make_schedule(schedule, **settings), plan, cluster)
    best = exhaustive(model, schedule, plan, cluster, **settings)
    assert best.seconds <= fit.seconds <= 1.02 * best.seconds
    assert fit.cuts == [span.start for span in fit.plan.layers[1:]]


def test_a_slow_device_gets_less():
    """Check four devices of which one is 1.5 times slower than the others.

    The time of the slowest stage is within one layer of the total work divided by the total speed.
    """
    model = ModelProfile((layer(1e-3),) * 44)
    speeds = (1.0, 1 / 1.5, 1.0, 1.0)
    cluster = Cluster(tuple(Device(speed=s) for s in speeds))
    fit = fit_layers(model, make_schedule("1f1b"), Plan.even(4, 16), cluster)
    assert [span.rows for span in fit.plan.layers] == [12, 8, 12, 12]
    even = evaluate_plan(
        model, fit.order, replace(fit.plan, layers=tuple(Span(11 * n, 11 * n + 11) for n in range(4))), cluster
    )
    assert even.seconds > 1.25 * fit.seconds


def test_memory_moves_layers_to_where_there_is_room():
    model = ModelProfile((layer(1e-3, kept=MIB, weights=MIB),) * 8)
    plan = Plan.even(2, 4)
    free = fit_layers(model, make_schedule("1f1b"), plan)
    assert [span.rows for span in free.plan.layers] == [4, 4]
    assert free.peak_bytes == (
        4 * MIB + 4 * 2 * MIB,
        4 * MIB + 4 * MIB,
    )  # weights, and the activations of the micro-batches that the stage holds
    tight = fit_layers(model, make_schedule("1f1b"), plan, Cluster((Device(memory=9 * MIB), Device(memory=20 * MIB))))
    assert [span.rows for span in tight.plan.layers] == [3, 5]
    assert all(peak <= limit for peak, limit in zip(tight.peak_bytes, (9 * MIB, 20 * MIB), strict=True))
    message = r"stage 0 on rank 0 needs 12.0 MiB and has 2.0 MiB \(activations 8.0 MiB, weights and optimizer 4.0 MiB\)"
    with pytest.raises(PlanError, match=message):
        fit_layers(model, make_schedule("1f1b"), plan, Cluster((Device(memory=2 * MIB), Device(memory=9 * MIB))))


def test_recompute_needs_less_memory_and_more_time():
    model = ModelProfile((layer(1e-3, kept=MIB, output=MIB // 4),) * 8)
    plan = Plan.even(4, 8)
    plain = fit_layers(model, make_schedule("gpipe"), plan)
    again = fit_layers(model, make_schedule("gpipe"), replace(plan, recompute=(True, True, True, False)))
    assert again.seconds > plain.seconds
    assert max(again.peak_bytes[:3]) < max(plain.peak_bytes[:3]) / 2


def test_cheap_cuts_are_found_where_messages_are_slow():
    outputs = [9000, 9000, 10, 9000, 9000, 9000]
    model = ModelProfile(tuple(layer(1e-3, output=b) for b in outputs))
    slow = Cluster((Device(),) * 2, inside=Link(bandwidth=1e6))
    assert fit_layers(model, make_schedule("1f1b"), Plan.even(2, 8), slow).cuts == [3]
    model = ModelProfile(tuple(layer(1e-3, output=b) for b in [9000, 10, 9000, 9000, 9000, 9000]))
    assert fit_layers(model, make_schedule("1f1b"), Plan.even(2, 8), slow).cuts == [2]
    assert fit_layers(model, make_schedule("1f1b"), Plan.even(2, 8)).cuts == [3]


def test_light_partitions_by_brute_force():
    rng = np.random.default_rng(1)
    for _ in range(20):
        n, stages = 7, 3
        weights = rng.integers(1, 20, size=(stages, n)).astype(float)
        edges = rng.integers(0, 12, size=n + 1).astype(float)
        loads = []
        for row in weights:
            ends = np.concatenate([[0.0], np.cumsum(row)])
            load = ends[None, :] - ends[:, None]
            load[np.tril_indices(n + 1)] = np.inf
            loads.append(load)

        def heaviest(partition: tuple[Span, ...], loads=loads, edges=edges, n=n) -> float:
            return max(
                max(
                    loads[s][span.start, span.stop],
                    edges[span.start] if span.start else 0,
                    edges[span.stop] if span.stop < n else 0,
                )
                for s, span in enumerate(partition)
            )

        best = min(map(heaviest, every_partition(n, stages)))
        found = balanced_partitions([StageLoad(lambda i, j, load=load: load[i, j]) for load in loads], edges)
        assert heaviest(found[0]) == best
        assert all(heaviest(p) <= 1.4 * best for p in found)
        assert len(set(found)) == len(found)


def test_too_few_layers():
    with pytest.raises(PlanError, match="2 layers can't fill 3 stages"):
        fit_layers(profile(0, 2), make_schedule("1f1b"), Plan.even(3, 4))
