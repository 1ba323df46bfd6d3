"""Which layers a stage's device holds, what to load next and what to drop for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

Layer = int
Needs = Mapping[Layer, int]
"""The version of each layer that a task needs: the subnet that has stepped it last, -1 for none."""


class Load(NamedTuple):
    """A layer to load, and those to drop first."""

    layer: Layer
    version: int
    dropped: tuple[Layer, ...]


class Residents:
    """The layers on one device, within a budget; it moves nothing by itself.

    Args:
        room: what there is for layers, in the unit of their sizes.
        sizes: of each layer: parameters and optimizer state.

    Attributes:
        loading: the load on its way.
        used: what the layers take that are held or on their way.
    """

    def __init__(self, room: int, sizes: Mapping[Layer, int]) -> None:
        self.room = room
        self._sizes = sizes
        self._held: dict[Layer, int] = {}  # versions, the one used longest ago first
        self._unsaved: set[Layer] = set()
        self.loading: Load | None = None
        self.used = 0

    def holds(self, layer: Layer, version: int) -> bool:
        """Whether the layer is there, whole, in this version."""
        return self._held.get(layer) == version

    def missing(self, needs: Needs) -> list[Layer]:
        """Those of a task that are not there."""
        return [layer for layer, version in needs.items() if not self.holds(layer, version)]

    def use(self, layers: Iterable[Layer]) -> None:
        """A task uses them now."""
        for layer in layers:
            self._held[layer] = self._held.pop(layer)

    def stepped(self, layer: Layer, version: int) -> None:
        """A layer that is here has a new version, which has to be saved before it is dropped."""
        self._held[layer] = version
        self._unsaved.add(layer)

    def renewed(self, layer: Layer, version: int) -> None:
        """Another stage has stepped the layer, and sent it here: a copy that is here becomes the new version."""
        if layer in self._held:
            self._held[layer] = version

    def saved(self, layer: Layer) -> None:
        """It has been copied to where layers wait."""
        self._unsaved.discard(layer)

    def begin(self, load: Load) -> None:
        """`load` is on its way."""
        for layer in load.dropped:
            del self._held[layer]
            self.used -= self._sizes[layer]
        self.loading = load
        self.used += self._sizes[load.layer]

    def abort(self) -> None:
        """The one on its way is not loaded."""
        assert self.loading is not None, "a layer was on its way"
        self.used -= self._sizes[self.loading.layer]
        self.loading = None

    def end(self) -> None:
        """The one on its way is there."""
        assert self.loading is not None, "a layer was on its way"
        self._held[self.loading.layer] = self.loading.version
        self.loading = None

    def next_load(
        self, demanded: Needs, wanted: Sequence[Needs], loadable: Callable[[Layer, int], bool]
    ) -> Load | None:
        """The next layer to load: of the task that runs or waits to run, then of those that are wanted, the first one
        first; None where nothing more fits or can be had.

        What is dropped is never of the task, and for a prediction never of one that is wanted sooner: of the rest what
        is wanted last, and of that what was used longest ago.

        Args:
            loadable: whether a version can be had where layers wait.
        """
        kept: set[Layer] = set()
        for needs in (demanded, *wanted):
            kept |= needs.keys()
            for layer in self.missing(needs):
                if not loadable(layer, needs[layer]):
                    continue
                dropped = self._dropped_for(layer, kept, wanted)
                if dropped is not None:
                    return Load(layer, needs[layer], dropped)
                return None
        return None

    def _dropped_for(self, layer: Layer, kept: set[Layer], wanted: Sequence[Needs]) -> tuple[Layer, ...] | None:
        out = [layer] if layer in self._held else []  # an old version, replaced in its place
        if out and layer in self._unsaved:
            return None
        free = self.room - self.used + sum(self._sizes[each] for each in out)
        if free >= self._sizes[layer]:
            return tuple(out)
        first: dict[Layer, int] = {}
        for at, needs in enumerate(wanted):
            for each in needs:
                first.setdefault(each, at)
        may = [each for each in self._held if each not in kept and each not in self._unsaved and each != layer]
        may.sort(key=lambda each: -first.get(each, len(wanted)))  # stable: the one used longest ago first
        for each in may:
            out.append(each)
            free += self._sizes[each]
            if free >= self._sizes[layer]:
                return tuple(out)
        return None
