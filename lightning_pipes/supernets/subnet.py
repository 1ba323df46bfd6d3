"""Subnets of a supernet, and the space of all subnets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pipes.engine.watch import plain
from lightning_pipes.ir import InputError, check_count, check_fields, check_type, short_repr


class Subnet:
    """A choice of one candidate per block. It travels with a batch and from layer to layer.

    `subnet[3]` is the choice of block 3. A subnet is not a tuple, because code that cuts batches into micro-batches
    would split a tuple that has one entry per sample. It is immutable.

    Args:
        choices: the candidate of each block.
        id: the number of the subnet in its stream, starting at 0. Training follows the order of these numbers.
        space: the number of its space, if there are several.

    Raises:
        InputError: one of the values is not an integer.
    """

    __slots__ = ("choices", "id", "space")

    choices: tuple[int, ...]
    id: int
    space: int

    def __init__(self, choices: Sequence[int], id: int = -1, space: int = 0) -> None:
        if type(choices) is not tuple or any(type(each) is not int for each in (*choices, id, space)):
            choices = tuple(map(int, check_type("a subnet's choices", choices, Sequence[int])))
            id, space = (int(check_type(f"a subnet's {n}", v, int)) for n, v in (("id", id), ("space", space)))
        for name, value in (("choices", choices), ("id", id), ("space", space)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Subnet does not change; make another one, not another {name}")

    def __getitem__(self, block: int) -> int:
        return self.choices[block]

    def __len__(self) -> int:
        return len(self.choices)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Subnet) and self._all == other._all

    def __hash__(self) -> int:
        return hash(self._all)

    def __reduce__(self) -> tuple[Any, ...]:
        return Subnet, self._all

    def __repr__(self) -> str:
        return f"Subnet({self.choices}, id={self.id}, space={self.space})"

    @property
    def _all(self) -> tuple[tuple[int, ...], int, int]:
        return self.choices, self.id, self.space


plain.allow_classes(Subnet)

MAX_CANDIDATES = 2**20
"""The largest number of candidates of a block."""


@dataclass(frozen=True)
class SearchSpace:
    """The space of all subnets. A subnet chooses any candidate of each block.

    Attributes:
        blocks: the numbers of the candidates of each block.

    Raises:
        InputError: a block has no candidates, a candidate occurs twice, or a number is negative.
    """

    blocks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        check_fields(self)
        for number, candidates in enumerate(self.blocks):
            if not candidates or len(set(candidates)) < len(candidates) or min(candidates) < 0:
                raise InputError(
                    f"block {number} of a space offers candidates {short_repr(candidates)}; it needs one or more, each "
                    "once, counted from 0"
                )

    @classmethod
    def from_sizes(cls, sizes: Sequence[int]) -> SearchSpace:
        """Return the space in which block i has `sizes[i]` candidates.

        Raises:
            InputError: a block has no candidates.
        """
        given = check_type("sizes", sizes, Sequence[int])
        return cls(
            tuple(tuple(range(check_count("sizes: a block's candidates", size, most=MAX_CANDIDATES))) for size in given)
        )

    def restrict_to(self, candidates: Mapping[int, Sequence[int]]) -> SearchSpace:
        """Return the subspace in which some blocks have only the given candidates.

        Args:
            candidates: the allowed candidates, by the number of the block. Other blocks keep all candidates.

        Raises:
            InputError: there is no such block, or the block has no such candidate.
        """
        for block, allowed in check_type("candidates of blocks", candidates, Mapping[int, Sequence[int]]).items():
            if not 0 <= block < len(self.blocks):
                raise InputError(f"a space of {len(self.blocks)} blocks has no block {block}; they are counted from 0")
            for choice in allowed:
                self._check(block, choice)
        kept = (tuple(candidates.get(block, offered)) for block, offered in enumerate(self.blocks))
        return SearchSpace(tuple(kept))

    def check(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the choices as a tuple after checking that they contain one valid candidate per block.

        Raises:
            InputError: they do not.
        """
        check_type("a subnet's choices", choices, Sequence[int])
        if len(choices) != len(self.blocks):
            raise InputError(
                f"a subnet of {len(choices)} choices, {short_repr(tuple(choices))}, for {len(self.blocks)} blocks; it "
                "needs one for each"
            )
        for block, choice in enumerate(choices):
            self._check(block, choice)
        return tuple(map(int, choices))

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.blocks)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.blocks)

    @property
    def size(self) -> int:
        """The number of subnets."""
        found = 1
        for candidates in self.blocks:
            found *= len(candidates)
        return found

    def _check(self, block: int, choice: int) -> None:
        if choice not in self.blocks[block]:
            raise InputError(
                f"a subnet chooses candidate {short_repr(choice)} of block {block}, which has "
                f"{short_repr(self.blocks[block])}"
            )
