"""Check which layers are loaded and dropped."""

from __future__ import annotations

import random

from benchmarks.papers.csp.emulation.swapping import Load, Needs, Residents

SIZES = {layer: 1 + layer % 3 for layer in range(12)}  # 1 2 3 1 2 3 ...


def there(layer: int, version: int) -> bool:
    return True


def filled(room: int, *layers: int) -> Residents:
    residents = Residents(room, SIZES)
    for layer in layers:
        load(residents, Load(layer, -1, ()))
    return residents


def load(residents: Residents, given: Load) -> None:
    residents.begin(given)
    residents.end()


def needs(*layers: int, version: int = -1) -> Needs:
    return dict.fromkeys(layers, version)


def test_loads_for_the_task_first_and_then_what_is_wanted() -> None:
    residents = filled(9)
    order = []
    while (found := residents.next_load(needs(0, 3), [needs(3, 1), needs(6)], there)) is not None:
        order.append(found.layer)
        load(residents, found)
    assert order == [0, 3, 1, 6]
    assert residents.used == 1 + 1 + 2 + 1


def test_drops_what_is_wanted_last_and_of_that_what_was_used_longest_ago() -> None:
    residents = filled(4, 0, 3, 6, 9)
    residents.use([0])
    assert residents.next_load(needs(1), [needs(3)], there) == Load(1, -1, (6, 9))
    assert residents.next_load(needs(1), [needs(6), needs(3, 9)], there) == Load(1, -1, (0, 3))


def test_a_prediction_drops_nothing_that_is_needed_sooner() -> None:
    residents = filled(3, 0, 3, 6)
    # dropping only 6 does not free enough memory
    assert residents.next_load(needs(0), [needs(3), needs(1)], there) is None
    assert residents.next_load(needs(0), [needs(1)], there) == Load(1, -1, (3, 6))
    assert residents.next_load(needs(0), [needs(1), needs(3)], there) == Load(1, -1, (6, 3))


def test_an_old_version_is_replaced_and_one_that_has_not_come_is_left() -> None:
    residents = filled(3, 0, 3, 6)
    assert residents.missing(needs(0, 3, version=5)) == [0, 3]
    assert residents.next_load({0: 5}, [], there) == Load(0, 5, (0,))
    assert residents.next_load({0: 5, 1: -1}, [], lambda layer, version: version < 0) == Load(1, -1, (3, 6))
    residents.renewed(0, 5)
    residents.renewed(7, 5)
    assert residents.holds(0, 5)
    assert not residents.holds(7, 5)


def test_unsaved_layers_are_not_dropped() -> None:
    residents = filled(2, 0, 3)
    residents.stepped(0, 4)
    residents.stepped(3, 4)
    assert residents.next_load(needs(6), [], there) is None
    residents.saved(3)
    assert residents.next_load(needs(6), [], there) == Load(6, -1, (3,))


def test_a_load_that_is_given_up_takes_no_room() -> None:
    residents = filled(3, 0)
    residents.begin(Load(1, -1, ()))
    assert residents.used == 3
    residents.abort()
    assert (residents.used, residents.holds(1, -1)) == (1, False)


def test_never_holds_more_than_there_is_room_for() -> None:
    rng = random.Random(0)
    residents = Residents(8, SIZES)
    held: set[int] = set()
    loads = 0
    for _ in range(3000):
        task, *wanted = (needs(*rng.sample(range(12), rng.randint(1, 3))) for _ in range(3))
        found = residents.next_load(task, wanted, there)
        if found is None:
            everything = set(task).union(*wanted)
            assert everything <= held or sum(SIZES[x] for x in held | everything) > 8
            continue
        assert found.layer not in held
        assert not set(found.dropped) & set(task)
        held = (held - {*found.dropped}) | {found.layer}
        load(residents, found)
        loads += 1
        assert residents.used == sum(SIZES[x] for x in held) <= 8
        assert all(residents.holds(x, -1) for x in held)
    assert loads > 1000
