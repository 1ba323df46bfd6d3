"""Clusters, which consist of devices and the links between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_pipes.cost.links import FREE_LINK, Link, Regime, regime_named
from lightning_pipes.cost.units import parse_bytes, parse_rate, parse_seconds, parse_setting
from lightning_pipes.ir import MAX_STAGES, InputError, check_count, check_fields, short_repr


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    Attributes:
        memory: the number of bytes that stages may use, or None if there is no limit.
        speed: the speed relative to the device on which the costs were measured. A device with speed 2 takes half the
            time.
        host: the name of the host. Devices on the same host are connected by the link `Cluster.inside`.

    Raises:
        InputError: if the speed is not positive and finite, or if the memory is negative.
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
    """The devices of all ranks, in the order of ranks, and the links between them.

    Attributes:
        devices: the device of each rank.
        inside: the link between two devices on the same host, in each direction.
        between: the link between two devices on different hosts, in each direction.
        links: exceptions from `inside` and `between` for single directions, by (source rank, target rank).
        shared: whether all messages that leave a host share one wire, the network card of the host. By default, each
            pair of devices on different hosts has its own link.
        regime: the name of the regime of messages in flight; see `cost.Regime`.

    Raises:
        InputError: if there are no devices, if `links` contains a rank that does not exist, or if the regime is
            unknown.
    """

    devices: tuple[Device, ...]
    inside: Link = FREE_LINK
    between: Link = FREE_LINK
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)
    shared: bool = False
    regime: str = Regime.ASYNCHRONOUS

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "regime", regime_named(self.regime))
        n = len(self.devices)
        if not n:
            raise InputError("a cluster needs at least one device, got none")
        for pair in self.links:
            if not 0 <= min(pair) <= max(pair) < n:
                raise InputError(f"links has the pair {pair}, but the ranks of this cluster are 0 to {n - 1}")

    @classmethod
    def from_counts(
        cls,
        hosts: int,
        devices_per_host: int,
        memory: int | None = None,
        inside: Link = FREE_LINK,
        between: Link = FREE_LINK,
    ) -> Cluster:
        """Create a cluster of equal devices in which consecutive devices share a host.

        Args:
            hosts: the number of hosts.
            devices_per_host: the number of devices on each host.
            memory: the number of bytes of each device, or None if there is no limit.
            inside: the link between two devices on the same host.
            between: the link between two devices on different hosts.

        Raises:
            InputError: if there are no hosts or devices, or more devices than a plan can have stages.
        """
        hosts = check_count("hosts", hosts, most=MAX_STAGES)
        check_count("devices_per_host", devices_per_host, most=MAX_STAGES // hosts)
        names = [str(host) for host in range(hosts) for _ in range(devices_per_host)]
        return cls(tuple(Device(memory, host=name) for name in names), inside, between)

    def link_between(self, source: int, target: int) -> Link:
        """Return the link from rank `source` to rank `target`, in the regime of the cluster."""
        host, other = self.devices[source].host, self.devices[target].host
        link = self.inside if host == other else self.between
        if self.shared and host != other:
            link = replace(link, wire=f"host {host}")
        return Regime(self.regime).apply_to(self.links.get((source, target), link), source, target)


LinkSettings = Mapping[str, str | float]
"""The settings `bandwidth` and `latency` of a link, such as "12.5GB/s" and "10us"."""


def make_cluster(
    hosts: int = 1,
    devices_per_host: int = 1,
    memory: str | float | None = None,
    inside: LinkSettings | None = None,
    between: LinkSettings | None = None,
) -> Cluster:
    """Create a cluster of equal devices on equal hosts from settings. Consecutive devices share a host.

    Args:
        hosts: the number of hosts.
        devices_per_host: the number of devices on each host.
        memory: the size of each device's memory, such as "16GiB" or a number of bytes. None means that there is no
            limit.
        inside: the link between two devices on the same host. By default, its messages take no time.
        between: the link between two devices on different hosts. By default, its messages take no time.

    Raises:
        InputError: if there are no hosts or devices, or if a setting is unknown or can't be read. The message names the
            setting.
    """
    size = None if memory is None else parse_setting("memory", parse_bytes, memory)
    return Cluster.from_counts(hosts, devices_per_host, size, _link("inside", inside), _link("between", between))


def _link(name: str, settings: LinkSettings | None) -> Link:
    if settings is None:
        return FREE_LINK
    if not isinstance(settings, Mapping):
        raise InputError(f"{name} must be a mapping with bandwidth and latency, got {short_repr(settings)}")
    unknown = sorted(map(str, set(settings) - {"bandwidth", "latency"}))
    if unknown:
        raise InputError(f"{name}.{unknown[0]}: a link has bandwidth and latency")
    bandwidth = parse_setting(f"{name}.bandwidth", parse_rate, settings.get("bandwidth", "inf"))
    return Link(bandwidth, parse_setting(f"{name}.latency", parse_seconds, settings.get("latency", 0.0)))
