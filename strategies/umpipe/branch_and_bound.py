"""Lower bound for cuts that run all forwards first: branch and bound over priced choices, with the exact search.

The exact search chooses forward and backward separately, as the paper does. In the engine, a stage chooses both
together, because they share autograd graphs (see `pricing`). If each direction of a stage may take the lowest price
that any of its options has for a size, the problem is relaxed, and the exact search returns a lower bound for all
choices. If the solution of the relaxed problem combines prices that no single option of a stage has, the options of
this stage are split into two parts. Each part has a bound of its own, and the part with the lowest bound is split next.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

import numpy as np

from lightning_pipes.strategies.umpipe.fitting import Choices
from lightning_pipes.strategies.umpipe.network import Network, Scheme, Times
from lightning_pipes.strategies.umpipe.pricing import CutOption
from lightning_pipes.strategies.umpipe.search.exact import BEAM_WIDTHS, search_optimum
from lightning_pipes.strategies.umpipe.search.genetic import evolve_schemes

MAX_BOUNDED_PARTS = 24
"""The maximum number of parts for which a bound is computed."""
SMALL_BEAMS = BEAM_WIDTHS[:2]
"""The beams of the exact search. Larger beams take seconds if there are many sizes."""
EXCLUDED_PRICE = 1 << 44
"""The price, in nanoseconds, of a size that may not be chosen: several hours."""

Allowed = tuple[tuple[int, ...], ...]
"""For each stage, the indices of the options that it may take."""


class BoundedSearch(NamedTuple):
    """The result of the branch and bound search.

    Attributes:
        lower_bound: a lower bound for the time of every choice, in nanoseconds.
        starts: the solutions of the relaxed problems, rounded to choices. They are good starts for a descent.
        nodes: the number of parts for which a bound was computed.
    """

    lower_bound: int
    starts: tuple[tuple[int, ...], ...]
    nodes: int


def bound_choices(choices: Choices, nodes: int = MAX_BOUNDED_PARTS) -> BoundedSearch:
    """Return a lower bound for the time of all choices, after at most `nodes` parts.

    The search does not read a clock, so equal input gives equal output.
    """
    sizes = _sizes(choices)
    every: Allowed = tuple(tuple(range(len(options))) for options in choices.stages)
    number = count()
    starts: dict[tuple[int, ...], None] = {}
    parts = [(0, next(number), every)]
    known: dict[Allowed, tuple[int, tuple[tuple[int, int, int, int], ...], tuple[int, ...]]] = {}
    looked = 0
    while True:
        low, _, allowed = heappop(parts)
        if allowed not in known:
            if looked == nodes:
                return BoundedSearch(low, tuple(starts), looked)
            looked += 1
            known[allowed] = found = _relaxed(choices, allowed, sizes)
            heappush(parts, (max(low, found[0]), next(number), allowed))
            continue
        _, taken, links = known[allowed]
        whole = [
            next((n for n in options if _prices(choices.stages[s][n]) == taken[s]), None)
            for s, options in enumerate(allowed)
        ]
        starts[(*(_close(choices.stages[s], o, taken[s]) for s, o in enumerate(allowed)), *links)] = None
        if None not in whole:
            return BoundedSearch(low, tuple(starts), looked)
        for part in _split(choices, allowed, whole.index(None), taken):
            heappush(parts, (low, next(number), part))


def _every(choices: Choices) -> list[Sequence[CutOption]]:
    return [*choices.stages, *(side for both in choices.links for side in both)]


def _backward_sizes(choices: Choices) -> set[int]:
    return {o.backward for options in choices.stages for o in options}


def _prices(option: CutOption) -> tuple[int, int, int, int]:
    return option.forward, option.backward, option.forward_time, option.backward_time


def evolve_choices(choices: Choices) -> list[tuple[int, ...]]:
    """Return the choices found by the paper's TiDGAP (A2 with E7): its best individual and its best recombination.

    If the solution combines the prices of two options on one stage, the stage takes the closest single option. The
    search is seeded and does not read a clock.
    """
    sizes = _sizes(choices)
    every: Allowed = tuple(tuple(range(len(options))) for options in choices.stages)
    network = _network(choices, every, sizes)
    offered = np.concatenate([network.forward, network.backward])
    dearest = int(np.where(offered < EXCLUDED_PRICE, offered * network.counts, 0).max(axis=1).sum()) + 1
    priced = Network(
        network.rows, network.sizes, *(np.minimum(each, dearest) for each in (network.forward, network.backward))
    )
    end = evolve_schemes(priced, "TiDGAP")
    found = []
    for solved in (end.best, end.recombined):
        taken, links = _taken(choices, network, solved.scheme)
        found.append((*(_close(choices.stages[s], every[s], each) for s, each in enumerate(taken)), *links))
    return list(dict.fromkeys(found))


def _sizes(choices: Choices) -> list[int]:
    return sorted({o.forward for every in _every(choices) for o in every} | _backward_sizes(choices), reverse=True)


def _relaxed(
    choices: Choices, allowed: Allowed, sizes: Sequence[int]
) -> tuple[int, tuple[tuple[int, int, int, int], ...], tuple[int, ...]]:
    """Return the lower bound for the allowed options, the prices taken from each stage, and the options of links."""
    network = _network(choices, allowed, sizes)
    found = search_optimum(network, beams=SMALL_BEAMS)
    return found.lower_bound, *_taken(choices, network, found.scheme)


def _network(choices: Choices, allowed: Allowed, sizes: Sequence[int]) -> Network:
    """Return the paper's problem in which each direction of a stage has the lowest price of all allowed options."""
    n, column = len(choices.stages), {size: q for q, size in enumerate(sizes)}
    forward: Times = np.full((2 * n - 1, len(sizes)), EXCLUDED_PRICE, np.int64)
    backward: Times = np.full((2 * n - 1, len(sizes)), EXCLUDED_PRICE, np.int64)
    for s, numbers in enumerate(allowed):
        for o in (choices.stages[s][number] for number in numbers):
            for table, row, size, time in (
                (forward, 2 * s, o.forward, o.forward_time),
                (backward, 2 * (n - 1 - s), o.backward, o.backward_time),
            ):
                table[row, column[size]] = min(table[row, column[size]], time)
    for s, (there, back) in enumerate(choices.links):
        for o in there:
            forward[2 * s + 1, column[o.forward]] = o.forward_time
        for o in back:
            backward[2 * (n - 2 - s) + 1, column[o.forward]] = o.forward_time
    return Network(choices.rows, tuple(sizes), forward, backward)


def _taken(
    choices: Choices, network: Network, scheme: Scheme
) -> tuple[tuple[tuple[int, int, int, int], ...], tuple[int, ...]]:
    """Return the prices that `scheme` takes from each stage, and the options that it takes from each link."""
    n, sizes, (p, q) = len(choices.stages), network.sizes, scheme
    taken = tuple(
        (
            sizes[p[2 * s]],
            sizes[q[2 * (n - 1 - s)]],
            int(network.forward[2 * s, p[2 * s]]),
            int(network.backward[2 * (n - 1 - s), q[2 * (n - 1 - s)]]),
        )
        for s in range(n)
    )
    links = [
        next(number for number, o in enumerate(side) if o.forward == size)
        for s, both in enumerate(choices.links)
        for side, size in zip(both, (sizes[p[2 * s + 1]], sizes[q[2 * (n - 2 - s) + 1]]), strict=True)
    ]
    return taken, tuple(links)


def _close(options: Sequence[CutOption], allowed: Sequence[int], taken: tuple[int, int, int, int]) -> int:
    """Return the allowed option that is closest to the relaxed solution, if possible one with both of its sizes."""
    forward, backward, *_ = taken
    return min(
        allowed,
        key=lambda n: (
            (options[n].forward != forward) + (options[n].backward != backward),
            options[n].forward_time + options[n].backward_time,
        ),
    )


def _split(
    choices: Choices, allowed: Allowed, stage: int, taken: Sequence[tuple[int, int, int, int]]
) -> tuple[Allowed, Allowed]:
    """Return the allowed options in two parts, which differ in `stage`.

    The first part has the options of the stage with the forward size of the relaxed solution, or with its backward
    size, or only the first option. This is the first of these criteria for which neither part is empty.
    """
    options = choices.stages[stage]
    forward, backward, *_ = taken[stage]
    for wanted in (
        [n for n in allowed[stage] if options[n].forward == forward],
        [n for n in allowed[stage] if options[n].backward == backward],
        [allowed[stage][0]],
    ):
        others = [n for n in allowed[stage] if n not in wanted]
        if wanted and others:
            break

    def with_part(part: Sequence[int]) -> Allowed:
        return (*allowed[:stage], tuple(part), *allowed[stage + 1 :])

    return with_part(wanted), with_part(others)
