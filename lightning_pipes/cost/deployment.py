"""Deployments of equal pipelines as replicas: their devices, and the cost of averaging their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost.cluster import Cluster
from lightning_pipes.cost.links import Link, Regime
from lightning_pipes.ir import InputError, check_count, check_fields, check_type, short_repr

Array = npt.NDArray[np.float64]
BUCKET_BYTES = 25 * 2**20
"""The size in bytes of the buckets in which the engine sends gradients, as in torch's DistributedDataParallel.

The size is large enough to use the bandwidth, and small enough that the first bucket is sent early.
"""


@dataclass(frozen=True)
class Deployment:
    """Replicas of a pipeline on a cluster.

    Attributes:
        pipeline: the devices of one pipeline in the order of its ranks. If the replicas differ, each rank has the worst
            values of all replicas.
        replicas: the number of pipelines that train the same weights, each with its own samples.
        rings: for each rank, the slowest link in the ring that connects it to the same rank of the other replicas.

    Raises:
        InputError: if there are no replicas, or if there are several and `rings` does not have one entry per rank.
    """

    pipeline: Cluster
    replicas: int = 1
    rings: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        check_count("replicas", self.replicas)
        if self.replicas > 1 and len(self.rings) != len(self.pipeline.devices):
            raise InputError(
                f"{short_repr(self.replicas)} replicas need a ring for each of {len(self.pipeline.devices)} ranks"
            )

    @classmethod
    def from_cluster(cls, cluster: Cluster, ranks: int, replicas: int = 1, neighbours: str = "ranks") -> Deployment:
        """Create `replicas` pipelines of `ranks` devices each on the first devices of a cluster.

        Args:
            cluster: the cluster.
            ranks: the number of ranks in each pipeline.
            replicas: the number of pipelines.
            neighbours: the placement of consecutive devices. With "ranks", they are ranks of the same pipeline, as the
                engine places them: messages stay inside hosts, and gradients are sent between hosts. With "replicas",
                they are replicas of the same rank, which has the opposite effect.

        Raises:
            InputError: if the cluster has too few devices, or if the value of `neighbours` is unknown.
        """
        check_type("cluster", cluster, Cluster)
        check_count("ranks", ranks)
        check_count("replicas", replicas)
        check_type("neighbours", neighbours, str)
        if ranks * replicas > len(cluster.devices):
            raise InputError(
                f"{short_repr(replicas)} replicas of {short_repr(ranks)} ranks need {short_repr(ranks * replicas)} "
                f"devices, but the cluster has {len(cluster.devices)}; use fewer ranks or replicas"
            )
        if neighbours not in ("ranks", "replicas"):
            raise InputError(f"neighbours are 'ranks' or 'replicas', got {neighbours!r}")
        first, next_ = (ranks, 1) if neighbours == "ranks" else (1, replicas)
        pipelines = [[first * replica + next_ * rank for rank in range(ranks)] for replica in range(replicas)]
        rings = [_slowest_ring_link(cluster, places) for places in zip(*pipelines, strict=True)] if replicas > 1 else []
        return cls(_worst_pipeline(cluster, pipelines), replicas, tuple(rings))

    def with_memory_limit(self, limit: int | None) -> Deployment:
        """Return the deployment with at most `limit` bytes of memory on each device. None removes all limits."""
        devices = (
            replace(each, memory=limit if limit is None or each.memory is None else min(limit, each.memory))
            for each in self.pipeline.devices
        )
        return replace(self, pipeline=replace(self.pipeline, devices=tuple(devices)))

    def all_reduce_seconds(self, rank: int, size: Array) -> Array:
        """Return the duration of a ring all-reduce of the gradients of one rank, in seconds.

        In a ring of n devices, each device sends (n - 1) / n of the bytes twice, in 2(n - 1) messages per bucket.

        Args:
            rank: the rank.
            size: the bytes of the gradients; an array of any shape.
        """
        if self.replicas == 1:
            return np.zeros_like(size)
        link, n = self.rings[rank], self.replicas
        return 2 * (n - 1) * (link.send_seconds(size / n) + count_buckets(size) * link.latency)

    def exposed_seconds(self, rank: int, size: Array, backward: Array) -> Array:
        """Return the part of the all-reduce that the backward does not hide, in seconds.

        All buckets except the last one are sent during the backward.

        Args:
            rank: the rank.
            size: the bytes of the gradients; an array of any shape.
            backward: the seconds of the backward that overlap with the all-reduce, in the same shape.
        """
        whole = self.all_reduce_seconds(rank, size)
        last = whole / np.maximum(count_buckets(size), 1)
        return np.maximum(last, whole - np.maximum(backward, 0.0) * (1 - 1 / np.maximum(count_buckets(size), 1)))


def count_buckets(size: Array) -> Array:
    """Return the number of buckets for `size` bytes of gradients."""
    return np.ceil(np.asarray(size, float) / BUCKET_BYTES)


def as_deployment(cluster: Cluster | Deployment) -> Deployment:
    """Return a cluster as a deployment of one pipeline. A deployment is returned unchanged."""
    return cluster if isinstance(cluster, Deployment) else Deployment(cluster)


def _slowest_ring_link(cluster: Cluster, places: Sequence[int]) -> Link:
    return _slowest_link(cluster.link_between(a, b) for a, b in pairwise([*places, places[0]]))


def _slowest_link(links: Iterable[Link]) -> Link:
    found = list(links)
    return replace(min(found, key=lambda link: link.bandwidth), latency=max(link.latency for link in found))


def _worst_pipeline(cluster: Cluster, pipelines: Sequence[Sequence[int]]) -> Cluster:
    """Return the first pipeline, with the smallest memory, speed and links of all replicas on each rank."""
    devices = []
    for places in zip(*pipelines, strict=True):
        those = [cluster.devices[place] for place in places]
        memory = min((device.memory for device in those if device.memory is not None), default=None)
        devices.append(replace(those[0], memory=memory, speed=min(device.speed for device in those)))
    base = replace(cluster, devices=tuple(devices), links={})
    links = {}
    for a, b in _find_differing_pairs(cluster, np.array(pipelines)):
        link = _slowest_link(cluster.link_between(places[a], places[b]) for places in pipelines)
        if link != base.link_between(a, b):
            links[a, b] = link
    return replace(base, links=links)


def _find_differing_pairs(cluster: Cluster, pipelines: npt.NDArray[np.intp]) -> list[tuple[int, int]]:
    """Return the pairs of ranks for which `_worst_pipeline` has to compare links.

    Their links may differ between pipelines, or from the links of their hosts.
    """
    ranks = pipelines.shape[1]
    asked = np.full((ranks, ranks), cluster.regime != Regime.ASYNCHRONOUS)  # other regimes name the wires by rank
    names = {device.host: number for number, device in enumerate(cluster.devices)}
    hosts = np.array([names[device.host] for device in cluster.devices])[pipelines]
    inside = np.equal(hosts[:, :, None], hosts[:, None, :]).sum(axis=0)
    asked |= (inside > 0) & (inside < len(pipelines))
    special = np.isin(pipelines, [place for pair in cluster.links for place in pair]).any(axis=0)
    asked |= np.logical_or.outer(special, special)
    np.fill_diagonal(asked, False)
    return [(int(a), int(b)) for a, b in np.argwhere(asked)]
