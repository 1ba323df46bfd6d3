"""The conversion of trees of tensors to bytes and back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lightning_pipes.engine.messages.tree_format import ByteLayout, fill_skeleton, pack_tree, parse_description
from lightning_pipes.ir import PipelineError, PlanError
from tests.engine.messages.parcels import content, same


@pytest.mark.parametrize("seed", range(5))
def test_a_layout_names_every_byte(seed: int) -> None:
    """`locate_bytes` finds the tensor and the position of every byte, for random sizes and ranges."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 0, 1, 2, 9]) for _ in range(12)]
    whole = [(part, at) for part, size in enumerate(sizes) for at in range(size)]
    layout = ByteLayout(sizes)
    start = 0
    while start < len(whole):
        stop = min(len(whole), start + rng.randint(1, 7))
        pieces = list(layout.locate_bytes(start, stop))
        assert [(part, at) for part, first, last in pieces for at in range(first, last)] == whole[start:stop]
        start = stop


def test_what_a_parcel_carries() -> None:
    """A tree is equal to the original after packing and unpacking."""
    given = content(1, 2)
    description, tensors = pack_tree(given)
    skeleton, found = parse_description(description)
    assert [(tuple(t.shape), t.dtype) for t in tensors] == found
    assert same(fill_skeleton(skeleton, iter(t.detach() for t in tensors)), given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"a": [1, object()]}, r"\['a'\]\[1\]: a object"),
        ([b"bytes"], r"\[0\]: a bytes"),
        ({"a": torch.ones(2, device="meta")}, r"\['a'\]: a tensor of layout"),
        (torch.eye(2).to_sparse(), "this: a tensor of layout"),
    ],
)
def test_what_a_parcel_does_not_carry(given: Any, why: str) -> None:
    """Objects and tensors that cannot be sent are refused with their position in the tree."""
    with pytest.raises(PlanError, match=why):
        pack_tree(given)


@pytest.mark.parametrize("text", [b"\x80\x04", b'["tensor",[1],"torch.nothing"]', b'["call",1]', b'["tensor",1,2,3]'])
def test_what_is_no_parcel_is_not_run(text: bytes) -> None:
    """Bytes that are not a description of a tree are refused, and no code in them runs."""
    with pytest.raises(PipelineError, match="received data that is no bulk transfer"):
        parse_description(text)
