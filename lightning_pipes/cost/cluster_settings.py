"""Creates clusters from settings."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_pipes.cost.cluster import Cluster
from lightning_pipes.cost.links.link import FREE, Link
from lightning_pipes.cost.units import parse_bytes, parse_rate, parse_seconds, parse_setting
from lightning_pipes.ir import InputError, short_repr

LinkSettings = Mapping[str, str | float]
"""`bandwidth` and `latency`, such as "12.5GB/s" and "10us"."""


def make_cluster(
    hosts: int = 1,
    devices_per_host: int = 1,
    memory: str | float | None = None,
    inside: LinkSettings | None = None,
    between: LinkSettings | None = None,
) -> Cluster:
    """Create a cluster of equal devices on equal hosts; consecutive devices share a host.

    Args:
        memory: bytes of a device, such as "16GiB"; None for no limit.
        inside: the link between two devices of one host; free by default.
        between: the link between two devices of different hosts; free by default.

    Raises:
        InputError: no hosts or devices, or an unknown unit; names the setting.
    """
    size = None if memory is None else parse_setting("memory", parse_bytes, memory)
    return Cluster.from_counts(hosts, devices_per_host, size, _link("inside", inside), _link("between", between))


def _link(name: str, settings: LinkSettings | None) -> Link:
    if settings is None:
        return FREE
    if not isinstance(settings, Mapping):
        raise InputError(f"{name} must be a mapping with bandwidth and latency, got {short_repr(settings)}")
    unknown = sorted(map(str, set(settings) - {"bandwidth", "latency"}))
    if unknown:
        raise InputError(f"{name}.{unknown[0]}: a link has bandwidth and latency")
    bandwidth = parse_setting(f"{name}.bandwidth", parse_rate, settings.get("bandwidth", "inf"))
    return Link(bandwidth, parse_setting(f"{name}.latency", parse_seconds, settings.get("latency", 0.0)))
