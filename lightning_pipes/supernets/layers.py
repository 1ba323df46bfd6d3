"""Layers that take and give (x, subnet): choice blocks, and the ordinary layers between them.

`shared` decides how subnets share a layer that all of them use: an embedding, a head, a norm. "sequential": each subnet
steps it, one after another, as without a pipeline. "frozen": it is read and never stepped. "per_choice": each candidate
of the block that follows (of the last block, where none follows) has a copy. "delayed": each subnet steps it, and reads
it as the subnet `delay` before has left it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from lightning_pipes.ir import InputError, check_count, check_type, short_repr
from lightning_pipes.supernets.explorers import as_iterator

Sharing = Literal["sequential", "frozen", "per_choice", "delayed"]
MAX_COPIES = 2**12
"""Of a layer that each candidate of a block has for itself."""


class ChoiceBlock(nn.ModuleList):
    """Runs one of its candidates, the one that the subnet chooses; all give what the next layer takes.

    In a `Supernet` it gets a number, by which a subnet names its choice. A candidate may do nothing (`nn.Identity()`).
    """

    place = -1
    last = False

    def __init__(self, candidates: Iterable[nn.Module]) -> None:
        named = enumerate(as_iterator("candidates", candidates))
        super().__init__([check_type(f"candidates[{number}]", each, nn.Module) for number, each in named])
        if not len(self):
            raise InputError("a ChoiceBlock needs candidates to choose from, got none")

    def forward(self, given: Any) -> Any:
        x, subnet = split_input(given)
        if self.place < 0:
            raise InputError(
                "a ChoiceBlock does not know which of a subnet's choices is its own: put it into a Supernet"
            )
        if not self.place < len(subnet):
            raise InputError(
                f"a subnet of {len(subnet)} choices reaches block {self.place}; it needs one for each block, from 0. "
                "Where batches are cut into micro-batches take Subnet(choices): a plain list is cut with them"
            )
        choice = subnet[self.place]
        if not 0 <= choice < len(self):
            raise InputError(
                f"a subnet chooses candidate {choice} of block {self.place}, which has 0 to {len(self) - 1}"
            )
        y = self[choice](x)
        return y if self.last else (y, subnet)


class PerChoice(ChoiceBlock):
    """A layer that each candidate of a block has for itself; the copies are equal at the start.

    Args:
        layer: of which copies are made.
        count: of the candidates.
    """

    def __init__(self, layer: nn.Module, count: int) -> None:
        check_type("layer", layer, nn.Module)
        super().__init__(copy.deepcopy(layer) for _ in range(check_count("count", count, most=MAX_COPIES)))


class SharedLayer(nn.Module):
    """A layer that every subnet uses.

    Args:
        layer: takes x and gives x.
        shared: see above.
        delay: for "delayed", how many subnets before.

    Raises:
        InputError: there is no such way, a delay is missing or makes no sense, or a norm with running statistics is to
            be read late.
    """

    last = False

    def __init__(self, layer: nn.Module, shared: Sharing = "sequential", delay: int | None = None) -> None:
        super().__init__()
        check_type("layer", layer, nn.Module)
        check_sharing(shared, delay)
        self.layer = layer
        self.shared: Sharing = shared
        self.delay = delay if delay is None else int(delay)
        if shared == "delayed":
            for name, part in layer.named_modules():
                if getattr(part, "track_running_stats", False):
                    raise InputError(
                        f"{name or 'the layer'} is a {type(part).__name__} and can't be read late: its running "
                        "statistics change in every forward. Take shared='sequential' or 'per_choice' for it, "
                        "track_running_stats=False, or a LayerNorm or GroupNorm"
                    )
        if shared == "frozen":
            layer.requires_grad_(False)
            self.train(self.training)

    def forward(self, given: Any) -> Any:
        x, subnet = split_input(given)
        y = self.layer(x)
        return y if self.last else (y, subnet)

    def train(self, mode: bool = True) -> SharedLayer:
        """Set the mode as for any module; in a frozen layer, parts that keep statistics stay in evaluation mode."""
        super().train(mode)
        if self.shared == "frozen":
            for part in self.layer.modules():
                if next(part.buffers(recurse=False), None) is not None:
                    part.training = False
        return self


def check_sharing(shared: object, delay: object) -> None:
    """Refuse an unknown way to share a layer, and a delay that is out of range for it.

    Raises:
        InputError: it is one.
    """
    check_type("shared", shared, Sharing)
    if (shared == "delayed") != (delay is not None):
        raise InputError(
            f"shared={shared!r} with delay={short_repr(delay)}: a delay belongs to shared='delayed', which needs one: "
            "as many subnets as shall be under way at once, such as 8"
        )
    if delay is not None:
        check_count("delay", delay, "; subnets between a step and its reader")


def split_input(given: Any) -> tuple[Any, Any]:
    """Return x and the subnet.

    Raises:
        InputError: it is another thing.
    """
    if not isinstance(given, tuple) or len(given) != 2 or not hasattr(given[1], "__getitem__"):
        raise InputError(
            f"a layer of a Supernet takes (x, subnet), got {short_repr(type(given).__name__)}; call it as net((x, "
            "subnet))"
        )
    return given


def has_state(layer: nn.Module) -> bool:
    """Return whether the layer has parameters or buffers, so that the order of its users may matter."""
    return any(True for _ in (*layer.parameters(), *layer.buffers()))
