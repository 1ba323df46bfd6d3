"""The units of a step so far, in a form that travels: what a later stage needs to pass over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lightning_pipes.trainer.units.trees import TemplateLeaf


@dataclass(frozen=True)
class KnownValue(TemplateLeaf):
    """Stands for a tensor that has a key already."""

    key: int


@dataclass(frozen=True)
class KnownPure(TemplateLeaf):
    """Stands for a tensor that every stage computes, by its number."""

    number: int


@dataclass(frozen=True)
class Made(TemplateLeaf):
    """Stands for a tensor that a unit makes.

    Attributes:
        key: of the value.
        on_host: whether it is on the CPU, whatever the device of the stage is.
    """

    key: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool


@dataclass(frozen=True)
class KnownWeight(TemplateLeaf):
    """Stands for a parameter that a unit returns as it is, by its name in the user's module."""

    name: str


class Done(NamedTuple):
    """A unit that has run.

    Attributes:
        pure: every stage runs it; else only one does.
        out: what it returned, with TemplateLeaf for tensors; plain values are decisions.
        written: numbers of pure tensors that it has changed, each with the key that it has from then on.
        draws: how many of its calls drew random numbers.
    """

    name: str
    pure: bool = True
    out: Any = None
    written: tuple[tuple[int, int], ...] = ()
    draws: int = 0


@dataclass
class Trace:
    """The units before a border, and the values that cross it.

    Attributes:
        units: all units before the border, in order.
        keys: of the values, in the order in which these are sent.
        shared: groups of keys whose values share memory on the sender.
    """

    units: list[Done] = field(default_factory=list)
    keys: tuple[int, ...] = ()
    shared: tuple[tuple[int, ...], ...] = ()

    def __eq__(self, other: object) -> bool:  # a leaf of messages, never compared by content
        return self is other

    __hash__ = None  # type: ignore[assignment]
