"""Measures the costs of a supernet's candidates."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.profiler import profile_layers
from lightning_pipes.ir import InputError, check_count, check_type
from lightning_pipes.supernets.layers import ChoiceBlock
from lightning_pipes.supernets.supernet import Supernet

MAX_REPEATS = 1000


def measure_layer_costs(net: Supernet, x: Any, repeats: int = 3) -> dict[str, float]:
    """Return the seconds of forward and backward of every layer and candidate, by the names of `Supernet.layers_of`. A
    block has the mean of its candidates. Use them in a module's `costs_of_layers`: `CSP(balanced=True)` cuts by them.

    As many subnets are run as the largest block has candidates, so that each candidate is in one. Weights, buffers and
    random numbers are afterwards as they were. Call it where the network is whole, as in the module's `__init__`: in a
    pipeline each rank has its own layers only.

    Args:
        x: what enters the first layer, a micro-batch; axis 0 of its tensors counts samples.
        repeats: runs of each, of which the median counts.

    Raises:
        InputError: no samples, or layers that are not here.
    """
    check_type("net", net, Supernet)
    check_count("repeats", repeats, most=MAX_REPEATS)
    rows = next((t.size(0) for t in pytree.tree_leaves(x) if isinstance(t, torch.Tensor) and t.ndim), 0)
    if not rows:
        raise InputError("costs are measured by what enters the first layer: x needs a tensor with samples on axis 0")
    if any(t.is_meta for t in (*net.parameters(), *net.buffers())):
        raise InputError(
            "some layers are on meta, as those of other ranks are; measure costs where the network is whole, such as "
            "in __init__"
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
    for name, block in net.blocks.items():  # for blocks with shared state, which are used whole
        found[name] = fmean(found[f"{name}.{choice}"] for choice in range(len(block)))
    return found
