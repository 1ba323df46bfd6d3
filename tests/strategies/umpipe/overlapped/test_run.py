"""Compare the event loop with the simulator, the paper's recurrence, closed forms and CP-SAT."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipes.ir import InputError, Kind, Plan, verify
from lightning_pipes.sim import simulate
from lightning_pipes.sim.loops.jit import LATEST_TIME, Kernel
from lightning_pipes.strategies.umpipe import UM1F1B
from lightning_pipes.strategies.umpipe.network import Network, Scheme
from lightning_pipes.strategies.umpipe.overlapped import Merge
from lightning_pipes.strategies.umpipe.overlapped.kernel import OVERLAPPED_KERNELS
from lightning_pipes.strategies.umpipe.overlapped.tables import Chunks, make_log, make_memory, make_room
from tests.cases import for_each
from tests.strategies.umpipe.overlapped.chunked import Chunked
from tests.strategies.umpipe.overlapped.networks import random_scheme, realistic, simulation, uniform
from tests.strategies.umpipe.overlapped.runs import (
    OverlappedRun,
    _logged,
    chunks_of,
    cut_of,
    run_overlapped,
    sizes_of_scheme,
)
from tests.strategies.umpipe.search.greedy import equal_scheme


def in_simulator(run: OverlappedRun):
    return simulate(run.program, run.plan(), Chunked(run.network, run.scheme))


def compute_starts(run: OverlappedRun) -> dict[tuple[Kind, int, int], int]:
    """Return the starts of computations by kind, stage and first sample."""
    n, k = run.network.stages, run.network.processes
    sizes = sizes_of_scheme(run.network, run.scheme)
    found = {}
    for s in range(n):
        for kind, p, size in ((Kind.F, 2 * s, sizes[0][2 * s]), (Kind.B, k + 2 * (n - 1 - s), sizes[1][k - 1 - 2 * s])):
            found |= {(kind, s, i * size): t for i, t in enumerate(run.starts[p])}
    return found


@for_each("policy", Merge)
@for_each("seed", range(12))
def test_its_order_takes_as_long_in_the_simulator(seed: int, policy: Merge) -> None:
    make = simulation if seed % 2 else realistic
    network = make(1 + seed % 5, (8, 12, 16, 7)[seed // 3 % 4] if make is simulation else 16, seed)
    run = run_overlapped(network, random_scheme(network, seed), policy=policy)
    timeline = in_simulator(run)
    assert timeline.makespan == run.makespan
    events = {(e.instruction.kind, e.instruction.stage, e.instruction.span.start): e.start for e in timeline.events}
    assert {at: events[at] for at in compute_starts(run)} == compute_starts(run)
    verify(run.program, run.plan())


@pytest.mark.parametrize("seed", range(6))
def test_caps_bound_what_is_in_flight(seed: int) -> None:
    """Check that caps limit the samples in flight and that the simulator finds the same makespan."""
    network = simulation(4, 16, seed)
    option = 6 - seed
    free = run_overlapped(network, equal_scheme(network, option))
    caps = [max(network.sizes[option], peak // 2) for peak in free.peak_rows]
    run = run_overlapped(network, equal_scheme(network, option), caps)
    assert all(peak <= cap for peak, cap in zip(run.peak_rows, caps, strict=True))
    assert run.makespan >= free.makespan
    assert in_simulator(run).makespan == run.makespan
    # A chunk of all samples may start if the stage holds nothing.
    least = run_overlapped(network, equal_scheme(network, 0), [1] * 4)
    assert least.peak_rows == (16,) * 4


def recurrence(times: np.ndarray, scheme: tuple[int, ...], network: Network) -> int:
    """Return the end of the last datum by equation E3.

    The chunk of a datum starts after the same datum's chunk in the previous process and after the previous chunk of its
    own process.
    """
    rows = network.rows
    before = [0] * (rows + 1)
    for k, q in enumerate(scheme):
        size = network.sizes[q]
        ends = [0] * (rows + 1)
        for j in range(1, rows + 1):
            y = size * (-(-j // size) - 1)
            ends[j] = max(before[min(y + size, rows)], ends[y]) + int(times[k, q])
        before = ends
    return before[rows]


@for_each("seed", range(8))
def test_all_forwards_first_takes_the_time_of_the_paper(seed: int) -> None:
    """Check E4: the step ends with the last datum's backward, which follows a barrier after the last forward."""
    network = simulation(1 + seed % 4, 11 + seed, seed)
    scheme = random_scheme(network, seed)
    omega = recurrence(network.forward, scheme.forward, network) + recurrence(
        network.backward, scheme.backward, network
    )
    run = run_overlapped(network, scheme, policy=Merge.ALL_FORWARDS_FIRST)
    assert run.makespan == omega
    assert run.peak_rows == (network.rows,) * network.stages


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (4, 6), (5, 5)])
def test_equal_chunks_are_1f1b(p: int, m: int) -> None:
    """Check that a step takes (m + p - 1)(f + b), and that stage s holds p - s micro-batches if caps require it."""
    network = uniform(p, m, forward=3, backward=5)
    assert run_overlapped(network, equal_scheme(network, 1)).makespan == (m + p - 1) * 8
    classic = run_overlapped(network, equal_scheme(network, 1), caps=[p - s for s in range(p)])
    assert classic.makespan == (m + p - 1) * 8
    assert classic.peak_rows == tuple(min(p - s, m) for s in range(p))
    assert classic.program.to_lines()[p - 1].startswith("F{0}.0 B{0}.0 F{0}.1 B{0}.1".format(p - 1))
    assert classic.warmup_rows == tuple(min(p - s, m) for s in range(p))


def test_an_order_by_hand() -> None:
    """Check an order by hand: the last stage waits for both forwards.

    The forward has 2 chunks on the first stage and 1 on the second, the backward has 1 and then 2, and links are free.
    """
    times = np.array([[2, 1], [0, 0], [2, 1]])
    network = Network(2, (2, 1), times, times)
    run = run_overlapped(network, Scheme((1, 1, 0), (0, 0, 1)))
    assert run.program.to_lines() == ["F0.0 F0.1 B0.0 B0.1 STEP0", "F1.0 B1.0 STEP1"]
    assert run.starts == ((0, 1), (1, 2), (2,), (4,), (6,), (6, 7))
    assert run.makespan == 8
    assert run.warmup_rows == (2, 2)


@pytest.mark.parametrize("seed", range(3))
def test_compiled_is_the_same(seed: int) -> None:
    machine = OVERLAPPED_KERNELS.numba
    if machine is None:
        pytest.skip("numba is not installed")
    network = simulation(5, 30, seed)
    for n in range(10):
        scheme = random_scheme(network, n)
        for policy in Merge:
            ours, theirs = (
                _logged(network, scheme, None, policy, each) for each in (OVERLAPPED_KERNELS.python, machine)
            )
            assert (ours.makespan, ours.order, ours.starts, ours.peak_rows) == (
                theirs.makespan, theirs.order, theirs.starts, theirs.peak_rows,
            )  # fmt: skip


def test_stages_that_wait_for_each_other_are_named() -> None:
    network = Network(4, (4, 2), np.ones((3, 2), int), np.ones((3, 2), int))
    with pytest.raises(InputError, match=r"wait for each other.*raise the caps"):
        run_overlapped(network, Scheme((1, 1, 0), (0, 0, 0)), caps=[2, 4])


@pytest.mark.parametrize("seed", range(5))
def test_a_limit_ends_what_takes_as_long_and_nothing_else(seed: int) -> None:
    network = simulation(1 + seed, 12, seed)
    for n in range(20):
        scheme = random_scheme(network, n)
        plain = chunks_of(network, scheme)
        chunks = Chunks(
            plain.rows, OVERLAPPED_KERNELS.python.copy(plain.busy), OVERLAPPED_KERNELS.python.copy(plain.size)
        )
        room = (
            make_memory(OVERLAPPED_KERNELS.python, network.stages),
            make_room(OVERLAPPED_KERNELS.python, network.stages),
            make_log(OVERLAPPED_KERNELS.python),
        )
        for policy in Merge:
            end = run_overlapped(network, scheme, policy=policy).makespan
            ends = [
                OVERLAPPED_KERNELS.python.run.run_chunks(chunks, policy, limit, *room)
                for limit in (end - 1, end, end + 1)
            ]
            assert ends == [LATEST_TIME, LATEST_TIME, end]


@pytest.mark.parametrize("caps", [[1], [0, 1], [1.5, 2], [1, 2, 3]])
def test_caps_that_are_none(caps: list[int]) -> None:
    network = uniform(2, 4, 1, 1)
    with pytest.raises(InputError, match="one for each of 2 stages"):
        run_overlapped(network, equal_scheme(network, 0), caps)


@pytest.mark.parametrize("scheme", [Scheme((0,), (0,)), Scheme((0, 0, 2), (0, 0, 0)), Scheme((0, 0, -1), (0, 0, 0))])
def test_schemes_that_are_none(scheme: Scheme) -> None:
    with pytest.raises(InputError, match="an option from 0 to 1"):
        run_overlapped(uniform(2, 4, 1, 1), scheme)


@for_each("machine", [OVERLAPPED_KERNELS.python, OVERLAPPED_KERNELS.numba])
@for_each("seed", range(8))
def test_several_stages_a_rank_take_the_simulated_time(seed: int, machine: Kernel) -> None:
    """Check that the event loop takes the same time as the simulator if a rank has several stages.

    The order is the greedy order of the policy. Links take no time, because the links of two stages would share a wire
    in the simulator.
    """
    ranks = ((0, 1) * 2, (0, 1, 2) * 2, (0, 1) * 3)[seed % 3]
    network = simulation(len(ranks), (8, 12, 16, 7)[seed % 4], seed, most=10**6)
    network.forward[1::2], network.backward[1::2] = 0, 0
    scheme = random_scheme(network, seed)
    plain = chunks_of(network, scheme)
    chunks = Chunks(plain.rows, machine.copy(plain.busy), machine.copy(plain.size))
    notes = make_memory(machine, len(ranks)), make_room(machine, len(ranks), ranks), make_log(machine)
    took = machine.run.run_chunks(chunks, Merge.BACKWARD_FIRST, LATEST_TIME, *notes)
    plan = Plan(ranks, (cut_of(network, scheme),))
    timeline = simulate(UM1F1B(), plan, Chunked(network, scheme))
    assert took == timeline.makespan
