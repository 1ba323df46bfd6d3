"""Durations and memory of layers on a stage with several devices, which hold replicas and shards of the stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import Cluster, ModelProfile
from lightning_pipes.ir import Kind, PlanError

Array = npt.NDArray[np.float64]


class DeviceMesh(NamedTuple):
    """The devices of a stage: `data` replicas of `tensor` shards each."""

    data: int
    tensor: int

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}"


def list_meshes(size: int, replicas_only: bool = False) -> tuple[DeviceMesh, ...]:
    """Return all shapes of a group of `size` devices, such as (1, 8), (2, 4), (4, 2) and (8, 1) (DynPipe, S IV-C)."""
    return tuple(
        DeviceMesh(data, size // data)
        for data in range(1, size + 1)
        if not size % data and (data == size or not replicas_only)
    )


@dataclass(frozen=True)
class Pricing:
    """Seconds and bytes of layers on meshes of equal devices. The devices of one machine are consecutive.

    The work of a stage is divided evenly (E6). Shards combine their outputs after each layer, forward and backward.
    This takes longer with more shards, and not less time as printed in the paper. If there are several replicas, they
    average their gradients. Between two stages, the activations of a batch and their gradients, which have the same
    size, use a number of links equal to the product of the two numbers of devices (E7). If each machine has one network
    card, they use as many links as the stage with fewer devices has devices.

    Args:
        profile: the seconds and bytes of each layer.
        cluster: the devices and links.
        rows: the number of samples in a batch.
        microbatches: the number of micro-batches in a batch. The paper has one.
        shared: whether the devices of one machine share its network card.
        cached: whether devices keep only two weight versions, with the others on the host.
    """

    profile: ModelProfile
    cluster: Cluster
    rows: int
    microbatches: int = 1
    shared: bool = False
    cached: bool = False

    def stage_seconds(self, mesh: DeviceMesh) -> Array:
        """Return the seconds of a batch on a mesh within one machine.

        Row i, column j is for the layers i to j (exclusive).
        """
        rows = self.rows / self.microbatches / mesh.data
        work = self._between(self._work(rows)) * self.microbatches / mesh.tensor
        inside = self.cluster.inside
        if mesh.tensor > 1:
            size = self._between(self._outputs) * self.rows / mesh.data
            each = inside.send_seconds((mesh.tensor - 1) / mesh.tensor * size)
            work = work + 2 * (each + self._count * self.microbatches * inside.latency)
        if mesh.data > 1:
            size = self._between(self.profile.layer_arrays.layer_values("averaged")) / mesh.tensor
            work = work + 2 * (mesh.data - 1) * inside.message_seconds(size / mesh.data)
        return np.where(self._count > 0, work, np.inf)

    def transfer_seconds(self, cut: int, before: DeviceMesh, after: DeviceMesh, across: bool) -> float:
        """Return the seconds of the messages of a batch, in both directions, between two stages.

        Args:
            cut: the layer at which the second stage begins.
            before: the mesh of the first stage.
            after: the mesh of the second stage.
            across: whether the stages are on different machines.
        """
        link = self.cluster.between if across else self.cluster.inside
        one_wire = across and self.shared
        lanes = min(before.size, after.size) if one_wire else before.size * after.size
        size = 2 * self.profile.edge_bytes(cut) * self.rows
        return size / (lanes * link.bandwidth) + 2 * self.microbatches * link.latency

    def bytes(self, mesh: DeviceMesh, under_way: int) -> Array:
        """Return the bytes that each device of a stage needs with `under_way` micro-batches in flight.

        They include the weight versions of these micro-batches. Row i, column j is for the layers i to j (exclusive).
        """
        columns = self.profile.layer_arrays
        versions = 1 - (1 - under_way) // self.microbatches
        versions = min(versions, 2) if self.cached else versions
        fixed = (
            versions * columns.layer_values("weights")
            + columns.layer_values("gradients")
            + columns.layer_values("optimizer")
        )
        saved = columns.layer_values("saved") * self.rows * under_way / self.microbatches / mesh.data
        return self._between(fixed + saved) / mesh.tensor

    @cached_property
    def memory_limit(self) -> int | None:
        """The memory in bytes of the smallest device, or None if no device has a limit."""
        return min((d.memory for d in self.cluster.devices if d.memory is not None), default=None)

    @cached_property
    def machine_of_device(self) -> tuple[int, ...]:
        """The number of the machine of each device.

        Raises:
            PlanError: the devices of one machine are not consecutive.
        """
        hosts = [device.host for device in self.cluster.devices]
        starts = [n for n, host in enumerate(hosts) if not n or hosts[n - 1] != host]
        if len(starts) > len({*hosts}):
            raise PlanError(f"devices of the same machine must be consecutive, got machines {hosts}")
        return tuple(sum(start <= n for start in starts) - 1 for n in range(len(hosts)))

    def _work(self, rows: float) -> Array:
        columns = self.profile.layer_arrays
        low, high = int(np.floor(rows)), int(np.ceil(rows))
        ends = [sum(columns.seconds_at(kind, n) for kind in (Kind.F, Kind.B)) for n in (low, high)]
        share = rows - low
        return np.asarray((1 - share) * ends[0] + share * ends[1])

    def _between(self, values: Array) -> Array:
        """Return the sum of the values i to j (exclusive) in row i, column j.

        Work before the layers counts for the first layer, and work after the layers counts for the last one.
        """
        n = len(self.profile.layers)
        inner = values
        if len(values) == n + 2:
            inner = values[1:-1].copy()
            inner[0] += values[0]
            inner[-1] += values[-1]
        ends = np.concatenate([[0.0], np.cumsum(inner)])
        return np.asarray(ends[None, :] - ends[:, None])

    @cached_property
    def _outputs(self) -> Array:
        return np.array([self.profile.edge_bytes(n + 1) for n in range(len(self.profile.layers))])

    @cached_property
    def _count(self) -> Array:
        n = np.arange(len(self.profile.layers) + 1)
        return np.asarray((n[None, :] - n[:, None]).astype(float))
