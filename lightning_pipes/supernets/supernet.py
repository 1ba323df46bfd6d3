"""Supernets in plain torch: an nn.Sequential in which some layers have several candidates.

    net = Supernet(nn.Linear(64, 32), ChoiceBlock([A(), B()]), ChoiceBlock([A(), nn.Identity()]), nn.Linear(32, 10))
    y = net((x, subnet))  # runs the candidate of each block that the subnet chooses

`measure_layer_costs` measures the times of candidates. `bulk_synchronous` returns the order of systems that flush
between bulks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.profiler import profile_layers
from lightning_pipes.ir import Delayed, InputError, check_count, check_type, short_repr
from lightning_pipes.supernets.layers import ChoiceBlock, PerChoice, SharedLayer, Sharing, check_sharing, has_state
from lightning_pipes.supernets.subnet import SearchSpace, Subnet

Choices = Subnet | Sequence[int]


class Supernet(nn.Sequential):
    """An nn.Sequential that maps (x, subnet) to y. Its layers pass the subnet on, and the last layer drops it.

    Blocks are numbered in their order, starting at 0. An ordinary layer is wrapped in a `SharedLayer` with `shared` and
    `delay`, unless it already is a `SharedLayer`. x may be a tensor, or a tuple or dict of tensors.

    In a pipeline, the LightningModule must return the layers that a batch uses:

        def layers_of_batch(self, batch):
            return self.net.layers_of(batch[-1])

    Args:
        layers: choice blocks, `SharedLayer` modules and ordinary layers, or a single OrderedDict of them.
        shared: how subnets share ordinary layers; see `lightning_pipes.supernets.layers`. The default gives the result
            of training one subnet after another, but each subnet waits for the one before. With the other values,
            subnets can overlap.
        delay: the delay for shared="delayed".

    Attributes:
        space: the search space of all subnets.

    Raises:
        InputError: there is no choice block, a block occurs twice or inside an ordinary layer, or `SharedLayer` rejects
            a layer.
    """

    def __init__(
        self,
        *layers: nn.Module | OrderedDict[str, nn.Module],
        shared: Sharing = "sequential",
        delay: int | None = None,
    ) -> None:
        check_sharing(shared, delay)
        given = layers[0] if len(layers) == 1 and isinstance(layers[0], OrderedDict) else None
        named: dict[str, Any] = dict(given) if given is not None else {str(n): m for n, m in enumerate(layers)}
        super().__init__(OrderedDict(_wrap_layers(named, shared, delay)))
        blocks = self.blocks
        if not blocks:
            raise InputError("a Supernet needs a ChoiceBlock among its layers, got none; nn.Sequential does without")
        for number, block in enumerate(blocks.values()):
            block.place = number
        for block, layer in _pair_with_blocks(self._modules):
            if isinstance(layer, PerChoice):
                layer.place = block.place
        self._last().last = True
        self._shares = _SharedState(self._modules)
        self.space = SearchSpace.from_sizes([len(block) for block in blocks.values()])

    def __getitem__(self, index: int | slice) -> Any:
        """Return a layer, or for a slice, a plain nn.Sequential of renumbered layers."""
        return nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)

    def _last(self) -> Any:
        return self[len(self) - 1]

    @property
    def blocks(self) -> dict[str, ChoiceBlock]:
        """The choice blocks, by the names of their layers."""
        found = {n: m for n, m in self._modules.items() if isinstance(m, ChoiceBlock) and not isinstance(m, PerChoice)}
        return found

    def layers_of(self, subnet: Choices) -> dict[str, bool | Delayed]:
        """Return the layers that a batch of this subnet uses, for `layers_of_batch`.

        In the names, "5.2" is candidate 2 of layer 5. The value is True if the batch steps the layer, False if it only
        reads the layer, and a Delayed if it steps the layer but reads it with a delay. Layers without state are
        omitted.

        Raises:
            InputError: the subnet has an invalid choice, or uses a layer twice because several blocks share it.
        """
        choices = self.space.check(subnet.choices if isinstance(subnet, Subnet) else subnet)
        found: dict[str, bool | Delayed] = {}
        for name, layer in self._modules.items():
            if isinstance(layer, ChoiceBlock):
                part = f"{name}.{choices[layer.place]}"
                if part in self._shares.stateful:
                    found[name if name in self._shares.within else part] = True
                    self._shares.check(part, name, choices, self._modules)
            elif isinstance(layer, SharedLayer) and name in self._shares.stateful:
                late = Delayed(layer.delay) if layer.delay is not None else True
                found[name] = False if layer.shared == "frozen" else late
        return found

    def extract_subnet(self, subnet: Choices) -> nn.Sequential:
        """Return the layers of one subnet as a module that maps x to y. They are the layers themselves, not copies."""
        choices = self.space.check(subnet.choices if isinstance(subnet, Subnet) else subnet)
        return nn.Sequential(*(m[choices[m.place]] if isinstance(m, ChoiceBlock) else m.layer for m in self))  # type: ignore[arg-type]


def _wrap_layers(named: Mapping[str, nn.Module], shared: Sharing, delay: int | None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers by name, with ordinary layers wrapped as shared layers."""
    seen: set[int] = set()
    made: dict[str, nn.Module] = {}
    for name, layer in named.items():
        check_type(f"layer {name}", layer, nn.Module)
        if isinstance(layer, ChoiceBlock):
            if id(layer) in seen:
                raise InputError(
                    f"layer {name} is a ChoiceBlock that occurs before; give each place a block of its own"
                )
            seen.add(id(layer))
            made[name] = layer
            continue
        if any(isinstance(part, ChoiceBlock) for part in layer.modules()):
            raise InputError(
                f"layer {name}, a {type(layer).__name__}, has a ChoiceBlock inside; a Supernet chooses between its own "
                "layers only: make the block one of them"
            )
        made[name] = layer if isinstance(layer, SharedLayer) else _as_shared(layer, shared, delay)
    for block, layer in _pair_with_blocks(made):
        name = next(n for n, m in made.items() if m is layer)
        if isinstance(layer, SharedLayer) and layer.shared == "per_choice":
            made[name] = PerChoice(layer.layer, len(block)) if has_state(layer) else layer
    yield from made.items()


def _as_shared(layer: nn.Module, shared: Sharing, delay: int | None) -> SharedLayer:
    return SharedLayer(layer, shared, delay) if has_state(layer) else SharedLayer(layer)


def _pair_with_blocks(layers: Mapping[str, nn.Module | None]) -> list[tuple[ChoiceBlock, nn.Module]]:
    """Return each other layer with the block that follows it, or with the last block if none follows."""
    found: list[tuple[ChoiceBlock, nn.Module]] = []
    block: ChoiceBlock | None = None
    waiting: list[nn.Module] = []
    for layer in layers.values():
        assert layer is not None
        if isinstance(layer, ChoiceBlock) and not isinstance(layer, PerChoice):
            block = layer
            found += [(block, each) for each in waiting]
            waiting = []
        else:
            waiting.append(layer)
    return found + [(block, each) for each in waiting if block is not None]


class _SharedState:
    """Finds layers that have parameters or buffers in common."""

    def __init__(self, layers: Mapping[str, nn.Module | None]) -> None:
        owners: dict[int, set[str]] = defaultdict(set)
        self.stateful: set[str] = set()
        for name, layer in layers.items():
            assert layer is not None
            parts = {f"{name}.{n}": c for n, c in enumerate(layer)} if isinstance(layer, ChoiceBlock) else {name: layer}
            for part, module in parts.items():
                for tensor in (*module.parameters(), *module.buffers()):
                    owners[id(tensor)].add(part)
                    self.stateful.add(part)
        self.within: set[str] = set()
        """Blocks whose candidates have parameters or buffers in common. A subnet uses such a block as a whole."""
        self._twice: dict[str, set[str]] = defaultdict(set)
        for parts_of in owners.values():
            for one in parts_of:
                for other in parts_of - {one}:
                    if one.partition(".")[0] == other.partition(".")[0]:
                        self.within.add(one.partition(".")[0])
                    else:
                        self._twice[one].add(other)

    def check(self, part: str, name: str, choices: tuple[int, ...], layers: Mapping[str, nn.Module | None]) -> None:
        for other in self._twice.get(part, ()):
            head, _, choice = other.partition(".")
            layer: Any = layers[head]
            if not choice or choices[layer.place] == int(choice):
                raise InputError(
                    f"subnet {choices} uses a layer twice: {part} and {other} have parameters or buffers in common, "
                    "and gradients of both would come at different times. Leave such subnets out, or copy the layer"
                )


MAX_REPEATS = 1000


def measure_layer_costs(net: Supernet, x: Any, repeats: int = 3) -> dict[str, float]:
    """Return the seconds of a forward and a backward of every layer and every candidate.

    The names are the names of `Supernet.layers_of`. The cost of a block is the mean of its candidates. Return the costs
    from a module's `costs_of_layers`, so that `CSP(balanced=True)` uses them for its cuts.

    The number of subnets that are run is the number of candidates in the largest block, so that each candidate occurs
    in one of them. Weights, buffers and random states are restored afterwards. Call this function where the network is
    complete, for example in the module's `__init__`. In a pipeline, each rank has only its own layers.

    Args:
        net: the supernet.
        x: an input of the first layer, of the size of a micro-batch. Axis 0 of its tensors is samples.
        repeats: number of runs of each layer, of which the median is used.

    Raises:
        InputError: `x` has no samples, or some layers are not on this rank.
    """
    check_type("net", net, Supernet)
    check_count("repeats", repeats, most=MAX_REPEATS)
    rows = next((t.size(0) for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor) and t.ndim), 0)
    if not rows:
        raise InputError(
            "the costs of layers are measured with x, which has no samples. Pass an input of the first layer that "
            "contains a tensor with samples on axis 0"
        )
    if any(t.is_meta for t in (*net.parameters(), *net.buffers())):
        raise InputError(
            "some layers are on the meta device, as the layers of other ranks are in a pipeline. Costs can be measured "
            "only if the network is complete. Measure them earlier, for example in __init__ of the module"
        )
    device = next((t.device for t in (*net.parameters(), *net.buffers())), torch.device("cpu"))
    found: dict[str, float] = {}
    for turn in range(max(len(block) for block in net.blocks.values())):
        subnet = tuple(turn % len(block) for block in net.blocks.values())
        names = [
            f"{name}.{subnet[layer.place]}" if isinstance(layer, ChoiceBlock) else name
            for name, layer in net.named_children()
        ]
        profile = profile_layers(
            list(net.extract_subnet(subnet)), {rows: x}, names=names, repeats=repeats, device=device
        )
        for name, layer in zip(names, profile.layers, strict=True):
            found.setdefault(name, sum(seconds for table in (layer.forward, layer.backward) for _, seconds in table))
    for name, block in net.blocks.items():  # blocks with shared state are used as a whole
        found[name] = fmean(found[f"{name}.{choice}"] for choice in range(len(block)))
    return found


def bulk_synchronous(layers: Mapping[str, bool | Delayed], number: int, bulk: int) -> dict[str, bool | Delayed]:
    """Return the layers of subnet `number`, read as they were at the start of its bulk.

    This is the bulk-synchronous order of GPipe, applied to subnets (NASPipe, Zhao et al. 2022, S2.2, BSP). Updates are
    applied in the order of subnets, and all of them are visible at the start of the next bulk.

    The result depends on `bulk`, which such systems derive from the number of stages, and differs from the result of
    training one subnet after another.

    Args:
        layers: the result of `Supernet.layers_of`.
        number: the number of the subnet, starting at 0.
        bulk: number of subnets between two flushes.

    Raises:
        InputError: `layers` has a wrong type, or a number is out of range.
    """
    check_type("layers", layers, Mapping[str, bool | Delayed])
    if check_type("number", number, int) < 0:
        raise InputError(f"number must be at least 0, got {short_repr(number)}; subnets are counted from 0")
    late = Delayed(number % check_count("bulk", bulk, "; subnets between two flushes") + 1)
    return {name: late if stepped else False for name, stepped in layers.items()}
