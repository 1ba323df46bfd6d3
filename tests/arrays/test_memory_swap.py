"""Tests that siblings give the same results if their weights and optimizers take turns on the device."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_pipes import JobArray, MemorySwap
from lightning_pipes.cost import CostModel
from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.ir import B, F, Plan, PlanError, Program
from lightning_pipes.strategies.jap import round_order
from lightning_pipes.testing.ranks import run_ranks
from tests.arrays.jobs import Job, assert_equal, told_text
from tests.trainer.lit import quiet

BIG = 1 << 30


def poisoned(*args: Any, **kwargs: Any) -> MemorySwap:
    """Return a swap that overwrites states which are not on the device, so that wrong reads are noticed."""
    swap = MemorySwap(*args, **kwargs)
    swap._poison = True
    return swap


def with_and_without(rank: int, jobs: list[Job], size: int, *swap: Any) -> tuple[list[Any], list[Any], Any, Any]:
    """Return the outcomes of jobs with and without swapping, the statistics, and the report of switches."""
    quiet()
    memory = poisoned(*swap)
    found = [
        [(o.index, o.value, told_text(o.error)) for o in JobArray(size, memory=m).run(jobs)] for m in (memory, None)
    ]
    return found[0], found[1], memory.statistics, memory.switching


@pytest.mark.parametrize(("ranks", "bandwidth"), [(1, None), pytest.param(2, None, marks=pytest.mark.slow), (2, 1e7)])
def test_bit_for_bit(ranks: int, bandwidth: float | None) -> None:
    """Check six siblings at a time, which share two slots and have different batch sizes.

    One sibling joins late, one leaves early, one fails, and one clips gradients.
    """
    jobs = [
        Job(0),
        Job(1, batch=16),
        Job(2, patience=0, epochs=4),
        Job(3, harm="loss"),
        Job(4, batch=5, clip=0.1),
        Job(5, epochs=3),
        Job(6, batch=40, width=12, depth=7),
    ]
    for swapped, plain, found, _ in run_ranks(with_and_without, ranks, jobs, 6, BIG, None, 2, bandwidth, timeout=90):
        values = {index: value for index, value, _ in swapped}
        assert {index: error for index, _, error in swapped} == {index: error for index, _, error in plain}
        for index, value, error in plain:
            assert error or value is not None
            if not error:
                assert_equal(values[index], value)
        assert found.bytes_in > 20 * 1000, "states have taken turns"
        assert found.bytes_out > 0


def recomputing(rank: int, *swap: Any) -> Any:
    """Run siblings whose states may leave the device between forward and backward.

    Returns:
        The results with swapping, the results without swapping, and the statistics.
    """
    quiet()
    jobs = [Job(n, recompute=True, epochs=1) for n in range(4)]
    memory = poisoned(BIG, None, 2)
    found = [[o.value for o in JobArray(4, memory=m).run(jobs)] for m in (memory, None)]
    return found[0], found[1], memory.statistics


def test_states_leave_between_forward_and_backward_that_recomputes() -> None:
    for swapped, plain, found in run_ranks(recomputing, 2, timeout=60):
        for a, b in zip(swapped, plain, strict=True):
            assert_equal(a, b)
        assert found.bytes_in > 0


def forwards_first(plan: Plan, costs: CostModel) -> Program:
    """Return an order in which both stages run all forwards before all backwards.

    On the last stage, too, the number of states that wait for their backwards is at most the number of siblings.
    """
    spans = [cut.forward[0][0] for cut in plan.jobs]
    return Program(
        tuple(tuple(kind(s, span, job) for kind in (F, B) for job, span in enumerate(spans)) for s in range(2))
    )


def swapped_rounds(rank: int, slots: int, recompute: bool, backwards_last: bool) -> Any:
    """Run siblings in rounds, with states that take turns on the device.

    Returns:
        The results in the array, the results of each sibling alone, the statistics, and the largest number of states on
        the device.
    """
    quiet()
    own = [recompute and (n > 0 or backwards_last) for n in range(5)]  # with three slots, one state may stay
    jobs = [Job(n, "", 1, b, recompute=own[n], microbatches=1) for n, b in enumerate((8, 20, 5, 40, 8))]
    memory = poisoned(BIG, None, slots)
    array = JobArray[Any](5, memory=memory, rounds=forwards_first if backwards_last else round_order)
    resident, begin_block = [], memory.begin_block

    def watched(index: int, stage: int) -> None:
        begin_block(index, stage)
        assert memory._swap is not None
        resident.append(len(memory._swap.resident_keys))

    memory.begin_block = watched  # type: ignore[method-assign]
    found = {o.index: o.value for o in array.run(jobs)}
    alone = [o.value for job in jobs for o in JobArray[Any](1).run([job])]
    return [found[n] for n in range(5)], alone, memory.statistics, max(resident)


@pytest.mark.parametrize(
    ("slots", "recompute", "backwards_last"), [(2, True, True), (3, True, False), (5, False, False)]
)
def test_states_take_turns_in_rounds(slots: int, recompute: bool, backwards_last: bool) -> None:
    """Check siblings with different batch sizes.

    One of them leaves after its first round, and another one after its second.
    """
    for swapped, alone, found, most in run_ranks(swapped_rounds, 2, slots, recompute, backwards_last, timeout=90):
        for value, expected in zip(swapped, alone, strict=True):
            assert_equal(value, expected)
        assert most == slots
        if slots < 5:
            assert found.bytes_in > 20 * 1000, "states have taken turns"
        assert 5 * found.misses < found.leases, "the order of blocks and turns is known, so that states are asked for"


def test_rounds_whose_states_do_not_fit_are_refused() -> None:
    for text in run_ranks(refused_rounds, 2, timeout=60):
        assert re.search(
            rf"in a round, rank 0 has 3 states at the same time: .* They have \d+ bytes, but MemorySwap has "
            rf"device_bytes={BIG}, slots=2. Set recompute=True in all siblings",
            text,
        )


def refused_rounds(rank: int) -> str:
    """Return the error of an array in rounds with two slots for four siblings."""
    quiet()
    jobs = [Job(n, microbatches=1, epochs=1) for n in range(4)]
    with pytest.raises((PlanError, PeerFailure)) as caught:  # a rank may receive the error from the other one
        list(JobArray(4, memory=MemorySwap(BIG, slots=2), rounds=round_order).run(jobs))
    return str(caught.value)


def unlike_rounds(rank: int) -> tuple[list[Any], list[Any]]:
    """Return the results of siblings in rounds with room for a large state and two small ones, and of each alone."""
    quiet()
    jobs = [Job(n, epochs=1, microbatches=1, partition=(3,), width=w) for n, w in enumerate((6, 24, 9))]
    array = JobArray[Any](3, memory=poisoned(80_000), rounds=forwards_first)
    together = sorted(array.run(jobs), key=lambda each: each.index)
    assert not any(o.error for o in together), [told_text(o.error) for o in together]
    return [o.value for o in together], [o.value for job in jobs for o in JobArray[Any](1).run([job])]


def test_a_round_has_room_for_states_of_different_sizes() -> None:
    """Check that the bytes of each state count, and not those of the largest one, of which three do not fit."""
    for together, alone in run_ranks(unlike_rounds, 2, timeout=60):
        for a, b in zip(together, alone, strict=True):
            assert_equal(a, b)


def cut_by_units(rank: int) -> tuple[list[Any], list[Any]]:
    """Return the results of siblings cut by units, which have different schedules and take turns, and of each alone."""
    quiet()
    orders = (("jap", 8), ("1f1b", 16), ("zero_bubble", 5))
    jobs = [Job(n, epochs=1, schedule=s, batch=b, partition=("layers.3",)) for n, (s, b) in enumerate(orders)]
    together = JobArray[Any](3, memory=poisoned(BIG, None, 2)).run(jobs)
    alone = [outcome.value for job in jobs for outcome in JobArray[Any](1).run([job])]
    return [each.value for each in sorted(together, key=lambda each: each.index)], alone


def test_siblings_that_are_cut_by_units_are_what_they_are_alone() -> None:
    for together, alone in run_ranks(cut_by_units, 2, timeout=60):
        for a, b in zip(together, alone, strict=True):
            assert_equal(a, b)


def told(rank: int, device_bytes: int, host_bytes: int | None, slots: int | None) -> list[str]:
    """Return the errors of two siblings in an array with these budgets."""
    quiet()
    memory = MemorySwap(device_bytes, host_bytes, slots)
    return [told_text(o.error) for o in JobArray(2, memory=memory).run([Job(0, epochs=1), Job(1, epochs=1)])]


@pytest.mark.parametrize(
    ("device_bytes", "host_bytes", "says"),
    [
        (100, None, r"MisfitError: state 0 has \d+ bytes, the device's budget is 100"),
        (10_000, None, r"MisfitError: sibling 0 has a state of \d+ bytes, but device_bytes=10000 has no room for two"),
        (BIG, 10_000, r"MisfitError: state [01] has \d+ bytes; . states have \d+ of the host's budget of 10000"),
    ],
)
def test_a_budget_that_is_too_small_is_refused(device_bytes: int, host_bytes: int | None, says: str) -> None:
    (texts,) = run_ranks(told, 1, device_bytes, host_bytes, None, timeout=60)
    assert any(re.match(says, text) for text in texts), texts


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ((0,), "device_bytes"),
        ((9, None, 1), "a slot for the current state"),
        ((9, 9, 2, -1.0), "bandwidth must be"),
    ],
)
def test_settings_that_are_refused(settings: tuple[Any, ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        MemorySwap(*settings)


def counted(rank: int) -> Any:
    """Return the statistics of swapping with prefetch, and the report of switches."""
    quiet()
    memory = MemorySwap(BIG, slots=2)
    list(JobArray(4, memory=memory).run([Job(n) for n in range(4)]))
    return memory.statistics, memory.switching


def test_states_are_asked_for_before_they_are_used() -> None:
    """Check that every state except the first one is requested early.

    On one rank, the order of siblings is known.
    """
    ((found, switching),) = run_ranks(counted, 1, timeout=60)
    assert found.misses == 0
    assert found.hits + found.late > 100
    assert found.hits > found.late
    assert switching.stages == (0,)


def on_demand(rank: int) -> Any:
    """Return the statistics of swapping without prefetch."""
    quiet()
    memory = MemorySwap(BIG, slots=2, prefetch=False)
    list(JobArray(4, memory=memory).run([Job(n, epochs=1) for n in range(4)]))
    return memory.statistics


def test_without_prefetch_every_state_that_is_brought_is_waited_for() -> None:
    (found,) = run_ranks(on_demand, 1, timeout=60)
    assert found.prefetched == found.late == 0
    assert found.misses > 20


def sized(rank: int, jobs: list[Job], rooms: list[int]) -> Any:
    """Run jobs in an array whose size depends on memory.

    Returns:
        The outcomes or the error, the largest number of siblings at a time, and the size of the array.
    """
    quiet()
    state = 100_000  # more than the size of one state
    memory = MemorySwap(BIG, host_bytes=rooms[rank] * state)
    array: JobArray[Any] = JobArray("auto", memory=memory)
    seen, living = [], [0]
    begin_turn = memory.begin_turn

    def counted_turn(index: int) -> None:
        living.append(len(array._running))
        memory._largest = state
        begin_turn(index)

    memory.begin_turn = counted_turn  # type: ignore[method-assign]
    try:
        seen = [(o.index, o.value, told_text(o.error)) for o in array.run(jobs)]
    except PlanError as error:
        return str(error), max(living), array.size
    return seen, max(living), array.size


@pytest.mark.slow
def test_as_many_siblings_as_memory_has_room_for() -> None:
    """Check that the rank with the least room determines the number of siblings, up to two per stage."""
    jobs = [Job(n, epochs=1) for n in range(6)]
    plain = run_ranks(with_and_without, 2, jobs, 1, BIG, timeout=60)[0][1]
    for rooms, size in (([9, 3], 3), ([9, 8], 4)):
        for seen, most, found in run_ranks(sized, 2, jobs, rooms, timeout=60):
            assert (most, found) == (size, size)
            for (_, value, error), (_, expected, _) in zip(sorted(seen, key=_first), plain, strict=True):
                assert not error
                assert_equal(value, expected)


def _first(row: tuple[Any, ...]) -> Any:
    return row[0]


@pytest.mark.parametrize("harm", ["before its step", "loss"])
def test_a_sibling_that_fails_first_does_not_keep_the_others_from_beginning(harm: str) -> None:
    """Check that later siblings join an array whose first sibling fails."""
    jobs = [Job(0, harm=harm), *(Job(n, epochs=1) for n in range(1, 5))]
    for seen, most, found in run_ranks(sized, 2, jobs, [3, 4], timeout=60):
        assert (most, found) == (3, 3)
        assert [bool(error) for _, _, error in sorted(seen, key=_first)] == [True, False, False, False, False]


def test_no_room_for_two() -> None:
    """Check the errors if memory has no room for two siblings, or if no memory is given."""
    for text, most, _ in run_ranks(sized, 2, [Job(n, epochs=1) for n in range(3)], [4, 1], timeout=60):
        assert text.startswith("the host of rank 1 has room for the states of 1 sibling, but an array needs two")
        assert most == 1
    with pytest.raises(PlanError, match="size='auto' is computed from memory"):
        JobArray("auto")
