"""The size of the chunks of large messages, and the order in which chunks are sent."""

from __future__ import annotations

import random

import pytest

from lightning_pipes.engine.messages.chunks import (
    MAX_CHUNK_BYTES,
    MAX_FLIGHT_SECONDS,
    MAX_IN_FLIGHT,
    MIN_CHUNK_BYTES,
    ByteLayout,
    ChunkSizer,
    SendQueue,
    limit_queue,
)


@pytest.mark.parametrize("most", [1, 7, 64])
def test_a_line_sends_every_byte_once_and_least_left_first(most: int) -> None:
    """Every byte is sent once, and the message with the fewest remaining bytes comes first."""
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
    """The chunk size is adapted so that a chunk takes `MAX_FLIGHT_SECONDS`, within the smallest and largest size."""
    pace = ChunkSizer()
    for _ in range(30):
        pace.record_chunk(pace.size, pace.size / bandwidth)
    assert pace.size == pytest.approx(
        max(MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, bandwidth * MAX_FLIGHT_SECONDS)), rel=0.01
    )
    pace.record_chunk(1, 5.0)  # the short last chunk of a message does not change the estimate
    assert pace.size >= MIN_CHUNK_BYTES
    pace.record_chunk(pace.size, 0.0)
    pace.record_chunk(pace.size, 1.0)
    assert pace.size == MIN_CHUNK_BYTES


def test_chunks_in_flight_take_together_as_long_as_one_may() -> None:
    pace, bandwidth = ChunkSizer(), 1e8
    for limit in (1, 4, 2):
        pace.set_limit(limit)
        for _ in range(30):
            pace.record_chunk(pace.size, pace.size / bandwidth)
        assert limit * pace.size == pytest.approx(bandwidth * MAX_FLIGHT_SECONDS, rel=0.01)
    assert pace.speed == pytest.approx(bandwidth)
    for _ in range(30):
        pace.record_chunk(pace.size, 1.0)
        pace.set_limit(4)
    assert (pace.size, pace.limit) == (MIN_CHUNK_BYTES, 1), "chunks that are too small would take too long together"


def queue_of_second_class(training: float, bulk: float) -> float:
    """Simulate a server with two priorities and without preemption, and return the mean queue of the second priority.

    The server completes one job per second on average. Arrivals and service times are random.
    """
    rng, now, busy_until, waiting, area = random.Random(1), 0.0, 0.0, [0, 0], 0.0
    coming = [rng.expovariate(training), rng.expovariate(bulk)]
    while now < 50_000 / (training + bulk):
        serving = busy_until > now
        then = min(*coming, busy_until if serving else float("inf"))
        area += waiting[1] * (then - now)
        now = then
        arrived = not serving or now != busy_until
        if arrived:
            kind = int(coming[1] < coming[0])
            coming[kind] = now + rng.expovariate((training, bulk)[kind])
            waiting[kind] += 1
        if not (arrived and serving):
            kind = next((kind for kind in (0, 1) if waiting[kind]), -1)
            busy_until = now
            if kind >= 0:
                waiting[kind] -= 1
                busy_until += rng.expovariate(1.0)
    return area / now


@pytest.mark.parametrize(("training", "bulk"), [(0.5, 0.2), (0.2, 0.55), (0.6, 0.3)])
def test_limit_is_the_queue_behind_training(training: float, bulk: float) -> None:
    """The limit of chunks in flight is compared with the queue in a simulation."""
    measured = queue_of_second_class(training, bulk)
    assert limit_queue(training, bulk, 1.0) == pytest.approx(min(MAX_IN_FLIGHT, measured), abs=0.5 + 0.1 * measured)


def test_limit_at_the_ends() -> None:
    """The limit is largest if bulk transfers fill the rest of the link, and 1 if training fills it or it is idle."""
    assert limit_queue(0.0, 100.0, 100.0) == limit_queue(50.0, 50.0, 100.0) == MAX_IN_FLIGHT
    assert limit_queue(100.0, 1.0, 100.0) == limit_queue(0.0, 1.0, 1e9) == limit_queue(0.0, 0.0, 0.0) == 1


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
