"""Check clusters that are made from settings, by hand."""

from __future__ import annotations

import math

import pytest

from lightning_pipes.cost import FREE_LINK, Link
from lightning_pipes.cost.cluster import make_cluster
from lightning_pipes.ir import PlanError


def test_a_cluster_with_units():
    cluster = make_cluster(2, 3, "16GiB", {"bandwidth": "300GB/s"}, {"bandwidth": "100Gbit/s", "latency": "10us"})
    assert [(device.host, device.memory) for device in cluster.devices] == [(h, 2**34) for h in "000111"]
    assert cluster.link_between(0, 2) == Link(3e11)
    assert cluster.link_between(2, 3) == cluster.link_between(3, 2) == Link(1.25e10, 1e-5)


def test_everything_is_free_by_default():
    cluster = make_cluster()
    assert (len(cluster.devices), cluster.devices[0].memory, cluster.inside, cluster.between) == (
        1,
        None,
        FREE_LINK,
        FREE_LINK,
    )
    assert make_cluster(inside={"latency": 1e-3}).inside == Link(math.inf, 1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": 0}, "hosts must be at least 1, got 0"),
        ({"memory": "16 gigs"}, "memory: '16 gigs' is not a size; write it as 16GiB"),
        ({"between": {"bandwidth": "10us"}}, "between.bandwidth: '10us' is not a rate"),
        ({"inside": {"latency": "1GB"}}, "inside.latency: '1GB' is not a time"),
        ({"inside": {"speed": 1}}, "inside.speed: a link has bandwidth and latency"),
    ],
)
def test_mistakes_name_the_setting(settings, message):
    with pytest.raises(PlanError, match=message):
        make_cluster(**settings)
