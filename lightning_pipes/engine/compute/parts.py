"""The layers of a stage, and what is in them, by the names under which batches say what they use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from lightning_pipes.ir import PlanError, Use


class Parts:
    """Parameters by name: "5" are those of layer number 5, "5.2" those of what it calls 2.

    Args:
        stage: its number.
        layers: its layers, by their number in the whole model.
    """

    def __init__(self, stage: int, layers: Mapping[int, nn.Module]) -> None:
        self._stage = stage
        self._layers = dict(layers)
        self._found: dict[str, tuple[nn.Parameter, ...]] = {}

    def check(self, use: Use) -> None:
        """Refuses names that are not here.

        Raises:
            PlanError: there is one.
        """
        for name in use.layers[self._stage] if len(use.layers) > self._stage else ():
            self._of(name)

    def parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        """The parameters under these names, each once."""
        return list({id(p): p for name in sorted(names) for p in self._of(name)}.values())

    def only_read(self, use: Use | None) -> frozenset[int]:
        """The ids of the parameters which a batch uses and does not step."""
        if use is None or use.steps is None:
            return frozenset()
        stepped = {id(p) for p in self.parameters(use.stepped(self._stage))}
        return frozenset(id(p) for p in self.parameters(use.layers[self._stage]) if id(p) not in stepped)

    def _of(self, name: str) -> tuple[nn.Parameter, ...]:
        if name not in self._found:
            number, _, part = name.partition(".")
            try:
                self._found[name] = tuple(self._layers[int(number)].get_submodule(part).parameters())
            except (KeyError, ValueError, AttributeError):
                raise PlanError(
                    f"a batch uses layer {name!r} on stage {self._stage}, which has no such layer, or no such part of "
                    f"one: its layers are {', '.join(map(str, self._layers)) or 'none'}"
                ) from None
        return self._found[name]
