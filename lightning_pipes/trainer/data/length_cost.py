"""The cost of sequences by their lengths, and the division of sorted sequences into groups of equal cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

MEASURED_LENGTHS = (1, 2, 4)
"""The lengths for which the cost is measured, as divisors of the longest sequence."""
MAX_GROUP_BORDERS = 128
"""The largest number of places between sorted sequences that are considered as borders of micro-batches."""
_SLACKS = (1.0, 1.05, 1.1, 1.2, 1.5, 2.0, float("inf"))
"""The sizes to which the largest micro-batch is limited, relative to its smallest possible size."""
_MIN_LINEAR_SHARE = 0.01
"""The smallest share of the largest time of a token that does not depend on the length of its sequence."""


@dataclass(frozen=True)
class LengthCost:
    """The cost of a sequence by its length: `n * (1 + growth * n)` for n tokens.

    The second term is due to attention, which compares all pairs of tokens.

    Attributes:
        growth: the cost of a token per token of its sequence, relative to the cost of a token without attention.
        longest: the largest number of tokens that was measured. 0 if the cost was not measured.
    """

    growth: float = 0.0
    longest: int = 0

    @classmethod
    def from_times(cls, seconds: Mapping[int, float]) -> LengthCost:
        """Return the cost that fits measured times.

        Args:
            seconds: the seconds for each token, by the length of the sequences; at least two lengths.
        """
        lengths = [*seconds]
        slope, start = np.polyfit(lengths, [seconds[n] for n in lengths], 1)
        linear = max(start, _MIN_LINEAR_SHARE * max(seconds.values()))
        return cls(max(0.0, float(slope)) / float(linear) if linear > 0 else 0.0, max(lengths))

    def with_longer(self, times: Iterable[tuple[int, float]]) -> LengthCost:
        """Return the cost that also fits the times of longer sequences.

        The times of sequences up to `longest` show how many seconds a unit of this cost takes. The times of longer
        sequences count as one measurement, which is a median.

        Args:
            times: pairs of the length of sequences and the seconds for each token. Some lengths are at most `longest`,
                and others are greater.
        """
        units = [(n, seconds / (1.0 + self.growth * n)) for n, seconds in times]
        longer = [(n, unit) for n, unit in units if n > self.longest]
        factor = median(unit for _, unit in longer) / median(unit for n, unit in units if n <= self.longest)
        tokens = {max(1, self.longest // divisor): 1.0 for divisor in MEASURED_LENGTHS}
        tokens[round(median(n for n, _ in longer))] = factor
        found = LengthCost.from_times({n: unit * (1.0 + self.growth * n) for n, unit in tokens.items()})
        return replace(found, longest=max(n for n, _ in longer))

    def of(self, lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the cost of one sequence of each length."""
        return lengths * (1.0 + self.growth * lengths)


TOKENS_COST = LengthCost()
"""The cost of sequences if times are not measured: the number of tokens."""


def divide_lengths(
    lengths: np.ndarray[Any, Any], count: int, stages: int, least: int = 1, cost: LengthCost = TOKENS_COST
) -> list[int]:
    """Return the ends of the groups into which sorted sequences are divided.

    All sequences of a group are padded to the longest one. With costs c of the groups, a pipeline of p stages takes
    sum(c) + (p - 1) * max(c), up to a factor (DynaPipe, section 4). The groups minimize this.

    Args:
        lengths: the number of tokens of each sequence, in descending order.
        count: the number of groups, at most the number of sequences.
        stages: the number of stages.
        least: the smallest number of sequences in a group.
        cost: the cost of a sequence by its length.
    """
    rows = len(lengths)
    n_places = max(min(rows, MAX_GROUP_BORDERS), count) if least < 2 else rows
    places = np.unique(np.linspace(0, rows, n_places + 1).round().astype(int))
    costs = (places[None, :] - places[:, None]) * cost.of(np.append(lengths, 0)[places])[:, None]
    costs[places[None, :] - places[:, None] < least] = np.inf
    smallest = _find_groups(costs, count, np.maximum)[0]
    found = []
    for slack in _SLACKS:
        limited = np.where(costs <= smallest * slack, costs, np.inf)
        total, borders = _find_groups(limited, count, np.add)
        largest = max(costs[a, b] for a, b in zip((0, *borders[:-1]), borders, strict=True))
        found.append((total + (stages - 1) * largest, borders))
    return [int(places[border]) for border in min(found)[1]]


def _find_groups(costs: np.ndarray[Any, Any], count: int, combine: Callable[..., Any]) -> tuple[float, list[int]]:
    """Return the smallest combined cost of `count` consecutive groups, and the ends of the groups.

    Args:
        costs: the cost of a group from each place to each place; infinity if there is no such group.
        count: the number of groups.
        combine: combines the cost of groups with the cost of one more group.
    """
    best, choices = costs[0], []
    for _ in range(count - 1):
        table = combine(best[:, None], costs)
        choices.append(table.argmin(0))
        best = table.min(0)
    ends = [len(costs) - 1]
    for choice in reversed(choices):
        ends.append(int(choice[ends[-1]]))
    return float(best[-1]), ends[::-1]
