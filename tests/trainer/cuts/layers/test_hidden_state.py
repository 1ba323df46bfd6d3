"""Tests of tensors that layers leave in shared objects: which ones are refused, and which are allowed."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_pipes.engine import FailureWatch
from lightning_pipes.ir import Span
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.cuts.layers.hidden_state import HiddenState
from lightning_pipes.trainer.loop.connections import Connections
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.holdings import Holdings
from lightning_pipes.trainer.ranks.ranks import Grid


class Doing(nn.Linear):
    """A layer that calls a function with an object that it holds."""

    def __init__(self, thing: Any, do: Any) -> None:
        super().__init__(2, 2)
        self.thing = thing
        self.do = do

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.do(self.thing, x)
        return super().forward(x)


class Object:
    def __init__(self) -> None:
        self.inside = SimpleNamespace(deep=[{}])


def nothing(*args: Any) -> None:
    pass


def keep(thing: Any, x: torch.Tensor) -> None:
    thing.kept = 2 * x


def keep_constant(thing: Any, x: torch.Tensor) -> None:
    thing.kept = torch.ones(3)


def keep_deep(thing: Any, x: torch.Tensor) -> None:
    thing.inside.deep[0]["a"] = (x,)


def pop(thing: Any, x: torch.Tensor) -> None:
    thing.inside.deep[0].pop("a")


def normalise(thing: Any, x: torch.Tensor) -> None:
    thing.train()(x)


def both(thing: Any, first: Any = nothing, second: Any = nothing) -> Any:
    """Return a function that makes a module of two layers with a common object."""

    def make() -> pl.LightningModule:
        module, own = pl.LightningModule(), thing()
        module.model = nn.Sequential(Doing(own, first), Doing(own, second))
        return module

    return make


def with_outside(first: Any = nothing) -> Any:
    """Return a function that makes a module whose first layer shares an object with the code around the layers."""

    def make() -> pl.LightningModule:
        module = both(Object, first)()
        module.model[1].thing = None
        module.seen = [module.model[0].thing]
        return module

    return make


def itself() -> pl.LightningModule:
    module = both(Object, lambda thing, x: keep(module.model[0], x))()
    module.model[0].thing = module.model[1].thing = None
    return module


CASES: dict[str, tuple[Any, bool, Any]] = {  # module, whether it is trained, action before the layers
    "keeps": (both(Object, keep), True, nothing),
    "keeps deep inside": (both(Object, keep_deep), True, nothing),
    "keeps in evaluation": (both(Object, keep), False, nothing),
    "keeps in a submodule": (both(nn.ReLU, keep), True, nothing),
    "fails": (both(Object, keep_deep, pop), False, nothing),
    "a table": (both(Object, keep_constant, keep_constant), True, nothing),
    "averages": (both(lambda: nn.BatchNorm1d(2), normalise, normalise), True, nothing),
    "the step": (with_outside(), False, lambda module: keep(module.model[0].thing, torch.ones(3))),
    "for the step": (with_outside(keep), True, nothing),
    "itself": (itself, True, nothing),
    "a shared activation": (both(nn.ReLU), True, nothing),
}


def found_on(rank: int) -> dict[str, str]:
    """Return the error or warning of each case on this rank."""
    dist.init_process_group("gloo")
    watch = FailureWatch(None, rank)
    control = Control((0, 1), watch, timedelta(seconds=20))
    holdings = Holdings(Grid(1, 2, rank), (0, 1), (Span(0, 1), Span(1, 2)))
    found = {}
    for name, (make, training, step) in CASES.items():
        torch.manual_seed(0)
        module = make()
        hidden = HiddenState(module, "model", holdings, control, Connections(watch).check_later)
        number = 1 - rank
        found[name] = ""
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                with nullcontext() if training else torch.no_grad(), hidden.batch(training):
                    step(module)
                    try:
                        with hidden.layer(number, module.model[number]):
                            module.model[number](torch.full((3, 2), rank + 1.0, requires_grad=training))
                    except Exception as error:
                        found[name] = f"{type(error).__name__}: {error}"
            except Exception as error:
                found[name] = found[name] or f"together, {type(error).__name__}: {error}"
        found[name] = found[name] or " ".join(f"warning: {w.message}" for w in warned)
    return found


@cache
def found() -> list[dict[str, str]]:
    return run_ranks(found_on, 2, timeout=30)


WAY_OUT = ".*each process has its own copy of it. Pass the tensor along: let layers take and return tuples or dicts"
HERE = r"^PipelineError: layer 0 \(rank 1\) left a tensor of shape \(3, 2\) in self.model.0.thing"


@pytest.mark.parametrize(
    ("case", "rank", "message"),
    [
        ("keeps", 1, HERE + r".kept, which layer 1 \(rank 0\) may read; " + WAY_OUT),
        (
            "keeps deep inside",
            1,
            HERE + r".inside.deep\[0\]\['a'\]\[0\], which layer 1 \(rank 0\) may read; " + WAY_OUT,
        ),
        ("keeps in a submodule", 1, HERE + r".kept, which layer 1 \(rank 0\)"),
        ("keeps in evaluation", 0, r"^together, PipelineError: a layer on rank 1 left .*thing.kept, which layer 0"),
        ("keeps in evaluation", 1, r"^together, PipelineError: a layer on rank 1 left .*thing.kept, which layer 0"),
        (
            "fails",
            0,
            r"^PipelineError: layer 1 \(rank 0\) ended with KeyError: 'a'. If it looks for .* layer 0 \(rank 1",
        ),
        ("averages", 0, r"^together, .* rank 0 and one on rank 1 left .*thing.running_mean, which"),
        (
            "the step",
            0,
            r"^together, PipelineError: the code around the layers left .* self.model.0.thing.kept, which",
        ),
    ],
)
def test_refused(case, rank, message):
    """Check the error of each case on one rank."""
    assert re.search(message, found()[rank][case]), found()[rank][case]


@pytest.mark.parametrize("case", ["a table", "a shared activation", "for the step", "itself"])
def test_let_alone(case):
    """Check the cases that are allowed.

    Values that the code after the layers may read are transferred, see state/left_values.py.
    """
    assert [on_rank[case] for on_rank in found()] == ["", ""]
