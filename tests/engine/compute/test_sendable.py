"""Values that may be sent between two stages, and values that are refused with an error that describes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.engine.compute.sendable import check_sendable
from lightning_pipes.ir import PipelineError


class Marked(torch.Tensor):
    """A subclass of Tensor without changes."""


class Opaque:
    """An object whose `__reduce__` returns a sixth entry, so that it cannot be flattened."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return (Opaque, (self.tensor,), None, None, None, set_nothing)


def set_nothing(thing: Any, state: Any) -> None:
    pass


def with_scale() -> torch.Tensor:
    """Return a tensor with an additional attribute."""
    tensor: Any = torch.ones(2)
    tensor.scale = 3
    return tensor  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (with_scale(), r"of shape \(2,\) with the attribute 'scale', which the next stage would not get"),
        (torch.ones(2).as_subclass(Marked), r"of the subclass \S+\.Marked"),
        (Opaque(torch.ones(2, requires_grad=True)), "an? Opaque that holds a tensor with a gradient"),
        ((n for n in range(2)), "a generator, which can't be pickled"),
    ],
)
def test_refused(leaf, text):
    with pytest.raises(
        PipelineError, match=f"the last layer returns an? .*{text.removeprefix('an? ').removeprefix('a ')}"
    ):
        check_sendable(leaf, "the last layer returns")


@pytest.mark.parametrize(
    "leaf",
    [torch.ones(2), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2)), "text", 3, None, Opaque(torch.ones(2))],
)
def test_accepted(leaf):
    check_sendable(leaf, "the last layer returns")
