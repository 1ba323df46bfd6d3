"""Compare memory peaks with a sum over intervals, and check the properties of a front."""

from __future__ import annotations

import pytest

from benchmarks.papers.umpipe.overlap.memory import Archive, Point, RowBytes, front, within
from benchmarks.papers.umpipe.overlap.search import search
from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.network import Network
from lightning_pipes.strategies.umpipe.overlapped.run import Merge, OverlappedRun, run_overlapped
from tests.strategies.umpipe.overlapped.networks import realistic, simulation, uniform


def peaks(run: OverlappedRun, sizes: RowBytes) -> tuple[int, ...]:
    """Return the peak of each stage: the largest sum of all data on the stage at any instant."""
    network = run.network
    width, rows = network.processes, network.rows
    flat = [size for direction in network.sizes_of(run.scheme) for size in direction]
    busy = [int(network.forward[k, q]) for k, q in enumerate(run.scheme.forward)]
    busy += [int(network.backward[k, q]) for k, q in enumerate(run.scheme.backward)]

    def begin(p: int, row: int) -> int:
        return run.starts[p][row // flat[p]]

    def end(p: int, row: int) -> int:
        return begin(p, row) + busy[p]

    found = []
    for i in range(network.stages):
        f, b = 2 * i, 2 * width - 1 - 2 * i
        lies = [(begin(f, row), end(b, row), sizes.held[i]) for row in range(rows)]
        if f > 0:
            lies += [(end(f - 1, row), begin(f, row), sizes.arrived[i]) for row in range(rows)]
        if b > width:
            lies += [(end(b - 1, row), begin(b, row), sizes.returned[i]) for row in range(rows)]
        instants = {a for a, _, _ in lies}
        found.append(max(sum(size for a, z, size in lies if a <= t < z) for t in instants))
    return tuple(found)


@pytest.mark.parametrize("seed", range(4))
def test_a_front(seed: int) -> None:
    network = (simulation, realistic)[seed % 2](3 + seed % 2, 16, seed)
    sizes = (
        None
        if seed < 2
        else RowBytes((3, 5, 2, 4)[: network.stages], (1, 2, 1, 3)[: network.stages], (2,) * network.stages)
    )
    points = front(network, row_bytes=sizes, evaluations=8000, seed=seed)
    assert points == front(network, row_bytes=sizes, evaluations=8000, seed=seed)
    assert len(points) > 2
    for a in points:
        run = run_overlapped(network, a.scheme, a.caps, a.policy)
        assert run.makespan == a.value
        assert peaks(run, sizes or RowBytes.rows(network.stages)) == a.peak
        assert not any(b is not a and b.value <= a.value and b.most <= a.most for b in points)
    assert [p.value for p in points] == sorted(p.value for p in points)
    assert points[0].value <= search(network, evaluations=2000, seed=seed).value
    for point in points:
        assert within(points, point.most) is point
    with pytest.raises(InputError, match="no scheme fits"):
        within(points, points[-1].most - 1)


def test_a_limit_of_each_stage() -> None:
    network = uniform(3, 8, 2, 4, link=1)
    points = front(network, evaluations=4000)
    assert within(points, points[-1].peak) is points[-1]
    assert within(points, [8, 8, 8]) is points[0]
    with pytest.raises(InputError, match="no scheme fits"):
        within(points, [8, 8, 0])
    with pytest.raises(InputError, match="there are none"):
        within((), 5)


def test_the_front_of_equal_stages_is_that_of_1f1b() -> None:
    """Check both ends of the front of equal stages without links.

    The fastest scheme holds p rows like 1F1B. If a stage holds fewer rows, the other stages wait.
    """
    network = uniform(4, 16, forward=1, backward=2)
    only = Network(16, (1,), network.forward[:, 1:], network.backward[:, 1:])
    points = front(only, evaluations=4000)
    assert [(p.value, p.most) for p in points][:1] == [(19 * 3, 4)]
    assert points[-1].most == 1
    assert points[-1].value == 16 * 4 * 3  # one row after another


def test_what_the_archive_keeps() -> None:
    archive = Archive()

    def point(value: int, most: int) -> Point:
        return Point(value, (most, 1), uniform(1, 2, 1, 1).equal_scheme(0), Merge.BACKWARD_FIRST, (1,))

    added = [archive.add(point(*each)) for each in ((5, 5), (5, 5), (6, 5), (5, 6), (7, 3), (4, 9), (6, 2))]
    assert added == [True, False, False, False, True, True, True]
    assert [(p.value, p.most) for p in archive.points] == [(4, 9), (5, 5), (6, 2)]


@pytest.mark.parametrize("arguments", [((1, 1), (1,), (1, 1)), ((0,), (0,), (0,)), ((), (), ()), ((1,), (-1,), (0,))])
def test_sizes_of_rows_that_are_none(arguments: tuple) -> None:
    with pytest.raises(InputError, match="held from 1 on"):
        RowBytes(*arguments)


def test_sizes_of_other_stages() -> None:
    with pytest.raises(InputError, match="has 2 stages, the network 3"):
        front(uniform(3, 4, 1, 1), row_bytes=RowBytes.rows(2), evaluations=1)
