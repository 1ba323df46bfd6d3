"""Copies of layers on several ranks: which is the newest, and which have to travel.

A layer is at home on the rank of its stage in the plan. A batch with a cut of its own may use it on another one, which
gets the newest copy from the rank that has it: layer mirroring (Zhao et al. 2022, ASPLOS, S4.2), by versions, and only
where somebody uses them.

    batch 0 steps layer 5 on rank 0   STEP0 ->.                       in order of batches, whoever comes first
    batch 1 steps it on rank 1                 `-> F1 .. STEP1 ->.
    batch 2 reads it on rank 0                                    `-> F2
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_pipes.ir.errors import PlanError
from lightning_pipes.ir.instruction import Instruction


class Transfer(NamedTuple):
    """A layer that goes from one rank to another, for a batch that uses it there.

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
    """A layer on one rank, as the next batch that uses it there finds it.

    Attributes:
        rank: where it is.
        stage, batch: who has used it last.
        version: the batch that has left it so; -1 is that of the window's beginning.
        stepper: its STEP.
        readers: STEPs of batches that only read it, since then, here.
        before: STEPs of batches that use the copy in whose place it comes.
        transfer: how it comes here; None where it was made here.
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
        """Those that have one, or had."""
        return self._copies.keys()

    def fetch_copy(self, rank: int, stage: int, batch: int) -> tuple[Copy, Transfer | None]:
        """A rank's copy for a batch that uses it there, which is the newest; and how it gets there, if it has to."""
        old, newest = self._copies.get(rank), self.newest
        if old is not None and old.version == newest.version:
            return old, None
        transfer = Transfer(self.name, batch, newest.rank, rank, newest.stepper)
        before = old.readers | old.before if old is not None else set()
        copy = Copy(rank, stage, batch, newest.version, newest.stepper, set(), before, transfer)
        self._copies[rank] = copy
        return copy, transfer

    def mark_stepped(self, copy: Copy, step: Instruction) -> None:
        """That copy is the newest from `step` on."""
        copy.version, copy.stepper = step.batch, step
        copy.readers, copy.before, copy.transfer = set(), set(), None
        self.newest = copy

    def is_stale(self, rank: int, pending: set[Instruction]) -> bool:
        """Whether nobody needs the copy of a rank any more that is not at home."""
        copy = self._copies.get(rank)
        if rank == self.home or copy is None or copy.version == self.newest.version:
            return False
        return copy.stepper not in pending and not (copy.readers | copy.before) & pending

    def return_transfer(self) -> Transfer | None:
        """How the newest copy gets home, if it is not there."""
        home, newest = self._copies[self.home], self.newest
        if home.version == newest.version:
            return None
        return Transfer(self.name, -1, newest.rank, self.home, newest.stepper)


def check_names(batch: int, name: str, rank: int, others: Iterable[Layer]) -> None:
    """Refuses to use a layer on a rank where a part of it, or what it is a part of, is not.

    Raises:
        PlanError: it is on another rank.
    """
    for other in others:
        elsewhere = sorted({other.home, *other.ranks} - {rank})
        if elsewhere:
            raise PlanError(
                f"batch {batch} uses layer {name!r} on rank {rank}, and {other.name!r}, which has parameters in common "
                f"with it, has been on rank {elsewhere[0]}; batches whose cuts differ have to say what they use of a "
                "layer under the same names, all of them the whole layer or all its parts"
            )
