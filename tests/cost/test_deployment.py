"""Check replicas of a pipeline: the devices of each rank, and the time to average gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lightning_pipes.cost import FREE_LINK, Cluster, Deployment, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.cost.deployment import BUCKET_BYTES
from lightning_pipes.ir import Plan, PlanError, Span
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.fit import evaluate_plan
from tests.cases import for_each

INSIDE, BETWEEN = Link(100e9, 1e-6), Link(10e9, 1e-5)
EIGHT = Cluster.from_counts(2, 4, 2**30, inside=INSIDE, between=BETWEEN)


def test_consecutive_devices_form_a_pipeline():
    place = Deployment.from_cluster(EIGHT, ranks=4, replicas=2)
    assert [place.pipeline.link_between(a, a + 1) for a in range(3)] == [INSIDE] * 3
    assert place.rings == (BETWEEN,) * 4


def test_consecutive_devices_form_a_ring():
    place = Deployment.from_cluster(EIGHT, ranks=4, replicas=2, neighbours="replicas")
    assert [place.pipeline.link_between(a, a + 1) for a in range(3)] == [INSIDE, BETWEEN, INSIDE]
    assert place.rings == (INSIDE,) * 4


def test_replicas_that_differ_are_as_bad_as_the_worst_at_each_place():
    devices = [replace(device, speed=1 / (n + 1), memory=100 - n) for n, device in enumerate(EIGHT.devices[:6])]
    cluster = replace(EIGHT, devices=tuple(devices))  # four on the first host, two on the second
    place = Deployment.from_cluster(cluster, ranks=3, replicas=2)
    assert [(d.speed, d.memory) for d in place.pipeline.devices] == [(1 / 4, 97), (1 / 5, 96), (1 / 6, 95)]
    # The connection from device 3 to device 4 leaves the host.
    assert (place.pipeline.link_between(0, 1), place.pipeline.link_between(1, 2)) == (BETWEEN, INSIDE)
    assert place.rings == (INSIDE, BETWEEN, BETWEEN)
    odd = replace(cluster, links={(4, 5): Link(1e9, 1e-3)})
    assert Deployment.from_cluster(odd, ranks=3, replicas=2).pipeline.link_between(1, 2) == Link(1e9, 1e-3)


def test_one_pipeline_averages_nothing():
    place = Deployment.from_cluster(EIGHT, ranks=8)
    assert place.pipeline.devices == EIGHT.devices
    assert place.exposed_seconds(3, np.array(1e12), np.array(0.0)) == 0


def test_a_ring_by_hand():
    place = Deployment.from_cluster(EIGHT, ranks=2, replicas=4)
    size = 2.0 * BUCKET_BYTES
    whole = 2 * 3 * (size / 4 / 10e9 + 2 * 1e-5)  # each of four ranks sends 1.5 times the size, in two buckets
    assert float(place.all_reduce_seconds(0, np.array(size))) == pytest.approx(whole)
    assert float(place.exposed_seconds(0, np.array(size), np.array(0.0))) == pytest.approx(whole)
    backward = whole / 10
    assert float(place.exposed_seconds(0, np.array(size), np.array(backward))) == pytest.approx(whole - backward / 2)
    assert float(place.exposed_seconds(0, np.array(size), np.array(1.0))) == pytest.approx(
        whole / 2
    )  # the second bucket
    assert place.exposed_seconds(0, np.array(0.0), np.array(1.0)) == 0


def by_bucket(buckets: int, whole: float, backward: float) -> float:
    """Return the seconds from the end of the backward to the arrival of the last bucket.

    Buckets are sent one after another as the backward completes them.
    """
    free = 0.0
    for n in range(buckets):
        free = max(free, backward * (n + 1) / buckets) + whole / buckets
    return free - backward


@for_each("buckets", [1, 2, 7])
@for_each("backward", [0.0, 0.01, 0.05, 0.3, 2.0])
def test_buckets_leave_while_backward_continues(buckets, backward):
    place = Deployment.from_cluster(EIGHT, ranks=2, replicas=4)
    size = np.array(float(buckets * BUCKET_BYTES))
    whole = float(place.all_reduce_seconds(0, size))
    assert float(place.exposed_seconds(0, size, np.array(backward))) == pytest.approx(
        by_bucket(buckets, whole, backward)
    )


def test_a_step_waits_for_what_the_drain_does_not_hide():
    """Check that a step only waits for the gradients that are not averaged while the pipeline drains.

    There are two stages with one bucket each. The second stage finishes first, and its gradients are sent while the
    first stage computes.
    """
    layer = LayerProfile("layer", ((1, 1e-3),), ((1, 2e-3),), gradient_bytes=BUCKET_BYTES)
    profile = ModelProfile((layer, layer))
    plan = Plan.even(2, 4, layers=[Span(0, 1), Span(1, 2)])
    order = make_schedule("1f1b").program(plan)
    alone = evaluate_plan(profile, order, plan, Cluster((Device(),) * 2)).seconds
    halves = replace(profile, widened=2.0)
    assert alone == pytest.approx(5 * 3e-3)
    for bandwidth in (1e12, 1e10, 1e9):
        ring = 2 * 1 / 2 * BUCKET_BYTES / bandwidth
        place = Deployment(Cluster((Device(),) * 2), 2, (FREE_LINK, Link(bandwidth)))
        assert evaluate_plan(profile, order, plan, place).seconds == pytest.approx(alone + max(0.0, ring - 2e-3))
        place = Deployment(Cluster((Device(),) * 2), 2, (Link(bandwidth), FREE_LINK))
        assert evaluate_plan(profile, order, plan, place).seconds == pytest.approx(alone + ring)
        assert evaluate_plan(halves, order, plan, place).seconds == pytest.approx(
            alone + max(ring, 2 * ring - 1e-3)
        )  # two buckets


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 4, "replicas": 3}, "3 replicas of 4 ranks need 12 devices, but the cluster has 8"),
        ({"ranks": 0}, "ranks must be at least 1, got 0"),
        ({"ranks": 2, "neighbours": "hosts"}, "neighbours are 'ranks' or 'replicas', got 'hosts'"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(PlanError, match=message):
        Deployment.from_cluster(EIGHT, **arguments)
    with pytest.raises(PlanError, match="2 replicas need a ring for each of 8 ranks"):
        Deployment(EIGHT, 2)
