"""Tests for streams of subnets in loops and data loaders."""

from __future__ import annotations

import threading

import pytest
from torch.utils.data import DataLoader

from lightning_pipes.ir import InputError
from lightning_pipes.supernets import Explorer, SearchSpace, Subnet, SubnetStream, Uniform

SPACE = SearchSpace.from_sizes([3, 3])
DATA = [[n, 10 * n] for n in range(4)]


def test_it_is_numbered_on_from_epoch_to_epoch() -> None:
    stream, loader = SubnetStream(Uniform(SPACE)), DataLoader(DATA, batch_size=2)
    ids = [subnet.id for _ in range(3) for _, subnet in zip(loader, stream, strict=False)]
    assert ids == [*range(6)]


def test_paired_batches_end_with_their_subnet() -> None:
    stream, loader = SubnetStream(Uniform(SPACE)), DataLoader(DATA, batch_size=None)
    paired = stream.pair_with(loader)
    found = [batch for _ in range(2) for batch, _, _ in paired]
    assert [batch[-1] for batch in found] == [Subnet(Uniform(SPACE).choose_subnet(n), n) for n in range(8)]
    assert [batch[0][0] for batch in found] == [0, 1, 2, 3] * 2
    assert len(iter(paired)) == 4  # type: ignore[arg-type]


def test_it_goes_on_where_it_was() -> None:
    """Check that a restored stream continues with the same subnet."""
    stream, other = SubnetStream(Uniform(SPACE)), SubnetStream(Uniform(SPACE))
    for _ in range(5):
        next(stream)
    other.load_state_dict(stream.state_dict())
    assert next(other) == next(stream)


class Stalls(Explorer):
    """An explorer that never chooses its second subnet."""

    space = SPACE

    def __init__(self) -> None:
        self.never = threading.Event()

    def choose_subnet(self, number: int) -> tuple[int, ...]:
        if number == 1:
            self.never.wait()
        return (0, 0)


def test_stalled_stream_is_reported() -> None:
    """Check the error if an explorer does not choose in time."""
    explorer = Stalls()
    stream = SubnetStream(explorer)
    next(stream)
    stream.timeout = 0.05  # only for the explorer that never chooses
    with pytest.raises(InputError, match=r"Stalls has not chosen subnet 1 within 0\.05 s, and all ranks wait"):
        next(stream)
    explorer.never.set()
    with pytest.raises(InputError, match="timeout must be a positive number"):
        SubnetStream(explorer, timeout=0)
