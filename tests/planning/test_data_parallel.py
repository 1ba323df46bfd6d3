"""Gradients summed around a ring."""

from __future__ import annotations

import pytest

from lightning_pipes.cost import Cluster, Link
from lightning_pipes.ir import PlanError
from lightning_pipes.planning.data_parallel import all_reduce_seconds
from lightning_pipes.testing.records import MIB, record_of

RECORD = record_of([1] * 5, 2, 4, cuts=[2])  # 4 MiB of gradients a layer: 8 and 12 MiB a rank
SLOW, FAST = Link(1e9, 1e-5), Link(1e10, 1e-6)


def seconds(cluster: Cluster, replicas: int) -> float:
    return all_reduce_seconds(RECORD.profile, RECORD.plan, replicas, cluster)


def test_the_ring_moves_each_part_all_the_way_round():
    """By hand, step by step: in each of 2 (R - 1) rounds every device passes one R-th on."""
    replicas, size = 4, 12 * MIB
    expected = 0.0
    for _ in range(2 * (replicas - 1)):
        expected += size / replicas / 1e9 + 1e-5
    assert seconds(Cluster.homogeneous(4, 2, inside=FAST, between=SLOW), replicas) == pytest.approx(expected)


def test_replicas_of_one_host_use_its_links():
    inside = seconds(Cluster.homogeneous(1, 8, inside=FAST, between=SLOW), 4)
    assert inside == pytest.approx(6 * (3 * MIB / 1e10 + 1e-6))
    # One host more: the ring is as fast as its slowest link.
    assert seconds(Cluster.homogeneous(2, 4, inside=FAST, between=SLOW), 4) > 5 * inside


def test_one_replica_sums_nothing():
    assert seconds(Cluster.homogeneous(1, 2, between=SLOW), 1) == 0


def test_too_few_devices():
    with pytest.raises(PlanError, match="4 replicas of 2 ranks need 8 devices, the cluster has 6"):
        seconds(Cluster.homogeneous(3, 2), 4)
