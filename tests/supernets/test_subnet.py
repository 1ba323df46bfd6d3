"""Tests for subnets and search spaces."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch.utils import _pytree as pytree

from lightning_pipes.engine.watch import plain
from lightning_pipes.ir import InputError, Span
from lightning_pipes.supernets import SearchSpace, Subnet
from lightning_pipes.trainer.data.batches import rows_of, take_samples

ONE = Subnet((0, 2, 1), id=5, space=1)


def test_it_travels_as_one_thing() -> None:
    """Check that a subnet is never split, even if it has as many choices as the batch has samples.

    A tuple of this length would be split.
    """
    batch = [[torch.randn(3, 2), torch.zeros(3)], ONE]
    assert rows_of(batch) == 3
    assert take_samples(batch, Span(0, 2), 3)[1] == ONE
    assert move_data_to_device(batch, torch.device("cpu"))[1] is ONE
    assert pytree.tree_leaves((0, ONE)) == [0, ONE]
    assert pickle.loads(pickle.dumps(ONE)) == plain.loads(plain.dumps(ONE)) == ONE


def test_it_is_a_value() -> None:
    """Check that subnets are compared by value, and cannot be changed."""
    assert len({ONE, Subnet([0, 2, 1], 5, 1), Subnet((0, 2, 1), 6, 1)}) == 2
    assert ((*ONE,), len(ONE), ONE[1]) == ((0, 2, 1), 3, 2)
    with pytest.raises(AttributeError, match="a Subnet does not change"):
        ONE.id = 3


def test_a_part_of_a_space() -> None:
    """Check a search space that is restricted to some candidates."""
    space = SearchSpace.from_sizes([3, 2, 4]).restrict_to({0: [2, 0], 2: (1,)})
    assert (space.blocks, space.size, len(space)) == (((2, 0), (0, 1), (1,)), 4, 3)
    assert space.check([2, 1, 1]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SearchSpace(((0, 1), ())), "block 1 of a space offers candidates"),
        (lambda: SearchSpace(((0, 0),)), "each once"),
        (lambda: SearchSpace(((-1,),)), "counted from 0"),
        (lambda: SearchSpace.from_sizes([2]).restrict_to({1: [0]}), "a space of 1 blocks has no block 1"),
        (lambda: SearchSpace.from_sizes([2]).restrict_to({0: [2]}), "chooses candidate 2 of block 0, which has"),
        (lambda: SearchSpace.from_sizes([2]).check([0, 0]), "a subnet of 2 choices"),
        (lambda: SearchSpace.from_sizes([2]).check(["a"]), "a subnet's choices.0. must be a whole number, got 'a'"),
    ],
)
def test_refuses_what_makes_no_sense(make: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        make()
