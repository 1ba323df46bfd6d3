"""Copies of layers on several ranks: the newest one, and the transfers that they need.

The home of a layer is the rank of its stage in the plan. A batch with a cut of its own may use it on another rank,
which gets the newest copy from the rank that has it: layer mirroring (Zhao et al. 2022, ASPLOS, S4.2), by versions, and
only where a batch uses them.

    batch 0 steps layer 5 on rank 0   STEP0 ->.                       in order of batches, on any rank
    batch 1 steps it on rank 1                 `-> F1 .. STEP1 ->.
    batch 2 reads it on rank 0                                    `-> F2
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_pipes.ir.checks import PlanError
from lightning_pipes.ir.instruction import Instruction


class Transfer(NamedTuple):
    """The transfer of a layer from one rank to another, for a batch that uses it there.

    Attributes:
        name: the layer's.
        batch: the first that uses it there; -1 stands for the end of the window.
        source, target: the ranks.
        after: the STEP whose result it is, on `source`; None where nothing has stepped the layer in this window.
    """

    name: str
    batch: int
    source: int
    target: int
    after: Instruction | None
    job: int = 0


@dataclass
class Copy:
    """The copy of a layer on one rank, as the next batch that uses it there finds it.

    Attributes:
        rank: the rank that has it.
        stage, batch: its last use.
        version: the batch that stepped it last; -1 at the beginning of the window.
        stepper: the STEP of that batch.
        readers: STEPs of later batches that only read it, on this rank.
        before: STEPs of batches that use the copy that it replaces.
        transfer: the transfer that brings it; None where it was stepped on this rank.
    """

    rank: int
    stage: int
    batch: int
    version: int = -1
    stepper: Instruction | None = None
    readers: set[Instruction] = field(default_factory=set)
    before: set[Instruction] = field(default_factory=set)
    transfer: Transfer | None = None


class Layer:
    """All copies of one layer."""

    def __init__(self, name: str, home: Copy) -> None:
        self.name = name
        self.home = home.rank
        self.newest = home
        self._copies = {home.rank: home}

    @property
    def ranks(self) -> Iterable[int]:
        """The ranks that have, or had, a copy."""
        return self._copies.keys()

    def fetch_copy(self, rank: int, stage: int, batch: int) -> tuple[Copy, Transfer | None]:
        """Return the newest copy, on a rank where a batch uses it, and the transfer that brings it, if one is
        needed."""
        old, newest = self._copies.get(rank), self.newest
        if old is not None and old.version == newest.version:
            return old, None
        transfer = Transfer(self.name, batch, newest.rank, rank, newest.stepper)
        before = old.readers | old.before if old is not None else set()
        copy = Copy(rank, stage, batch, newest.version, newest.stepper, set(), before, transfer)
        self._copies[rank] = copy
        return copy, transfer

    def mark_stepped(self, copy: Copy, step: Instruction) -> None:
        """Mark the copy as the newest one, as of `step`."""
        copy.version, copy.stepper = step.batch, step
        copy.readers, copy.before, copy.transfer = set(), set(), None
        self.newest = copy

    def is_stale(self, rank: int, pending: set[Instruction]) -> bool:
        """Return whether a rank away from home no longer needs its copy."""
        copy = self._copies.get(rank)
        if rank == self.home or copy is None or copy.version == self.newest.version:
            return False
        return copy.stepper not in pending and not (copy.readers | copy.before) & pending

    def return_transfer(self) -> Transfer | None:
        """Return the transfer of the newest copy to its home; None if it is there."""
        home, newest = self._copies[self.home], self.newest
        if home.version == newest.version:
            return None
        return Transfer(self.name, -1, newest.rank, self.home, newest.stepper)


def check_names(batch: int, name: str, rank: int, others: Iterable[Layer]) -> None:
    """Refuse a layer on a rank if another rank has one of its parts, or the layer that contains it.

    Raises:
        PlanError: such a layer is on another rank.
    """
    for other in others:
        elsewhere = sorted({other.home, *other.ranks} - {rank})
        if elsewhere:
            raise PlanError(
                f"batch {batch} uses layer {name!r} on rank {rank}, and {other.name!r}, which has parameters in common "
                f"with it, has been on rank {elsewhere[0]}; batches whose cuts differ have to say what they use of a "
                "layer under the same names, all of them the whole layer or all its parts"
            )
