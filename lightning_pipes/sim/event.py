"""One entry of a timeline."""

from __future__ import annotations

from typing import NamedTuple

from lightning_pipes.ir import Instruction


class Event(NamedTuple):
    """One instruction on one rank, in nanoseconds from the start of the timeline.

    A transfer runs from the moment its link starts to move it until its last byte is there; it is listed under the
    sending rank, with the instruction of the send.
    """

    rank: int
    instruction: Instruction
    start: int
    end: int
