"""A description of a layer or a unit for reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A layer or a unit with its cost, for reports.

    Attributes:
        layer: the number of the layer, or of the part to which the unit belongs.
        name: the name of the layer or unit.
        seconds: the seconds that a micro-batch takes in it, forward and backward, or None if they are unknown.
        share: its share of the time or the operations of a step. If stages take turns, its share of all weights. None
            if it is unknown.
        bytes: the number of bytes that cross the border in front of it, if a stage can begin here.
    """

    layer: int
    name: str
    seconds: float | None = None
    share: float | None = None
    bytes: int | None = None
