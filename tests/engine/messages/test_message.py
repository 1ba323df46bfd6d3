"""Encoding and decoding of messages, with reused wires and receive buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pipes.engine.messages import message
from lightning_pipes.engine.messages.message import Decoder, Encoder, FrozenLeaf, ReceiveBuffer, Wire
from tests.engine.pipes import RECEIVE


def test_wires_are_used_again_and_dropped() -> None:
    """Messages of the same structure reuse a wire, and unused wires of other shapes are dropped."""
    made: list[int] = []
    dropped: list[Wire] = []

    def allocate(size: int) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    encoder, decoder = Encoder(allocate, dropped.append), Decoder()
    # in a steady stream, one wire for the first message, which contains the structure, and one for all other messages
    for turn in range(3):
        for _ in range(5):
            x = torch.randn(2, 3)
            wire, tensors = encoder.encode((turn, RECEIVE), x, (True,), 0)
            wire.copy_tensors(tensors)
            message = decoder.decode(wire.buffer, 0, 0)
            assert torch.equal(message.tree, x)
            assert message.flags == (True,)
            assert message.key == (turn, RECEIVE)
            encoder.release(wire)
    assert len(made) == 2
    for size in range(4, 104):  # shapes that do not occur again
        wire, _ = encoder.encode((9, RECEIVE), torch.randn(2, size), (True,), 0)
        encoder.release(wire)
    assert len(made) - len(dropped) <= 8


def test_copies_from_a_slot_do_not_change_when_it_is_filled_again() -> None:
    """Messages from `decode_copy` do not change when their receive buffer is filled again."""
    encoder, decoder = Encoder(), Decoder()
    first, _ = encoder.encode((0, RECEIVE), torch.zeros(2), (True,), 0)
    decoder.decode(first.buffer, 0, 0)  # contains the structure
    wire, _ = encoder.encode((1, RECEIVE), torch.zeros(2), (True,), 5)
    slot, came = ReceiveBuffer(wire.buffer), []
    for turn in range(1, 4):
        encoder.release(wire)
        again, tensors = encoder.encode((turn, RECEIVE), torch.full((2,), float(turn)), (True,), 5)
        assert again is wire
        wire.copy_tensors(tensors)
        came.append(decoder.decode_copy(slot, 7))
    assert [m.tree.tolist() for m in came] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    assert [(m.key, m.flags, m.sent, m.arrived) for m in came] == [((t, RECEIVE), (True,), 5, 7) for t in (1, 2, 3)]


def test_signatures_of_other_shapes_are_forgotten() -> None:
    """Both ends of a channel keep the same number of signatures if shapes change all the time.

    A shape whose signature was forgotten is sent with its signature again, and receive buffers have no old views.
    """
    encoder, decoder = Encoder(), Decoder()
    slot = ReceiveBuffer(torch.empty(2**16, dtype=torch.uint8))
    for turn in range(2):
        for size in (3, *range(4, 4 + message.MAX_SIGNATURES), 3, 3):
            x = torch.randn(2, size)
            for _ in range(2):
                wire, tensors = encoder.encode((turn, RECEIVE), x, (True,), 0)
                wire.copy_tensors(tensors)
                slot.buffer[: wire.buffer.numel()] = wire.buffer
                assert torch.equal(decoder.decode_copy(slot, 0).tree, x)
                encoder.release(wire)
    assert len(encoder._known) == len(decoder._signatures) == message.MAX_SIGNATURES
    assert len(slot.views) <= message.MAX_SIGNATURES


class Frozen(FrozenLeaf):
    def __init__(self, value: int) -> None:
        self.value = value


def test_a_frozen_leaf_is_serialized_once_and_any_other_leaf_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    serialized: list[Any] = []
    dumps = message.dumps

    def count_dumps(leaves: Any, seal: Any) -> bytes:
        serialized.append(leaves)
        return dumps(leaves, seal)

    monkeypatch.setattr(message, "dumps", count_dumps)
    encoder, decoder = Encoder(), Decoder()

    def send(leaf: Any) -> Any:
        wire, tensors = encoder.encode((0, RECEIVE), [torch.ones(2), leaf], (False,), 0)
        wire.copy_tensors(tensors)
        return decoder.decode(wire.buffer, 0, 0).tree[1]

    frozen, changing = Frozen(1), {1, 2}
    first, before = send(frozen), len(serialized)
    assert send(frozen) is first
    assert len(serialized) == before
    assert send(Frozen(2)).value == 2
    assert send(changing) == {1, 2}
    changing.add(3)
    assert send(changing) == {1, 2, 3}
