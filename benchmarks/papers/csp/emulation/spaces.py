"""Search spaces of the paper's shapes with layers of its times (NASPipe, Tables 1 and 5), and subnets drawn of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_pipes.ir import InputError, PlanError, check_count, short_repr
from lightning_pipes.planning.partition import balanced_cuts

# ---- Subnets on stages: which blocks each stage has, and what that takes.


@dataclass(frozen=True, eq=False)
class Placed:
    """Subnets with the stage of each block.

    Attributes:
        cuts: the block at which each stage begins, a row for each subnet; the last column is the number of blocks.
    """

    subnets: Subnets
    cuts: Array

    @property
    def stages(self) -> int:
        """Stages, each on a rank of its own."""
        return int(self.cuts.shape[1]) - 1

    @cached_property
    def stage_of(self) -> Array:
        """The stage of each block, a row for each subnet."""
        blocks = np.arange(self.subnets.blocks)
        return np.asarray((blocks[None, :, None] >= self.cuts[:, None, 1:]).sum(axis=2))

    @cached_property
    def forward(self) -> Array:
        """Nanoseconds of each stage's forward of a whole batch, a row for each subnet."""
        return _sums(self.subnets.forward, self.cuts)

    @cached_property
    def backward(self) -> Array:
        """The same for backwards."""
        return _sums(self.subnets.backward, self.cuts)


def balanced(subnets: Subnets, stages: int) -> Placed:
    """Each subnet cut for itself (S3.2): consecutive blocks, so that the slowest stage is as fast as can be. Of equal
    ones every cut, from the last to the first, is as far left as can be, and no stage is empty.

    A layer may then be on another stage for another subnet, which gets its parameters by layer mirroring (S4.2).

    Raises:
        PlanError: fewer blocks than stages.
    """
    _check(subnets, stages)
    return Placed(subnets, balanced_cuts(subnets.forward + subnets.backward, stages))


def fixed(subnets: Subnets, stages: int) -> Placed:
    """The same blocks on a stage for all subnets, as many on each as can be: no layer is ever on another stage.

    Raises:
        PlanError: fewer blocks than stages.
    """
    _check(subnets, stages)
    cuts = np.array([stage * subnets.blocks // stages for stage in range(stages + 1)], np.int64)
    return Placed(subnets, np.tile(cuts, (len(subnets), 1)))


def _check(subnets: Subnets, stages: int) -> None:
    check_count("stages", stages)
    if stages > subnets.blocks:
        raise PlanError(f"{subnets.blocks} blocks can't fill {stages} stages; use fewer stages")


def _sums(times: Array, cuts: Array) -> Array:
    ends = np.zeros((len(times), times.shape[1] + 1), np.int64)
    np.cumsum(times, axis=1, out=ends[:, 1:])
    return np.diff(np.take_along_axis(ends, cuts, axis=1), axis=1)


Array = np.ndarray


class Kind(NamedTuple):
    """A kind of layer, in milliseconds of a whole batch.

    Attributes:
        forward, backward: to compute.
        swap: to copy its parameters to or from the host's memory, over PCIe at 15.76 GB/s.
    """

    name: str
    forward: float
    backward: float
    swap: float


NLP = (
    Kind("Conv 3x1", 5.0, 10.0, 1.76),
    Kind("SepConv 7x1", 4.2, 5.7, 0.56),
    Kind("LightConv 5x1", 0.68, 1.4, 0.03),
    Kind("8-head attention", 7.9, 13.8, 2.07),
)
"""Table 5, for inputs of (192, 1024)."""
CV = (
    Kind("Conv 3x3", 7.9, 13.8, 4.6),
    Kind("Sep 3x3", 2.8, 4.0, 0.68),
    Kind("Sep 5x5", 6.7, 9.9, 2.04),
    Kind("Dil 3x3", 2.5, 3.4, 0.58),
)
"""Table 5, for inputs of (64, 112, 112)."""


@dataclass(frozen=True)
class Space:
    """A supernet: in each block a subnet takes one of the choices, whose kinds go round in turn.

    Raises:
        InputError: no blocks, choices or kinds.
    """

    name: str
    blocks: int
    choices: int
    kinds: tuple[Kind, ...]

    def __post_init__(self) -> None:
        check_count(f"blocks of space {self.name}", self.blocks)
        check_count(f"choices of space {self.name}", self.choices)
        if not self.kinds:
            raise InputError(f"space {self.name} needs a kind of layer, got none")

    def draw(self, subnets: int, seed: int) -> Subnets:
        """So many subnets, each choice as likely as any (single path one-shot)."""
        rng = np.random.default_rng(seed)
        return self.subnets(rng.integers(0, self.choices, (subnets, self.blocks)))

    def subnets(self, choices: Array) -> Subnets:
        """These subnets: a row for each, with its choice in each block."""
        columns = [np.array([getattr(kind, what) for kind in self.kinds]) for what in ("forward", "backward", "swap")]
        forward, backward, swap = (
            np.rint(1e6 * column[choices % len(self.kinds)]).astype(np.int64) for column in columns
        )
        return Subnets(np.asarray(choices, np.int64), forward, backward, swap)


@dataclass(frozen=True, eq=False)
class Subnets:
    """A stream of subnets; all arrays have a row for each, and a column for each block.

    Attributes:
        choices: the layer that it takes in the block; a layer is a block and a choice.
        forward, backward: nanoseconds that the layer computes on a whole batch.
        swap: nanoseconds in which the layer's parameters are copied to or from the host.

    Raises:
        InputError: arrays of different shapes.
    """

    choices: Array
    forward: Array
    backward: Array
    swap: Array

    def __post_init__(self) -> None:
        shapes = {each.shape for each in (self.choices, self.forward, self.backward, self.swap)}
        if len(shapes) != 1 or self.choices.ndim != 2:
            raise InputError(
                f"subnets need a row each and a column for each block in all arrays, got shapes {short_repr(shapes)}"
            )

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def blocks(self) -> int:
        """Blocks of the space."""
        return int(self.choices.shape[1])

    @cached_property
    def next_user(self) -> Array:
        """The subnet that uses the same layer next; -1 where none does."""
        found = np.full(self.choices.shape, -1, np.int64)
        for block in range(self.blocks):
            order = np.argsort(self.choices[:, block], kind="stable")
            chosen = self.choices[order, block]
            same = np.flatnonzero(chosen[1:] == chosen[:-1])
            found[order[same], block] = order[same + 1]
        return found

    @cached_property
    def last_user(self) -> Array:
        """The subnet that used the same layer last, whose update it waits for; -1 where none did."""
        found = np.full(self.choices.shape, -1, np.int64)
        rows, blocks = np.nonzero(self.next_user >= 0)
        found[self.next_user[rows, blocks], blocks] = rows
        return found

    def first(self, count: int) -> Subnets:
        """The first so many of them."""
        return Subnets(*(each[:count] for each in (self.choices, self.forward, self.backward, self.swap)))


SPACES = {
    name: Space(name, blocks, choices, kinds)
    for kind, blocks, kinds, sizes in (("NLP", 48, NLP, (96, 72, 48, 24)), ("CV", 32, CV, (0, 48, 24, 12)))
    for n, choices in enumerate(sizes)
    if choices
    for name in [f"{kind}.c{n}"]
}
"""Table 1."""


def space_of(name: str) -> Space:
    """The space of this name, such as "NLP.c1".

    Raises:
        InputError: there is none.
    """
    if name not in SPACES:
        raise InputError(f"there is no space {short_repr(name)}; there are {', '.join(SPACES)}")
    return SPACES[name]
