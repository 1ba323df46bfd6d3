"""Search spaces with the shapes and layer times of the paper (NASPipe, Tables 1 and 5), and subnets drawn from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_pipes.ir import InputError, PlanError, check_count, short_repr
from lightning_pipes.planning.partition import balanced_cuts

# ---- Subnets on stages: the blocks and the times of each stage.


@dataclass(frozen=True, eq=False)
class Placed:
    """Subnets with the stage of each block.

    Attributes:
        subnets: the subnets.
        cuts: the block at which each stage begins, with a row for each subnet. The last column is the number of blocks.
    """

    subnets: Subnets
    cuts: Array

    @property
    def stages(self) -> int:
        """The number of stages, each of which is on a separate rank."""
        return int(self.cuts.shape[1]) - 1

    @cached_property
    def stage_of(self) -> Array:
        """The stage of each block, with a row for each subnet."""
        blocks = np.arange(self.subnets.blocks)
        return np.asarray((blocks[None, :, None] >= self.cuts[:, None, 1:]).sum(axis=2))

    @cached_property
    def forward(self) -> Array:
        """Nanoseconds of each stage's forward of a whole batch, with a row for each subnet."""
        return _sums(self.subnets.forward, self.cuts)

    @cached_property
    def backward(self) -> Array:
        """Nanoseconds of each stage's backward of a whole batch, with a row for each subnet."""
        return _sums(self.subnets.backward, self.cuts)


def balanced(subnets: Subnets, stages: int) -> Placed:
    """Return the subnets with a separate cut for each of them (S3.2).

    A stage consists of consecutive blocks, and the slowest stage is as fast as possible. Of several such cuts, the one
    is taken in which each border, from the last to the first, is as far left as possible. No stage is empty. A layer
    may be on different stages for different subnets, and receives its parameters by layer mirroring (S4.2).

    Raises:
        PlanError: there are fewer blocks than stages.
    """
    _check(subnets, stages)
    return Placed(subnets, balanced_cuts(subnets.forward + subnets.backward, stages))


def fixed(subnets: Subnets, stages: int) -> Placed:
    """Return the subnets with the same cut for all of them, into stages with equally many blocks.

    A layer is then always on the same stage.

    Raises:
        PlanError: there are fewer blocks than stages.
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
    """A kind of layer, with times in milliseconds for a whole batch.

    Attributes:
        name: the name of the kind.
        forward: the time of a forward.
        backward: the time of a backward.
        swap: the time to copy the parameters to or from the host, over PCIe at 15.76 GB/s.
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
"""Kinds of layers from Table 5, for inputs of (192, 1024)."""
CV = (
    Kind("Conv 3x3", 7.9, 13.8, 4.6),
    Kind("Sep 3x3", 2.8, 4.0, 0.68),
    Kind("Sep 5x5", 6.7, 9.9, 2.04),
    Kind("Dil 3x3", 2.5, 3.4, 0.58),
)
"""Kinds of layers from Table 5, for inputs of (64, 112, 112)."""


@dataclass(frozen=True)
class Space:
    """A supernet, in which a subnet takes one of the choices in each block.

    Attributes:
        name: the name of the space.
        blocks: the number of blocks.
        choices: the number of choices in each block.
        kinds: the kinds of the choices, which are repeated in this order.

    Raises:
        InputError: there are no blocks, choices or kinds.
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
        """Return random subnets, for which all choices have the same probability (single path one-shot)."""
        rng = np.random.default_rng(seed)
        return self.subnets(rng.integers(0, self.choices, (subnets, self.blocks)))

    def subnets(self, choices: Array) -> Subnets:
        """Return subnets with given choices. The array has a row for each subnet and a column for each block."""
        columns = [np.array([getattr(kind, what) for kind in self.kinds]) for what in ("forward", "backward", "swap")]
        forward, backward, swap = (
            np.rint(1e6 * column[choices % len(self.kinds)]).astype(np.int64) for column in columns
        )
        return Subnets(np.asarray(choices, np.int64), forward, backward, swap)


@dataclass(frozen=True, eq=False)
class Subnets:
    """A stream of subnets. All arrays have a row for each subnet and a column for each block.

    Attributes:
        choices: the choice of the subnet in the block. A layer is identified by a block and a choice.
        forward: nanoseconds of the layer's forward of a whole batch.
        backward: nanoseconds of the layer's backward of a whole batch.
        swap: nanoseconds to copy the layer's parameters to or from the host.

    Raises:
        InputError: the arrays have different shapes.
    """

    choices: Array
    forward: Array
    backward: Array
    swap: Array

    def __post_init__(self) -> None:
        shapes = {each.shape for each in (self.choices, self.forward, self.backward, self.swap)}
        if len(shapes) != 1 or self.choices.ndim != 2:
            raise InputError(
                f"all arrays need a row for each subnet and a column for each block, got shapes {short_repr(shapes)}"
            )

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return int(self.choices.shape[1])

    @cached_property
    def next_user(self) -> Array:
        """The next subnet that uses the same layer, or -1 if there is none."""
        found = np.full(self.choices.shape, -1, np.int64)
        for block in range(self.blocks):
            order = np.argsort(self.choices[:, block], kind="stable")
            chosen = self.choices[order, block]
            same = np.flatnonzero(chosen[1:] == chosen[:-1])
            found[order[same], block] = order[same + 1]
        return found

    @cached_property
    def last_user(self) -> Array:
        """The last earlier subnet that uses the same layer, whose update has to be awaited, or -1 if there is none."""
        found = np.full(self.choices.shape, -1, np.int64)
        rows, blocks = np.nonzero(self.next_user >= 0)
        found[self.next_user[rows, blocks], blocks] = rows
        return found

    def first(self, count: int) -> Subnets:
        """Return the first `count` subnets."""
        return Subnets(*(each[:count] for each in (self.choices, self.forward, self.backward, self.swap)))


SPACES = {
    name: Space(name, blocks, choices, kinds)
    for kind, blocks, kinds, sizes in (("NLP", 48, NLP, (96, 72, 48, 24)), ("CV", 32, CV, (0, 48, 24, 12)))
    for n, choices in enumerate(sizes)
    if choices
    for name in [f"{kind}.c{n}"]
}
"""The spaces of Table 1, by name."""


def space_of(name: str) -> Space:
    """Return the space with a name such as "NLP.c1".

    Raises:
        InputError: there is no such space.
    """
    if name not in SPACES:
        raise InputError(f"there is no space {short_repr(name)}; there are {', '.join(SPACES)}")
    return SPACES[name]
