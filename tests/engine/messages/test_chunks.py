"""How large messages are cut, and in what order the pieces are sent."""

from __future__ import annotations

import pytest

from lightning_pipes.engine.messages.tree_format import MAX_CHUNK, MIN_CHUNK, SECONDS, ChunkSizer, SendQueue


@pytest.mark.parametrize("most", [1, 7, 64])
def test_a_line_sends_every_byte_once_and_least_left_first(most: int) -> None:
    line = SendQueue()
    sizes = {0: 100, 1: 1, 2: 30, 3: 64}
    for number, size in sizes.items():
        line.add(number, size)
    left, seen = dict(sizes), []
    while line:
        number, start, stop = line.next_chunk(most)
        assert left[number] == min(size for size in left.values() if size)
        assert start == sizes[number] - left[number]
        assert 0 < stop - start <= most
        left[number] -= stop - start
        seen.append(number)
    assert not any(left.values())
    assert seen[0] == 1


@pytest.mark.parametrize("bandwidth", [1e6, 6e6, 1e8, 1e10])
def test_a_chunk_takes_about_as_long_as_it_may(bandwidth: float) -> None:
    pace = ChunkSizer()
    for _ in range(30):
        pace.record_chunk(pace.size, pace.size / bandwidth)
    assert pace.size == pytest.approx(max(MIN_CHUNK, min(MAX_CHUNK, bandwidth * SECONDS)), rel=0.01)
    pace.record_chunk(1, 5.0)  # the end of a parcel says nothing
    assert pace.size >= MIN_CHUNK
    pace.record_chunk(pace.size, 0.0)
    pace.record_chunk(pace.size, 1.0)
    assert pace.size == MIN_CHUNK
