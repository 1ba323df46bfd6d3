"""A link: one direction between two devices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_pipes.ir import InputError, check_fields

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

    def send_seconds(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes occupies the link at its bandwidth, without latency."""
        return size / self.bandwidth

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
