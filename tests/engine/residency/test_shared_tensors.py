"""Tests that trainings share the memory of equal tensors, and that no write reaches another training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.engine.private_torch import is_copy_on_write, storage_address
from lightning_pipes.engine.residency.shared_tensors import MIN_SHARED_BYTES, SharedTensors

SIZE = MIN_SHARED_BYTES // 4


def frozen(seed: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)), requires_grad=False)


def test_equal_tensors_exist_once() -> None:
    """Check that only tensors with equal bits share memory: NaN is equal to itself, and 0 differs from -0."""
    shared, one, other, different = SharedTensors(), frozen(0), frozen(0), frozen(1)
    for each in (one, other):
        each[:2] = torch.tensor([torch.nan, 0.0])
    negative = one.clone()
    negative[1] = -0.0
    shared.share(0, {"w": one})
    shared.share(1, {"w": other, "v": different, "n": negative})
    assert storage_address(one) == storage_address(other)
    assert len({storage_address(t) for t in (one, different, negative)}) == 3
    assert shared.nbytes == 3 * MIN_SHARED_BYTES
    assert other[2:].equal(frozen(0)[2:])


@pytest.mark.parametrize(
    "tensor",
    [
        nn.Parameter(torch.ones(SIZE)),
        torch.ones(SIZE - 1),
        torch.ones(SIZE, device="meta"),
        torch.ones(2 * SIZE)[:SIZE],
        torch.ones(64, SIZE).t(),
        torch.ones(SIZE).share_memory_(),
    ],
    ids=["trains", "small", "meta", "part of a storage", "strided", "not allocated by torch"],
)
def test_tensors_that_are_not_shared(tensor: torch.Tensor) -> None:
    shared = SharedTensors()
    shared.share(0, {"w": tensor})
    assert not shared.nbytes
    assert not is_copy_on_write(tensor)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda t: t.mul_(2),
    "through data": lambda t: t.data.mul_(2),
    "through detach": lambda t: t.detach().fill_(7.0),
    "by NumPy": lambda t: t.detach().numpy().fill(7.0),
    "an entry": lambda t: t.__setitem__(3, 9.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_a_write_reaches_nobody_else(write: Callable[[torch.Tensor], Any]) -> None:
    """Check the writer, which keeps its own values, and the other training and a later one, which have the old ones."""
    shared, one, other = SharedTensors(), frozen(0), frozen(0)
    shared.share(0, {"w": one})
    shared.share(1, {"w": other})
    write(other)
    expected = frozen(0)
    write(expected)
    assert other.equal(expected)
    assert one.equal(frozen(0))
    assert shared.renew(1) == ["w"]
    assert shared.renew(0) == shared.renew(1) == []
    later = frozen(0)
    shared.share(2, {"w": later})
    assert storage_address(later) == storage_address(one) != storage_address(other)


def test_memory_that_was_only_read_is_shared_again() -> None:
    shared, one, other = SharedTensors(), frozen(0), frozen(0)
    shared.share(0, {"w": one})
    shared.share(1, {"w": other})
    other.numpy()
    assert storage_address(one) != storage_address(other)
    assert shared.renew(1) == []
    assert storage_address(one) == storage_address(other)


def test_values_without_a_training_are_forgotten() -> None:
    """Check that a value remains until the next training has begun, which may use it, and no longer."""
    shared = SharedTensors()
    first = frozen(0)
    shared.share(0, {"w": first}, {id(first): "file"})
    shared.release(0)
    found = shared.find("file", torch.float32, torch.device("cpu"))
    assert found is not None
    assert storage_address(found) == storage_address(first)
    assert shared.find("file", torch.float64, torch.device("cpu")) is None
    shared.share(1, {"w": frozen(1)})
    assert shared.nbytes == MIN_SHARED_BYTES
    assert shared.find("file", torch.float32, torch.device("cpu")) is None
