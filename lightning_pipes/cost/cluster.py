"""Clusters: devices and the links between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_pipes.ir import MOST_STAGES, InputError, check_count, check_fields

LONGEST = 1e9
"""Seconds, thirty years: nanoseconds are counted in 64 bits, and many such times have to fit."""


@dataclass(frozen=True)
class Link:
    """One direction between two devices: it moves one message at a time, in the order in which they were sent.

    A shaped link is a token bucket, as of Linux's tbf and of cloud machines with credits: while it idles it saves up to
    `burst` bytes, and moves bytes at `peak` as long as it has savings, at `bandwidth` then. It begins with all of them.

    Attributes:
        bandwidth: bytes per second that it earns; infinite for a link that costs nothing.
        latency: seconds from the last byte sent to the last byte there. It does not occupy the link.
        burst: bytes that it saves at most; 0 for a link without a bucket.
        peak: bytes per second at full speed, with savings.
        posted: messages that may be under way at once, where bytes move only once a receive is posted: the receives
            that are posted ahead, and again as soon as a message arrives, of which the sender knows after `latency`.
            0 means any number. It binds only where there is latency.
        wire: links of one name share what moves their messages, such as the network card of a host, and take turns in
            the order in which messages are complete; without a name a link has a wire of its own.

    Raises:
        InputError: a bandwidth that is not positive, a peak below it, or a negative latency, burst or number.
    """

    bandwidth: float = math.inf
    latency: float = 0.0
    burst: float = 0.0
    peak: float = math.inf
    posted: int = 0
    wire: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.bandwidth > 0 or not 0 <= self.latency < math.inf:
            raise InputError(f"a link needs bandwidth > 0 and a finite latency >= 0, got {self}")
        if not 0 <= self.burst < math.inf or self.peak < self.bandwidth or self.posted < 0:
            raise InputError(f"a link needs a finite burst >= 0, a peak >= its bandwidth and posted >= 0, got {self}")
        if self.latency >= LONGEST or self.savings >= LONGEST:
            raise InputError(f"a link's latency, and burst / bandwidth, are below {LONGEST:g} s; got {self}")

    def seconds(self, size: float) -> float:
        """Seconds that a message of `size` bytes occupies the link at its bandwidth, latency not counted."""
        return size / self.bandwidth

    @property
    def savings(self) -> float:
        """Seconds of its bandwidth that the link can save."""
        return self.burst / self.bandwidth

    @property
    def hurry(self) -> float:
        """The time of a message at full speed, as a share of what it takes at the bandwidth: 0 to 1."""
        return 0.0 if self.peak == math.inf else self.bandwidth / self.peak


FREE = Link()
"""A link on which everything arrives at once."""


@dataclass(frozen=True)
class Device:
    """The device that one rank computes on.

    Attributes:
        memory: bytes that stages may use; None where nobody asked.
        speed: relative to the device that costs were measured on; 2 takes half the time.
        host: devices of one host are joined by the cluster's inner link.

    Raises:
        InputError: a speed that is not positive and finite, or less than no memory.
    """

    memory: int | None = None
    speed: float = 1.0
    host: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.speed < math.inf:
            raise InputError(f"a device needs a finite speed > 0, got {self.speed}")
        if self.memory is not None and self.memory < 0:
            raise InputError(f"a device needs memory >= 0 bytes, or None for no limit, got memory={self.memory}")


@dataclass(frozen=True)
class Cluster:
    """Devices in the order of ranks, and the links between them.

    Attributes:
        inside: the link between two devices of one host, either direction.
        between: the link between two hosts, either direction.
        links: exceptions, by (from rank, to rank); each direction for itself.
        shared: what goes from one host to others shares a wire, its network card; without it every pair of devices
            has `between` to itself.

    Raises:
        InputError: no devices, more of them than a plan can have stages, or an exception for a rank that has none.
    """

    devices: tuple[Device, ...]
    inside: Link = FREE
    between: Link = FREE
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)
    shared: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        n = len(self.devices)
        if not n:
            raise InputError("a cluster needs at least one device, got none")
        for pair in self.links:
            if not 0 <= min(pair) <= max(pair) < n:
                raise InputError(f"links: {pair} are no two of the ranks 0 to {n - 1}")

    @classmethod
    def homogeneous(
        cls, hosts: int, devices_per_host: int, memory: int | None = None, inside: Link = FREE, between: Link = FREE
    ) -> Cluster:
        """Equal devices, those of one host in a row.

        Raises:
            InputError: no hosts or no devices, or more of them than a plan can have stages.
        """
        hosts = check_count("hosts", hosts, most=MOST_STAGES)
        check_count("devices_per_host", devices_per_host, most=MOST_STAGES // hosts)
        names = [str(host) for host in range(hosts) for _ in range(devices_per_host)]
        return cls(tuple(Device(memory, host=name) for name in names), inside, between)

    def link(self, source: int, target: int) -> Link:
        """The link from rank `source` to rank `target`."""
        host = self.devices[source].host
        if host == self.devices[target].host:
            return self.links.get((source, target), self.inside)
        between = replace(self.between, wire=f"host {host}") if self.shared else self.between
        return self.links.get((source, target), between)
