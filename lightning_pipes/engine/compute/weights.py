"""Weight versions: a forward that runs ahead of an update must be differentiated with the weights that it read.

A version is a copy of the live parameters, made at the first forward after an update and never written to, so
autograd's saved tensors stay valid while the optimizer changes the live ones. Rebinding `param.data` instead gives
silently wrong gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lightning_pipes.engine.residency.binding import Binding


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
