"""The scheme that a search hands back, and how good it is."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipes.strategies.umpipe.network import Scheme


@dataclass(frozen=True)
class Solved:
    """A scheme that was found.

    Attributes:
        scheme: the options of all processes.
        value: what a batch takes with it, all forwards before all backwards, in the network's unit.
        lower_bound: no scheme that the search may take goes below this.
        proven: nor does any go below `value`.
    """

    scheme: Scheme
    value: int
    lower_bound: int

    @property
    def proven(self) -> bool:
        """Whether no scheme that the search may take is better."""
        return self.lower_bound >= self.value

    @property
    def gap(self) -> float:
        """How much better another scheme may be at most, as a share of the lower bound."""
        return (self.value - self.lower_bound) / max(1, self.lower_bound)
