"""Links between ranks: how messages move, and what ranks and wires do meanwhile."""

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

LONGEST = 1e9
"""The longest time in seconds, thirty years. Sums of many such times must fit 64 bits of nanoseconds."""


@dataclass(frozen=True)
class Link:
    """One direction between two devices: it moves one message at a time, in the order in which they were sent.

    A shaped link is a token bucket, as in Linux's tbf and cloud machines with credits. An idle link collects up to
    `burst` bytes of tokens. It sends at `peak` while it has tokens, and at `bandwidth` afterwards. The bucket is full
    at the start.

    Attributes:
        bandwidth: bytes per second of sustained sending; infinite for a link that costs nothing.
        latency: seconds from the last byte sent to the last byte received. It does not occupy the link.
        burst: the size of the bucket in bytes; 0 for a link without a bucket.
        peak: bytes per second while the bucket has tokens.
        max_in_flight: messages in flight at once, where bytes move only after a receive is posted. It is the number of
            receives posted ahead; one is posted again as soon as a message arrives, and the sender learns of it after
            `latency`. 0 means any number. It limits only links with latency.
        wire: links with one wire name share the hardware that moves their messages, such as the network card of a
            host. They take turns in the order in which messages are complete. Without a name a link has its own wire.
        blocking: whether the sender computes only after the last byte has left it.

    Raises:
        InputError: a bandwidth that is not positive, a peak below it, or a negative latency, burst or number.
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
        if self.latency >= LONGEST or self.burst_seconds >= LONGEST:
            raise InputError(f"a link's latency, and burst / bandwidth, are below {LONGEST:g} s; got {self}")

    def send_seconds(self, size: Amount) -> Amount:
        """Return the seconds that a message of `size` bytes occupies the link at its bandwidth, without latency."""
        return size / self.bandwidth

    def least_send_seconds(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes occupies the link at least, where its bucket is full."""
        return max(size / self.peak, (size - self.burst) / self.bandwidth, 0.0)

    def message_seconds(self, size: Amount) -> Amount:
        """Return the seconds from the start of a message of `size` bytes to its arrival, at the link's bandwidth."""
        return self.send_seconds(size) + self.latency

    @property
    def burst_seconds(self) -> float:
        """Seconds at `bandwidth` that a full bucket of `burst` bytes is worth."""
        return self.burst / self.bandwidth

    @property
    def peak_ratio(self) -> float:
        """Ratio of a message's time at `peak` to its time at `bandwidth`, from 0 to 1."""
        return 0.0 if self.peak == math.inf else self.bandwidth / self.peak


FREE = Link()
"""A link on which every message takes no time."""


def unused_link_warnings(
    plan: Plan, links: Mapping[tuple[int, int], Link], link: Link, sized: Collection[Kind]
) -> Iterator[str]:
    """Yield a warning about links between ranks that are no neighbours, and one about a bandwidth for messages without
    bytes.

    Args:
        links: exceptions from `link`, by (from rank, to rank).
        sized: the sends, SF or SB, whose bytes or seconds are known.
    """
    joined = {(a, b) for a, b, _ in plan.directed_links}
    unused = sorted(pair for pair in links if pair not in joined)
    if unused:
        there = _short_list(sorted(joined)) or "none, as all stages are on one rank"
        yield (
            f"links has {_short_list(unused)}, over which no message of this plan goes: neighbouring stages are on the "
            f"ranks {there}. Such a link changes nothing; name the ranks of neighbours, or leave it out"
        )
    for a, b, kind in plan.directed_links:
        bandwidth = links.get((a, b), link).bandwidth
        if kind not in sized and bandwidth < math.inf:
            name = "forward_bytes" if kind is Kind.SF else "backward_bytes"
            yield (
                f"the link from rank {a} to rank {b} has a bandwidth of {bandwidth:g} bytes a second and messages have "
                f"no bytes, so they take no time on it; give {name}, or seconds of {kind}, or message_bytes where "
                "CostModel.uniform makes the model"
            )
            return  # one warning is enough for all links


def _short_list(pairs: list[tuple[int, int]]) -> str:
    return ", ".join(map(str, pairs[:6])) + (", ..." if pairs[6:] else "")


class Regime(StrEnum):
    """How messages and computations delay each other. The link alone decides how long a message takes.

    NCCL's point-to-point is nearest to the last three. Where no message takes time, they are all one.
    """

    ASYNCHRONOUS = "asynchronous"
    """Ranks compute while they send, and each direction of a link has a wire of its own."""
    BLOCKING = "blocking"
    """A rank that sends computes on when the last byte has left it."""
    SHARED = "shared"
    """Ranks compute while they send, and the two directions between two ranks take turns on one wire."""
    BLOCKING_SHARED = "blocking_shared"
    """Both: a rank waits for its sends, and sends wait for messages in the other direction."""

    @property
    def is_blocking(self) -> bool:
        """Whether a rank waits for its sends."""
        return self in (Regime.BLOCKING, Regime.BLOCKING_SHARED)

    @property
    def shares_wire(self) -> bool:
        """Whether both directions share a wire."""
        return self in (Regime.SHARED, Regime.BLOCKING_SHARED)

    @property
    def label(self) -> str:
        """The name of the regime in plain words."""
        return _LABELS[self]

    @property
    def description(self) -> str:
        """One sentence about the regime, without its full stop."""
        return _DESCRIPTIONS[self]

    def apply_to(self, link: Link, source: int, target: int) -> Link:
        """Return the link from one rank to another in this regime. Settings of the link stay: one that blocks still
        blocks, and one with a named wire keeps it."""
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
    Regime.ASYNCHRONOUS: "ranks compute while they send, and each direction has a wire of its own",
    Regime.BLOCKING: "a rank computes on when the last byte that it sends has left it",
    Regime.SHARED: "ranks compute while they send, and the two directions between two ranks take turns on one wire",
    Regime.BLOCKING_SHARED: "a rank computes on when the last byte that it sends has left it, and the two directions "
    "between two ranks take turns on one wire",
}
FREE_LINKS = "links that take no time"


def regime_named(name: str) -> Regime:
    """Return the regime of that name.

    Raises:
        InputError: there is none; lists all names.
    """
    return name if isinstance(name, Regime) else lookup_name({each.value: each for each in Regime}, name, "regime")


def regime_of(there: Link, back: Link) -> Regime:
    """Return the regime of two ranks, given the links of both directions as `Costs.link_between` returns them. Where
    only one of them blocks, the first one decides."""
    shares = bool(there.wire) and there.wire == back.wire
    return {
        (False, False): Regime.ASYNCHRONOUS,
        (True, False): Regime.BLOCKING,
        (False, True): Regime.SHARED,
        (True, True): Regime.BLOCKING_SHARED,
    }[there.blocking, shares]


def describe_regimes(regimes: Iterable[Regime]) -> str:
    """Return the regimes in words: one, several where links differ, none where no message takes time."""
    return " and ".join(each.label for each in regimes) or FREE_LINKS
