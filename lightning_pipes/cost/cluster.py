"""What a plan runs on: devices and the links between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_pipes.ir import PlanError


@dataclass(frozen=True)
class Link:
    """One direction between two devices: it moves one message at a time, in the order in which they were sent.

    Attributes:
        bandwidth: bytes per second; infinite for a link that costs nothing.
        latency: seconds from the last byte sent to the last byte there. It does not occupy the link.

    Raises:
        PlanError: a bandwidth that is not positive, or a negative latency.
    """

    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not 0 <= self.latency < math.inf:
            raise PlanError(f"a link needs bandwidth > 0 and a finite latency >= 0, got {self}")

    def seconds(self, size: float) -> float:
        """Seconds that a message of `size` bytes occupies the link, latency not counted."""
        return size / self.bandwidth


FREE = Link()
"""A link on which everything arrives at once."""


@dataclass(frozen=True)
class Device:
    """What one rank computes on.

    Attributes:
        memory: bytes that stages may use; None where nobody asked.
        speed: relative to the device that costs were measured on; 2 takes half the time.
        host: devices of one host are joined by the cluster's inner link.

    Raises:
        PlanError: a speed that is not positive.
    """

    memory: int | None = None
    speed: float = 1.0
    host: str = ""

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise PlanError(f"a device needs a speed > 0, got {self.speed}")


@dataclass(frozen=True)
class Cluster:
    """Devices in the order of ranks, and the links between them.

    Attributes:
        inside: the link between two devices of one host, either direction.
        between: the link between two hosts, either direction.
        links: exceptions, by (from rank, to rank); each direction for itself.
    """

    devices: tuple[Device, ...]
    inside: Link = FREE
    between: Link = FREE
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)

    @classmethod
    def homogeneous(
        cls, hosts: int, devices_per_host: int, memory: int | None = None, inside: Link = FREE, between: Link = FREE
    ) -> Cluster:
        """Equal devices, those of one host in a row."""
        names = [str(host) for host in range(hosts) for _ in range(devices_per_host)]
        return cls(tuple(Device(memory, host=name) for name in names), inside, between)

    def link(self, source: int, target: int) -> Link:
        """The link from rank `source` to rank `target`."""
        same = self.devices[source].host == self.devices[target].host
        return self.links.get((source, target), self.inside if same else self.between)
