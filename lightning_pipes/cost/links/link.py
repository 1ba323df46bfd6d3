"""One direction between two devices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_pipes.ir import InputError, check_fields

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
        blocking: whether the rank that sends computes on only when the last byte has left it.

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

    def send_seconds(self, size: float) -> float:
        """Seconds that a message of `size` bytes occupies the link at its bandwidth, latency not counted."""
        return size / self.bandwidth

    @property
    def burst_seconds(self) -> float:
        """Seconds of its bandwidth that the link can save."""
        return self.burst / self.bandwidth

    @property
    def peak_ratio(self) -> float:
        """The time of a message at full speed, as a share of what it takes at the bandwidth: 0 to 1."""
        return 0.0 if self.peak == math.inf else self.bandwidth / self.peak


FREE = Link()
"""A link on which everything arrives at once."""
