"""Detects changes of parameters since a mark."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

_SEEN = attrgetter("_version", "requires_grad")


class ChangeMarks:
    """A record of parameters' versions at one moment.

    Args:
        values: compare values, too: torch does not count changes of `p.data`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter] = (), values: bool = False) -> None:
        self._parameters = parameters
        self._seen = list(map(_SEEN, parameters))
        self._values = [_sums(p) for p in parameters] if values else None

    def find_change(self) -> tuple[nn.Parameter, str] | None:
        """Return one parameter that has changed since then, with the changed property in words; None if none has."""
        if (now := list(map(_SEEN, self._parameters))) != self._seen:
            at, (before, after) = next(
                (n, pair) for n, pair in enumerate(zip(self._seen, now, strict=True)) if pair[0] != pair[1]
            )
            return self._parameters[at], "the values" if before[1] == after[1] else "requires_grad"
        for p, sums in zip(self._parameters, self._values or (), strict=False):
            if not torch.equal(sums, _sums(p)):
                return p, "the values"
        return None


def _sums(p: nn.Parameter) -> torch.Tensor:
    """Return two numbers that identify the values of a parameter."""
    values = p.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values if values.is_floating_point() else values.double()
    return torch.nan_to_num(torch.stack((values.sum(), torch.linalg.vector_norm(values))))
