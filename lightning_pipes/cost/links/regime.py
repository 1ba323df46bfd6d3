"""Regimes: the worlds in which a prediction can be made, by what ranks and wires do while a message is on its way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum

from lightning_pipes.cost.links.link import Link
from lightning_pipes.cost.lookup import lookup_name


class Regime(StrEnum):
    """How messages and computations get into each other's way. Nothing but that: how long messages take is the link's.

    NCCL's point-to-point is nearest to the last three. Where no message takes time, they are all one.
    """

    ASYNCHRONOUS = "asynchronous"
    """Ranks compute while they send, and each direction of a link has a wire of its own."""
    BLOCKING = "blocking"
    """A rank that sends computes on when the last byte has left it."""
    SHARED = "shared"
    """Ranks compute while they send, and the two directions between two ranks take turns on one wire."""
    BLOCKING_SHARED = "blocking_shared"
    """Both of it: a rank waits for its sends, and these for what comes from there."""

    @property
    def is_blocking(self) -> bool:
        """Whether ranks wait for what they send."""
        return self in (Regime.BLOCKING, Regime.BLOCKING_SHARED)

    @property
    def shares_wire(self) -> bool:
        """Whether two directions share a wire."""
        return self in (Regime.SHARED, Regime.BLOCKING_SHARED)

    @property
    def label(self) -> str:
        """The regime as people call it."""
        return _LABELS[self]

    @property
    def description(self) -> str:
        """One sentence on it, without its full stop."""
        return _DESCRIPTIONS[self]

    def apply_to(self, link: Link, source: int, target: int) -> Link:
        """The link from one rank to another in this regime. What it says of itself stays: a link that blocks does so in
        each of them, and one that names its wire keeps that."""
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
    """The regime of that name.

    Raises:
        InputError: there is none; says which there are.
    """
    return name if isinstance(name, Regime) else lookup_name({each.value: each for each in Regime}, name, "regime")


def regime_of(there: Link, back: Link) -> Regime:
    """The regime of two ranks, by the links in both directions as `Costs.link_between` has them; of the first one,
    where only one of them blocks."""
    shares = bool(there.wire) and there.wire == back.wire
    return {
        (False, False): Regime.ASYNCHRONOUS,
        (True, False): Regime.BLOCKING,
        (False, True): Regime.SHARED,
        (True, True): Regime.BLOCKING_SHARED,
    }[there.blocking, shares]


def describe_regimes(regimes: Iterable[Regime]) -> str:
    """Regimes in words: one, several where links differ, none where no message takes time."""
    return " and ".join(each.label for each in regimes) or FREE_LINKS
