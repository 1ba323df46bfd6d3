"""Compare decisions about resident states with the smallest possible number of loads and with numbers by hand."""

import random
from functools import cache

import pytest

from lightning_pipes.ir import PlanError
from lightning_pipes.sim.residency import Residency
from tests.cases import for_each
from tests.sim.lease_order import LeaseOrder
from tests.sim.virtual_copier import VirtualCopier

SECOND = 10**9


def fewest_loads(keys, places):
    """Return the smallest number of on-demand loads of equally large states, found by trying every eviction."""

    @cache
    def of(at, held):
        if at == len(keys):
            return 0
        key = keys[at]
        if key in held:
            return of(at + 1, held)
        if len(held) < places:
            return 1 + of(at + 1, held | {key})
        return 1 + min(of(at + 1, held - {gone} | {key}) for gone in held)

    return of(0, frozenset())


def misses_of_lru(keys, places):
    """Return the number of misses of an LRU cache, modeled as a list with the last used key at the end."""
    held, misses = [], 0
    for key in keys:
        if key in held:
            held.remove(key)
        else:
            misses += 1
            del held[: max(0, len(held) + 1 - places)]
        held.append(key)
    return misses


def sequence(seed, states=5, length=14):
    rng = random.Random(seed)
    return tuple(rng.randrange(states) for _ in range(length))


def on(places, copier=None, states=5):
    return Residency(10 * places, dict.fromkeys(range(states), 10), copier or VirtualCopier(float("inf")))


@for_each("places", [1, 2, 3])
@for_each("seed", range(8))
def test_loads_least_where_the_leases_are_known(seed, places):
    keys = sequence(seed)
    residency = on(places)
    order = LeaseOrder(residency, keys)
    for key in keys:
        residency.lease(order.begin_next())
        residency.release(key)
    assert residency.statistics.misses == fewest_loads(keys, places)


@for_each("places", [2, 3])
@for_each("seed", range(8))
def test_with_prefetching_only_the_first_is_waited_for(seed, places):
    """Check prefetching with enough time: only the first state is late, and no load is wasted.

    Prefetching loads more than loading on demand, because the state in use keeps its place while others arrive.
    """
    keys = sequence(seed)
    copier = VirtualCopier(100.0)  # a state takes 0.1 s
    residency = on(places, copier)
    order = LeaseOrder(residency, keys)
    for number, key in enumerate(keys):
        waited = residency.lease(order.begin_next())
        assert (waited > 0) == (number == 0)
        residency.prefetch()
        copier.now += SECOND
        residency.release(key)
    assert fewest_loads(keys, places) <= residency.statistics.bytes_in / 10
    assert residency.statistics.wasted == 0


@for_each("places", [1, 2, 4])
@for_each("seed", range(8))
def test_least_recently_used_state_leaves_without_predictions(seed, places):
    keys = sequence(seed)
    residency = on(places)
    for key in keys:
        residency.lease(key)
        residency.release(key)
    assert residency.statistics.misses == misses_of_lru(keys, places)


def test_predictions_are_protected_from_each_other_but_not_from_a_lease():
    residency = on(2)
    residency.predict([0, 1, 2])
    assert residency.prefetch() == 2
    assert residency.resident == {0, 1}
    assert residency.statistics.refused == 1
    residency.lease(3)
    assert residency.resident == {0, 3}, "1 is needed after 0"
    assert residency.statistics.wasted == 1


def test_what_is_predicted_takes_the_place_of_what_is_not_or_later():
    residency = on(3)
    for key in (0, 1, 2):
        residency.lease(key)
        residency.release(key)
    residency.predict([3, 2, 4, 0])
    assert residency.prefetch() == 2  # 3 replaces 1, which is not predicted, and 4 replaces 0
    assert residency.resident == {2, 3, 4}


def test_slots_bound_the_number_of_states():
    residency = Residency(100, dict.fromkeys(range(3), 10), VirtualCopier(float("inf")), slots=2)
    residency.lease(0)
    residency.predict([0, 1, 2])
    assert residency.prefetch() == 1
    assert residency.has_room(2)
    residency.lease(1)
    assert residency.has_room(1)
    assert not residency.has_room(2)


def test_offloaded_states_are_not_written_again():
    copier = VirtualCopier(10.0)
    residency = on(2, copier)
    residency.lease(0, write=True)
    residency.release(0)
    residency.start_write_back(0)  # from 1 to 2
    copier.now += 5 * SECOND
    residency.predict([1, 2, 0])
    assert residency.prefetch() == 2
    assert residency.lease(2) == 2 * SECOND, "0 was out long ago"
    assert residency.statistics.bytes_out == 10


def test_times():
    """Check the waiting times of hits, late states and misses.

    A hit does not wait, a late state waits for the rest of its load, and a miss waits for the whole load. A modified
    state is first written to the host.
    """
    copier = VirtualCopier(10.0, latency=0.25)  # a state takes 1.25 s
    residency = on(2, copier)
    order = LeaseOrder(residency, [0, 1, 0, 2, 1])
    assert residency.lease(order.begin_next(), write=True) == 1.25 * SECOND
    residency.release(0)
    assert residency.prefetch() == 1  # 1, from 1.25 to 2.5
    copier.now += SECOND // 4
    assert residency.lease(order.begin_next()) == SECOND
    assert residency.lease(order.begin_next()) == 0
    residency.release(0)
    residency.prefetch()  # 2 replaces 0, which is written back from 2.5 to 3.75
    assert residency.resident == {1, 2}
    assert residency.lease(order.begin_next()) == 2.5 * SECOND
    found = residency.statistics
    assert (found.hits, found.late, found.misses) == (1, 2, 1)
    assert (found.bytes_in, found.bytes_out, found.stall_ns) == (30, 10, 4.75 * SECOND)
    assert found.hit_rate == 0.25


def test_states_are_written_before_they_are_read_back():
    copier = VirtualCopier(10.0)
    residency = on(1, copier)
    residency.lease(0, write=True)
    residency.release(0)
    residency.lease(1)  # 0 is written back until 2, and 1 is loaded until 3
    residency.release(1)
    assert copier.now == 3 * SECOND
    residency.lease(1, write=True)
    residency.flush()
    assert copier.now == 4 * SECOND
    residency.release(1)
    residency.flush()  # the state is clean
    assert residency.statistics.bytes_out == 20


def test_jobs_come_and_go():
    residency = on(1, states=1)
    residency.lease(0)
    with pytest.raises(PlanError, match="can't be dropped"):
        residency.drop_state(0)
    residency.release(0)
    residency.predict([0])
    residency.drop_state(0)
    assert residency.prefetch() == 0  # earlier predictions are forgotten
    assert residency.resident == frozenset()
    residency.add("new", 10)
    residency.predict(["new"])
    assert residency.prefetch() == 1


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda r: Residency(9, {0: 10}, VirtualCopier(1.0)), "more stages"),
        (lambda r: r.release(0), "was not leased"),
        (lambda r: [r.lease(key) for key in range(3)], "are leased"),
    ],
)
def test_refused(mistake, says):
    with pytest.raises(PlanError, match=says):
        mistake(on(2))
