"""What replicas of a pipeline add to a step."""

from __future__ import annotations

from lightning_pipes.cost import Cluster, ModelProfile
from lightning_pipes.ir import Plan, PlanError


def all_reduce_seconds(profile: ModelProfile, plan: Plan, replicas: int, cluster: Cluster) -> float:
    """Seconds in which the replicas of the slowest rank sum their gradients, one after the other around a ring.

    R replicas send 2 (R - 1) messages each, of 1/R of the gradients' bytes: 2 (R - 1) (bytes / (R bandwidth) + latency)
    on the slowest link of the ring (Patarasuk and Yuan 2009). Replica k of pipeline rank r sits on device k p + r for p
    ranks a pipeline. It is taken to begin when backward has ended; the engine begins earlier, so this is an upper
    bound.

    Raises:
        PlanError: the cluster has too few devices.
    """
    p, n = plan.n_ranks, plan.n_ranks * replicas
    if n > len(cluster.devices):
        raise PlanError(
            f"{replicas} replicas of {p} ranks need {n} devices, the cluster has {len(cluster.devices)}; "
            "add hosts or devices to it, or use fewer ranks or replicas"
        )
    if replicas == 1:
        return 0.0
    slowest = 0.0
    for rank, stages in enumerate(plan.stages):
        size = sum(
            layer.gradient_bytes for s in stages for layer in profile.layers[plan.layers[s].start : plan.layers[s].stop]
        )
        ring = [cluster.link(k * p + rank, (k + 1) % replicas * p + rank) for k in range(replicas)]
        message = max(link.seconds(size / replicas) + link.latency for link in ring)
        slowest = max(slowest, 2 * (replicas - 1) * message)
    return slowest
