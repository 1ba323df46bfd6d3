"""A copier on a virtual clock, and a minimal object with one tensor, for tests of swapping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lightning_pipes.engine.residency.copier import Way
from tests.sim.virtual_copier import VirtualCopier


class Virtual:
    """A copier that copies immediately and reports the time that the copy takes on an emulated link.

    Tests advance the clock of the link for computations.
    """

    def __init__(self, bandwidth: float = 1e9) -> None:
        self.link = VirtualCopier(bandwidth)

    def copy(self, way: Way, target: torch.Tensor, source: torch.Tensor, after: Iterable[int] = ()) -> int:
        target.copy_(source)
        if way == "in":
            return self.link.load(None, source.numel(), max(after, default=None))
        return self.link.store(None, source.numel())

    def mark_computation(self) -> None:
        return None

    def is_done(self, ticket: int) -> bool:
        return self.link.is_done(ticket)

    def order_after(self, ticket: int) -> int:
        return self.link.wait(ticket)

    def wait(self, ticket: int) -> None:
        self.link.wait(ticket)

    @property
    def bandwidth(self) -> float | None:
        return None

    def close(self) -> int:
        return 0


class Plain:
    """The owner of one tensor, which the swap moves."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def check(self) -> None:
        pass

    def named_tensors(self) -> dict[str, torch.Tensor]:
        return {"x": self.x}

    def bind_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.x = tensors["x"]
