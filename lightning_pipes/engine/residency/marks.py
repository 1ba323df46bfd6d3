"""Detects changes of parameters since a mark."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class ChangeMarks:
    """A record of parameters' versions at one moment.

    Args:
        values: compare values, too: torch does not count changes of `p.data`.
        moved: the parameters move between host and device, which torch counts as changes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter] = (), values: bool = False, moved: bool = False) -> None:
        self._parameters, self._moved = parameters, moved
        self._seen = self._look()
        self._values = [_sums(p, moved) for p in parameters] if values else None

    def find_change(self) -> tuple[nn.Parameter, str] | None:
        """Return one parameter that has changed since then, with the changed property in words; None if none has."""
        if (now := self._look()) != self._seen:
            at, (before, after) = next(
                (n, pair) for n, pair in enumerate(zip(self._seen, now, strict=True)) if pair[0] != pair[1]
            )
            return self._parameters[at], "the values" if before[1] == after[1] else "requires_grad"
        for p, sums in zip(self._parameters, self._values or (), strict=False):
            if not torch.equal(sums, _sums(p, self._moved)):
                return p, "the values"
        return None

    def _look(self) -> list[tuple[int, bool]]:
        return [(0 if self._moved else p._version, p.requires_grad) for p in self._parameters]


def _sums(p: nn.Parameter, on_host: bool) -> torch.Tensor:
    """Return two numbers that identify the values of a parameter; they depend on the device that computes them."""
    values = p.detach().cpu() if on_host else p.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values if values.is_floating_point() else values.double()
    return torch.nan_to_num(torch.stack((values.sum(), torch.linalg.vector_norm(values))))
