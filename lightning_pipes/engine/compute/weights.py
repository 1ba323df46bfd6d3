"""Weight versions: a forward that runs ahead of an update must be differentiated with the weights that it read.

A version is a copy of the live parameters, made at the first forward after an update and never written to, so
autograd's saved tensors stay valid while the optimizer changes the live ones. Rebinding `param.data` instead gives
silently wrong gradients.

Layers that batches read late have versions by batch:

    STEP 3 -> copy 3 --.            batch 7 reads layer 0 as batch 3 has left it: forward and backward on copy 3,
    STEP 4 -> copy 4    `-> F7 B7   its gradient goes to the newest weights when its own STEP comes, after STEP 6
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from lightning_pipes.engine.compute.parts import Parts
from lightning_pipes.engine.residency.binding import Binding
from lightning_pipes.ir import Use


@dataclass(eq=False)
class Version:
    """Parameters by layer and name as they once were; they collect gradients of their own.

    Attributes:
        late: it is of some layers only and belongs to one batch, which keeps its gradients until its step.
    """

    parameters: dict[int, dict[str, nn.Parameter]]
    late: bool = False

    def binding(self, device: torch.device) -> Binding:
        """Those on `device`, which can be on the host while nothing computes with them; see `Swap`."""
        named = {f"{n}.{name}": p for n, each in self.parameters.items() for name, p in each.items()}
        return Binding.of(named, device)


class WeightVersions:
    """The versions that forwards in flight have read.

    Args:
        layers: the live layers by number.
        most: how many versions may live; with one, the live parameters are used and nothing is copied.
    """

    def __init__(self, layers: Mapping[int, nn.Module], most: int) -> None:
        self.most = most
        self._layers = layers
        self._newest: Version | None = None

    def current(self) -> Version | None:
        """The version to read now; None stands for the live parameters."""
        if self.most == 1:
            return None
        if self._newest is None:
            with torch.no_grad():
                self._newest = Version(
                    {
                        number: {
                            name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
                            for name, p in layer.named_parameters()
                        }
                        for number, layer in self._layers.items()
                    },
                )
        return self._newest

    def collect(self, versions: Iterable[Version | None]) -> None:
        """Moves the gradients of versions to the live parameters, adding to what is there."""
        for version in {id(v): v for v in versions if v is not None and not v.late}.values():
            for number, copies in version.parameters.items():
                for name, live in self._layers[number].named_parameters():
                    gradient = copies[name].grad
                    if gradient is not None:
                        live.grad = gradient if live.grad is None else live.grad + gradient
                        copies[name].grad = None

    def updated(self) -> None:
        """The live parameters have changed."""
        self._newest = None


class _Place(NamedTuple):
    """Where a parameter is: the number of its layer, its name there."""

    layer: int
    name: str
    live: nn.Parameter


class LateWeights:
    """The versions of one stage's layers, from one flush to the next.

    A layer has as many as batches under way may ask for: with a constant delay d, at most d + 1 beside the live one.

    Args:
        stage: its number.
        layers: its layers by number.
        parts: the names in them.
    """

    def __init__(self, stage: int, layers: Mapping[int, nn.Module], parts: Parts) -> None:
        self._stage, self._layers, self._parts = stage, layers, parts
        self._places: dict[str, list[_Place]] = {}
        self._copies: dict[str, deque[tuple[int, list[torch.Tensor]]]] = {}  # with the batch that has left them
        self._reads: dict[int, dict[str, int]] = {}  # of batches that have not begun
        self._latest: dict[str, int] = {}
        self._made: dict[int, Version] = {}
        self._steps: dict[int, frozenset[str]] = {}

    def enter(self, batch: int, use: Use | None) -> None:
        """The next batch uses these layers."""
        delays = () if use is None else [each for each in use.delays if each[0] in use.layers[self._stage]]
        here = {name: max(-1, batch - delay.by) for name, delay in delays}
        for name in here:
            if name not in self._places:
                self._places[name] = self._found(name)
                self._copies[name] = deque()
                self._keep(name, -1)
        self._reads[batch] = here
        self._latest |= here
        self._steps[batch] = frozenset(here)
        self._forget()

    def version(self, batch: int) -> Version | None:
        """The weights for the batch, which collect its gradients; None where it reads nothing late here."""
        reads = self._reads.pop(batch, {})
        made: dict[int, dict[str, nn.Parameter]] = {}
        for name, read in reads.items():
            tensors = [kept for left_by, kept in self._copies[name] if left_by <= read][-1]
            for place, tensor in zip(self._places[name], tensors, strict=True):
                own = nn.Parameter(tensor, requires_grad=place.live.requires_grad)
                made.setdefault(place.layer, {})[place.name] = own
        if made:
            self._made[batch] = Version(made, late=True)
        return self._made.get(batch)

    def before_step(self, batch: int) -> None:
        """Gives the gradients of the batch to the live weights."""
        version = self._made.pop(batch, None)
        if version is not None:
            for name in self._steps[batch]:
                for place in self._places[name]:
                    place.live.grad = version.parameters[place.layer][place.name].grad

    def stepped(self, batch: int) -> None:
        """The live weights are what the batch leaves."""
        for name in self._steps.pop(batch, ()):
            self._keep(name, batch)
        self._forget()

    def _found(self, name: str) -> list[_Place]:
        number = int(name.partition(".")[0])
        mine = {id(p) for p in self._parts.parameters([name])}
        return [_Place(number, at, p) for at, p in self._layers[number].named_parameters() if id(p) in mine]

    def _keep(self, name: str, batch: int) -> None:
        self._copies[name].append((batch, [place.live.detach().clone() for place in self._places[name]]))

    def _forget(self) -> None:
        """Versions that no batch will ask for: later ones never ask for older ones."""
        for name, copies in self._copies.items():
            if len(copies) > 1:
                waiting = (reads[name] for reads in self._reads.values() if name in reads)
                oldest = min(waiting, default=self._latest[name])  # who waits has asked before the latest
                while len(copies) > 1 and copies[1][0] <= oldest:
                    copies.popleft()
