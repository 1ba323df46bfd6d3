"""Regimes: how ranks and wires behave while a message is in flight, as a prediction assumes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum

from lightning_pipes.cost.links.link import Link
from lightning_pipes.cost.lookup import lookup_name


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
