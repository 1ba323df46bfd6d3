"""Layers with (x, subnet) as input and output: choice blocks, and the ordinary layers between them.

The argument `shared` specifies how subnets share a layer that all of them use, such as an embedding, a head or a norm:

- "sequential": each subnet steps the layer, one after another, as without a pipeline.
- "frozen": the layer is only read and never stepped.
- "per_choice": each candidate of the next block has its own copy of the layer. If no block follows, each candidate of
  the last block has one.
- "delayed": each subnet steps the layer, and reads the weights that the subnet `delay` positions earlier left.
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
"""The largest number of copies of a layer with shared="per_choice"."""


class ChoiceBlock(nn.ModuleList):
    """Run the candidate that the subnet chooses. All candidates must return a valid input of the next layer.

    A `Supernet` numbers its blocks, and a subnet contains one choice per number. A candidate may do nothing
    (`nn.Identity()`).

    Args:
        candidates: the modules from which a subnet chooses one.

    Attributes:
        place: the number of the block in its `Supernet`, or -1 outside of one.
        last: whether this is the last layer, which returns only the output and not the subnet.

    Raises:
        InputError: there are no candidates, or one of them is not a module.
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
                "a ChoiceBlock outside of a Supernet has no position in the choices of a subnet; put it into a Supernet"
            )
        if not self.place < len(subnet):
            raise InputError(
                f"a subnet of {len(subnet)} choices reaches block {self.place}; it needs one for each block, from 0. "
                "If batches are cut into micro-batches, use Subnet(choices), because a plain list is cut with them"
            )
        choice = subnet[self.place]
        if not 0 <= choice < len(self):
            raise InputError(
                f"a subnet chooses candidate {choice} of block {self.place}, which has 0 to {len(self) - 1}"
            )
        y = self[choice](x)
        return y if self.last else (y, subnet)


class PerChoice(ChoiceBlock):
    """A layer of which each candidate of a block has its own copy. All copies are equal at the start.

    Args:
        layer: the layer to copy.
        count: the number of candidates.
    """

    def __init__(self, layer: nn.Module, count: int) -> None:
        check_type("layer", layer, nn.Module)
        super().__init__(copy.deepcopy(layer) for _ in range(check_count("count", count, most=MAX_COPIES)))


class SharedLayer(nn.Module):
    """A layer that every subnet uses.

    Args:
        layer: the module, which maps x to the next x.
        shared: how subnets share the layer, as described at the top of this module.
        delay: for "delayed", the number of subnets between a step of the layer and the subnet that reads the result.

    Attributes:
        last: whether this is the last layer, which returns only the output and not the subnet.

    Raises:
        InputError: `shared` is unknown, `delay` is missing or invalid, or a norm with running statistics would be read
            with a delay.
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
        """Set the mode as for any other module, but keep the buffers of a frozen layer constant.

        Parts of a frozen layer that have buffers, such as running statistics, stay in evaluation mode.
        """
        super().train(mode)
        if self.shared == "frozen":
            for part in self.layer.modules():
                if next(part.buffers(recurse=False), None) is not None:
                    part.training = False
        return self


def check_sharing(shared: object, delay: object) -> None:
    """Check `shared`, and whether `delay` is valid for it.

    Raises:
        InputError: one of them is invalid.
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
        InputError: `given` is not a pair of an input and a subnet.
    """
    if not isinstance(given, tuple) or len(given) != 2 or not hasattr(given[1], "__getitem__"):
        raise InputError(
            f"a layer of a Supernet takes (x, subnet), got {short_repr(type(given).__name__)}; call it as net((x, "
            "subnet))"
        )
    return given


def has_state(layer: nn.Module) -> bool:
    """Return whether the layer has parameters or buffers.

    If it has, the order of the subnets that use it may matter.
    """
    return any(True for _ in (*layer.parameters(), *layer.buffers()))
