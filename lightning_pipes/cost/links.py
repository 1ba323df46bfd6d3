"""Links between ranks: the duration of messages, and what ranks and wires can do at the same time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import InputError, Kind, Plan, check_fields
from lightning_pipes.ir.checks import lookup_name

Amount = TypeVar("Amount", float, npt.NDArray[np.float64])

MAX_SECONDS = 1e9
"""The maximum time in seconds, about thirty years. Sums of many such times must fit into 64 bits of nanoseconds."""


@dataclass(frozen=True)
class Link:
    """One direction of a connection between two devices. It moves one message at a time, in the order of sending.

    A link with a `burst` is a token bucket, like Linux's tbf and cloud machines with network credits. An idle link
    collects up to `burst` bytes of tokens. It sends at `peak` while it has tokens, and at `bandwidth` afterwards. The
    bucket is full at the start.

    Attributes:
        bandwidth: the bytes per second of sustained sending. It is infinite for a link whose messages take no time.
        latency: the seconds from the last byte sent to the last byte received. The link is free during this time.
        burst: the size of the bucket in bytes; 0 for a link without a bucket.
        peak: the bytes per second while the bucket has tokens.
        max_in_flight: the maximum number of messages in flight on transports that move bytes only after a receive was
            posted. It is the number of receives that are posted ahead. A receive is posted again as soon as a message
            arrives, and the sender is notified after `latency`. 0 means that there is no limit. The setting only
            affects links with latency.
        wire: the name of the hardware that moves the messages, such as the network card of a host. Links with the same
            name take turns in the order in which their messages become ready. A link without a name has its own wire.
        blocking: whether the sender can't compute until the last byte of a message has left it.

    Raises:
        InputError: if the bandwidth is not positive, if the peak is lower than the bandwidth, or if the latency, burst
            or number of messages is negative or too large.
    """

    bandwidth: float = math.inf
    latency: float = 0.0
    burst: float = 0.0
    peak: float = math.inf
    max_in_flight: int = 0
    wire: str = ""
    blocking: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.bandwidth > 0 or not 0 <= self.latency < math.inf:
            raise InputError(f"a link needs bandwidth > 0 and a finite latency >= 0, got {self}")
        if not 0 <= self.burst < math.inf or self.peak < self.bandwidth or self.max_in_flight < 0:
            raise InputError(f"a link needs a finite burst >= 0, a peak >= its bandwidth and posted >= 0, got {self}")
        if self.latency >= MAX_SECONDS or self.burst_seconds >= MAX_SECONDS:
            raise InputError(f"a link's latency, and burst / bandwidth, must be below {MAX_SECONDS:g} s; got {self}")

    def send_seconds(self, size: Amount) -> Amount:
        """Return the seconds that a message of `size` bytes occupies the link at its bandwidth, without the latency."""
        return size / self.bandwidth

    def least_send_seconds(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes occupies the link if the bucket is full.

        This is the shortest possible time.
        """
        return max(size / self.peak, (size - self.burst) / self.bandwidth, 0.0)

    def message_seconds(self, size: Amount) -> Amount:
        """Return the seconds from the start of a message of `size` bytes to its arrival, at the link's bandwidth."""
        return self.send_seconds(size) + self.latency

    @property
    def burst_seconds(self) -> float:
        """The seconds that sending `burst` bytes takes at `bandwidth`."""
        return self.burst / self.bandwidth

    @property
    def peak_ratio(self) -> float:
        """The ratio of a message's duration at `peak` to its duration at `bandwidth`, from 0 to 1."""
        return 0.0 if self.peak == math.inf else self.bandwidth / self.peak


FREE_LINK = Link()
"""A link whose messages take no time."""


def unused_link_warnings(
    plan: Plan, links: Mapping[tuple[int, int], Link], link: Link, sized: Collection[Kind]
) -> Iterator[str]:
    """Yield warnings about link settings that have no effect on a plan.

    There is one warning about links between ranks that exchange no messages, and one about a bandwidth for messages
    whose number of bytes is unknown.

    Args:
        plan: the plan.
        links: exceptions from `link`, by (source rank, target rank).
        link: the link between all other ranks.
        sized: the kinds of sends, SF or SB, whose bytes or seconds are known.
    """
    joined = {(a, b) for a, b, _ in plan.directed_links}
    unused = sorted(pair for pair in links if pair not in joined)
    if unused:
        there = _short_list(sorted(joined)) or "none, as all stages are on one rank"
        yield (
            f"links has {_short_list(unused)}, but no message of this plan uses such a link: neighboring stages are "
            f"on the ranks {there}. Name the ranks of neighbors, or remove the link"
        )
    for a, b, kind in plan.directed_links:
        bandwidth = links.get((a, b), link).bandwidth
        if kind not in sized and bandwidth < math.inf:
            name = "forward_bytes" if kind is Kind.SF else "backward_bytes"
            yield (
                f"the link from rank {a} to rank {b} has a bandwidth of {bandwidth:g} bytes a second, but messages "
                f"have no bytes, so they take no time on it; give {name}, or seconds of {kind}, or the message_bytes "
                "of CostModel.uniform"
            )
            return  # one warning is enough for all links


def _short_list(pairs: list[tuple[int, int]]) -> str:
    return ", ".join(map(str, pairs[:6])) + (", ..." if pairs[6:] else "")


class Regime(StrEnum):
    """The way in which messages and computations delay each other.

    The duration of a single message depends only on its link. NCCL's point-to-point communication is closest to the
    last three regimes. If no message takes time, all regimes are equivalent.
    """

    ASYNCHRONOUS = "asynchronous"
    """Ranks compute while they send, and each direction of a link has its own wire."""
    BLOCKING = "blocking"
    """A rank that sends continues to compute only after the last byte has left it."""
    SHARED = "shared"
    """Ranks compute while they send, and the two directions between two ranks take turns on one wire."""
    BLOCKING_SHARED = "blocking_shared"
    """Ranks wait for their sends, and the two directions between two ranks take turns on one wire."""

    @property
    def is_blocking(self) -> bool:
        """Whether a rank waits for its sends."""
        return self in (Regime.BLOCKING, Regime.BLOCKING_SHARED)

    @property
    def shares_wire(self) -> bool:
        """Whether both directions between two ranks share a wire."""
        return self in (Regime.SHARED, Regime.BLOCKING_SHARED)

    @property
    def label(self) -> str:
        """The name of the regime in plain words."""
        return _LABELS[self]

    @property
    def description(self) -> str:
        """A sentence that describes the regime, without the period at its end."""
        return _DESCRIPTIONS[self]

    def apply_to(self, link: Link, source: int, target: int) -> Link:
        """Return the link from one rank to another in this regime.

        The settings of the link itself are kept: a blocking link remains blocking, and a link with a named wire keeps
        its wire.
        """
        if self is Regime.ASYNCHRONOUS:
            return link
        wire = f"between ranks {min(source, target)} and {max(source, target)}" if self.shares_wire else ""
        return replace(link, blocking=link.blocking or self.is_blocking, wire=link.wire or wire)


_LABELS = {
    Regime.ASYNCHRONOUS: "asynchronous links",
    Regime.BLOCKING: "sends that block",
    Regime.SHARED: "a shared wire in both directions",
    Regime.BLOCKING_SHARED: "sends that block on a shared wire",
}
_DESCRIPTIONS = {
    Regime.ASYNCHRONOUS: "ranks compute while they send, and each direction has a separate wire",
    Regime.BLOCKING: "a rank continues to compute when the last byte of its message has left it",
    Regime.SHARED: "ranks compute while they send, and the two directions between two ranks take turns on one wire",
    Regime.BLOCKING_SHARED: "a rank continues to compute when the last byte of its message has left it, and the two "
    "directions between two ranks take turns on one wire",
}
FREE_LINKS_LABEL = "links that take no time"


def regime_named(name: str) -> Regime:
    """Return the regime called `name`.

    Raises:
        InputError: if there is no such regime. The message lists all names.
    """
    return name if isinstance(name, Regime) else lookup_name({each.value: each for each in Regime}, name, "regime")


def regime_of(there: Link, back: Link) -> Regime:
    """Return the regime of two ranks, given the links in both directions.

    If only one of the links is blocking, the first one is decisive.

    Args:
        there: the link in one direction, as returned by `Costs.link_between`.
        back: the link in the other direction.
    """
    shares = bool(there.wire) and there.wire == back.wire
    return {
        (False, False): Regime.ASYNCHRONOUS,
        (True, False): Regime.BLOCKING,
        (False, True): Regime.SHARED,
        (True, True): Regime.BLOCKING_SHARED,
    }[there.blocking, shares]


def describe_regimes(regimes: Iterable[Regime]) -> str:
    """Return a description of one or several regimes in words.

    If there are no regimes, because no message takes time, the description says so.
    """
    return " and ".join(each.label for each in regimes) or FREE_LINKS_LABEL
