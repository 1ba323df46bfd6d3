"""Consecutive layers of an nn.Sequential that one stage runs together, as one unit."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from typing import NamedTuple

from torch import nn


class SequentialSlices(NamedTuple):
    """The slices of an nn.Sequential that a step calls as a whole. Each slice is one unit.

    Attributes:
        container: the path of the nn.Sequential.
        layers: the paths of its layers.
        cuts: the first layer of each slice.
    """

    container: str
    layers: tuple[str, ...]
    cuts: tuple[int, ...]

    @property
    def units(self) -> dict[str, range]:
        """The numbers of the layers of each slice, by the name of the unit."""
        return {f"{self.container}[{a}:{b}]": range(a, b) for a, b in pairwise((*self.cuts, len(self.layers)))}

    def modules(self, root: nn.Module) -> dict[str, nn.Sequential]:
        """Return the layers of each slice as a module, by the name of the unit."""
        layers = [root.get_submodule(path) for path in self.layers]
        return {
            name: nn.Sequential(OrderedDict((str(n), layers[n]) for n in numbers))
            for name, numbers in self.units.items()
        }
