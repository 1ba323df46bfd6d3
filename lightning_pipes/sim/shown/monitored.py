"""Curves that a monitor recorded on a rank while it trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_pipes.cost.json_files import check_json_fields
from lightning_pipes.ir import InputError


@dataclass(frozen=True)
class Curves:
    """The metrics of one rank over time.

    Attributes:
        times: seconds since the monitor began, ascending.
        values: of each metric at those times, by its name, which ends in the unit; None where it was missing.

    Raises:
        InputError: another number of values than of times, or times that do not ascend.
    """

    times: tuple[float, ...] = ()
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if list(self.times) != sorted(self.times) or not all(map(math.isfinite, self.times)):
            raise InputError("times of a curve must be finite and ascend")
        for name, values in self.values.items():
            if len(values) != len(self.times):
                raise InputError(f"{name!r} has {len(values)} values at {len(self.times)} times")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"times": self.times, "values": self.values}


def curves_of(data: object, what: str) -> Curves:
    """The curves of `Curves.data`; errors call them `what`.

    Raises:
        InputError: it is something else, or damaged.
    """
    return Curves(
        **check_json_fields(what, data, {"times": tuple[float, ...], "values": dict[str, tuple[float | None, ...]]})
    )
