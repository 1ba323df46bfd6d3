"""How good a cut with all forwards first can be at all: branch and bound over priced choices, by the exact search.

The exact search takes forward and backward apart, and so does the paper. Here a stage chooses both in one, for they
share graphs (see `pricing`). Where each may take the best price that any choice has for its size, the search gives a
bound that no choice goes below. If it took from one stage what no single choice offers, the choices of this stage are
split into two parts, each with a bound of its own, the lowest first.
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
from lightning_pipes.strategies.umpipe.search.exact import BEAMS, search_optimum
from lightning_pipes.strategies.umpipe.search.genetic import evolve_schemes

NODES = 24
"""Parts of all choices that are looked at."""
FEW_BEAMS = BEAMS[:2]
"""Of the exact search: larger ones take seconds where there are many sizes."""
DEAR = 1 << 44
"""Nanoseconds of what may not be chosen: hours."""

Allowed = tuple[tuple[int, ...], ...]
"""Of each stage the numbers of the options that it may take."""


class BoundedSearch(NamedTuple):
    """The outcome of the search.

    Attributes:
        lower_bound: nanoseconds that no choice goes below.
        starts: choices that bounds came from, made whole: good ones to begin a descent at.
        nodes: how many parts were looked at.
    """

    lower_bound: int
    starts: tuple[tuple[int, ...], ...]
    nodes: int


def bound_choices(choices: Choices, nodes: int = NODES) -> BoundedSearch:
    """Return the bound after so many parts at most; equal input, equal answer, for there is no clock."""
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
    """Return the choices that the paper's TiDGAP finds (A2 with E7): its best individual, and its best directions.

    A stage that would take from two choices at once takes the one that is closest. Seeded, and without a clock.
    """
    sizes = _sizes(choices)
    every: Allowed = tuple(tuple(range(len(options))) for options in choices.stages)
    network = _network(choices, every, sizes)
    offered = np.concatenate([network.forward, network.backward])
    dearest = int(np.where(offered < DEAR, offered * network.counts, 0).max(axis=1).sum()) + 1
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
    """Return a bound for all choices of allowed options, the prices that it takes from each stage, and the options of
    links."""
    network = _network(choices, allowed, sizes)
    found = search_optimum(network, beams=FEW_BEAMS)
    return found.lower_bound, *_taken(choices, network, found.scheme)


def _network(choices: Choices, allowed: Allowed, sizes: Sequence[int]) -> Network:
    """Return the paper's problem, in which each direction of a stage takes the best price that any allowed choice
    has."""
    n, column = len(choices.stages), {size: q for q, size in enumerate(sizes)}
    forward: Times = np.full((2 * n - 1, len(sizes)), DEAR, np.int64)
    backward: Times = np.full((2 * n - 1, len(sizes)), DEAR, np.int64)
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
    """Return the prices that a scheme takes from each stage, and the options of links."""
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
    """Return the allowed option closest to the relaxed one: with both sizes if there is one."""
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
    """Return the allowed options of one stage in two parts: those with the forward that was taken and others; or the
    same of backwards; or the first and others."""
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
