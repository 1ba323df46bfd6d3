"""LightningModules whose layers return objects, tensors with attributes, and tensors of a subclass."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.trainer.lit import WIDTH, Lit


@dataclass
class Output:
    y: Any
    aux: Any
    name: str = "output"


@dataclass(frozen=True, slots=True)
class FrozenOutput:
    y: Any
    aux: Any


class EntryList(list[Any]):
    pass


class State:
    """An object that refers to itself, and pickles what it wants to."""

    def __init__(self, y: Any, aux: Any) -> None:
        self.y, self.aux, self.owner = y, aux, self

    def __getstate__(self) -> Any:
        return {"both": (self.y, self.aux), "owner": self.owner}

    def __setstate__(self, state: Any) -> None:
        (self.y, self.aux), self.owner = state["both"], state["owner"]
        assert self.owner is self


Make = Callable[[Any, Any], Any]
Read = Callable[[Any], tuple[Any, Any]]
TYPES: dict[str, tuple[Make, Read]] = {
    "a dataclass": (Output, lambda out: (out.y, out.aux)),
    "a frozen dataclass with slots": (FrozenOutput, lambda out: (out.y, out.aux)),
    "a subclass of list": (lambda y, aux: EntryList([y, aux]), lambda out: (out[0], out[1])),
    "a UserDict": (lambda y, aux: UserDict(y=y, aux=aux), lambda out: (out["y"], out["aux"])),
    "an object that refers to itself": (State, lambda out: (out.y, out.aux)),
    "dataclasses, lists and objects in each other": (
        lambda y, aux: [Output(EntryList([y]), {"a": State(aux, 3)})],
        lambda out: (out[0].y[0], out[0].aux["a"].y),
    ),
}


class TypedLayer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        make, read = TYPES[self.kind]
        y, aux = read(x)
        y = self.linear(y).tanh()
        return make(y, aux + y.pow(2).mean(1))


class ReturnsType(Lit):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.model = nn.Sequential(*(TypedLayer(kind) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        make, read = TYPES[self.kind]
        y, aux = read(self.model(make(x, torch.zeros(len(x), dtype=x.dtype))))
        return self.head(y) + aux[:, None]


class Marked(torch.Tensor):
    pass


class ScalingLayer(nn.Module):
    def __init__(self, subclass: bool) -> None:
        super().__init__()
        self.subclass = subclass
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        scale = getattr(x, "scale", 1.0)
        y = self.linear(x).tanh() * scale
        if self.subclass:
            return y.as_subclass(Marked)
        y.scale = scale * 1.1
        return y


class ReturnsMarked(Lit):
    """Layers return tensors with an attribute, or of a subclass."""

    def __init__(self, subclass: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(*(ScalingLayer(subclass) for _ in range(4)), nn.Linear(WIDTH, 3))
