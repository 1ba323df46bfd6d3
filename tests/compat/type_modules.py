"""LightningModules whose layers return objects, tensors with attributes, and tensors of a subclass."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

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
    """An object that refers to itself, and defines its own pickled state."""

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
    """A module whose layers return tensors with an attribute, or tensors of a subclass."""

    def __init__(self, subclass: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(*(ScalingLayer(subclass) for _ in range(4)), nn.Linear(WIDTH, 3))


class Graphs:
    """Several graphs merged into one, as in graph libraries."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._store = tensors

    def __getattr__(self, name: str) -> Any:
        store = self.__dict__.get("_store", {})
        if name not in store:
            raise AttributeError(name)
        return store[name]

    def to(self, device: Any, non_blocking: bool = False) -> Graphs:
        return Graphs(**{key: tensor.to(device) for key, tensor in self._store.items()})


def merged_graphs(as_dict: bool, rows: int) -> DataLoader[Any]:
    """Return batches of merged graphs with 2, 3, 4, 2, ... nodes. Each graph is a circle."""

    def merge(samples: list[Any]) -> Any:
        edges, owners, first = [], [], 0
        for number, (x, _) in enumerate(samples):
            nodes = torch.arange(len(x))
            edges.append(first + torch.stack([nodes, nodes.roll(1)]))
            owners += [number] * len(x)
            first += len(x)
        tensors = {
            "x": torch.cat([x for x, _ in samples]),
            "edge_index": torch.cat(edges, 1),
            "batch": torch.tensor(owners),
            "y": torch.tensor([y for _, y in samples]),
        }
        return tensors if as_dict else Graphs(**tensors)

    values = torch.randn(rows, 4, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    samples = [(x[: 2 + number % 3], number % 3) for number, x in enumerate(values)]
    return DataLoader(samples, batch_size=4, collate_fn=merge)  # type: ignore[arg-type]


class Convolution(nn.Module):
    """A layer that adds the values of neighboring nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any, edge_index: Any = None) -> Any:
        x, edges = inputs if edge_index is None else (inputs, edge_index)
        source, target = edges
        x = x + torch.tanh(self.linear(x)).index_add(0, target, x[source])
        return (x, edges) if edge_index is None else x


class ConvolvesGraphs(pl.LightningModule):
    """A graph network whose layers are in a ModuleList, called in a loop, or in an nn.Sequential."""

    def __init__(self, loop: bool) -> None:
        super().__init__()
        layers = [Convolution() for _ in range(4)]
        self.model = nn.ModuleList(layers) if loop else nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, 3)

    def loss(self, batch: Any) -> torch.Tensor:
        x, edges, owner, y = (
            [batch[key] for key in ("x", "edge_index", "batch", "y")]
            if isinstance(batch, dict)
            else (batch.x, batch.edge_index, batch.batch, batch.y)
        )
        if isinstance(self.model, nn.Sequential):
            x, _ = self.model((x, edges))
        else:
            for layer in self.model:
                x = layer(x, edges)
        sums = x.new_zeros(len(y), WIDTH).index_add(0, owner, x)
        return nn.functional.cross_entropy(self.head(sums), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val", self.loss(batch), batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def graph_loaders(as_dict: bool, validates: bool = True) -> dict[str, Any]:
    return {
        "train_dataloaders": merged_graphs(as_dict, 10),
        "val_dataloaders": merged_graphs(as_dict, 6) if validates else None,
    }
