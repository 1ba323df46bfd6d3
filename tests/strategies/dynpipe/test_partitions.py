from itertools import combinations

import numpy as np

from lightning_pipes.ir import Span
from lightning_pipes.strategies.dynpipe.partitions import all_partitions, keeps_tied_layers, list_neighbours, spans_of


def test_all_partitions_are_all() -> None:
    found = all_partitions((1, 3, 4, 6), 3, 8)
    assert found.tolist() == [[0, *two, 8] for two in combinations((1, 3, 4, 6), 2)]
    assert spans_of(found[0]) == (Span(0, 1), Span(1, 3), Span(3, 8))
    assert all_partitions((), 1, 5).tolist() == [[0, 5]]


def test_neighbours_move_each_cut_by_one_place() -> None:
    """Check the neighbors of a partition whose cut at 4 is not a place of the condensed model."""
    found = list_neighbours([2, 4], (1, 2, 3, 6), 8)
    assert found[0].tolist() == [0, 2, 4, 8]
    places = {1: (1, 2, 3), 2: (3, 4, 6)}
    expected = {(a, b) for a in places[1] for b in places[2] if a < b}
    assert {(int(a), int(b)) for _, a, b, _ in found} == expected
    assert (0, 3, 3, 8) not in {tuple(row) for row in found.tolist()}


def test_of_many_stages_one_cut_moves_at_a_time() -> None:
    found = list_neighbours(list(range(2, 32, 2)), range(1, 40), 40)
    assert len(found) == 1 + 2 * 15
    assert {int((row != found[0]).sum()) for row in found} == {0, 1}


def test_layers_that_share_a_parameter_are_not_torn() -> None:
    now = (Span(0, 3), Span(3, 6))
    cuts = np.array([[0, cut, 6] for cut in range(1, 6)])

    def kept(*tied: tuple[int, ...]) -> list[int]:
        return cuts[keeps_tied_layers(cuts, now, tied), 1].tolist()  # type: ignore[no-any-return]

    assert kept((1, 2)) == [1, 3, 4, 5]
    assert kept((2, 3)) == [3]  # the tied layers are on different stages and stay there
    assert kept((0, 5)) == [1, 2, 3, 4, 5]
    assert kept((1, 2), (3, 4)) == [1, 3, 5]
