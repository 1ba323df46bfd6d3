"""Gathers the layers of all ranks when a run ends, one message at a time, into the restored parameters."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_pipes.engine.private_torch import NoSubclassFunctions
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.cut import ModuleCut
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.processes import process_rank
from lightning_pipes.trainer.relocation.local_layers import LocalLayers
from lightning_pipes.trainer.relocation.transfer import move_layers_back
from lightning_pipes.trainer.user.remote_tensors import give_values

Description = tuple[str, tuple[int, ...], str]
"""The key, shape and dtype of a tensor."""

AUTO, TRAINED = "auto", "trained"
"""Values of the setting `gather`."""
MAX_TRAINED_SHARE = 0.25
"""The largest share of the bytes of layers on `meta` that may train if rank 0 gets what trains with `AUTO`."""
_MAX_JOINED_BYTES = 1 << 20
"""The number of bytes up to which small tensors are sent in one message."""


class RankInventory(NamedTuple):
    """The layers that a rank has, and the layers that it lacks, when a run ends.

    Attributes:
        host: the host of the rank.
        available: the bytes of free memory on this host.
        missing: the bytes of the layers that are on other ranks.
        spread: whether these layers were created on `meta`, or left there by an earlier run.
        tensors: the key, shape and dtype of each tensor of the rank's layers, in the order in which they are sent.
        extra: the results of `get_extra_state` of the rank's layers, by name.
        trained: the keys of the parameters among these tensors that train.
    """

    host: str
    available: int
    missing: int
    spread: bool
    tensors: Sequence[Description]
    extra: dict[str, Any]
    trained: Collection[str] = ()


def gather_layers(local_layers: LocalLayers, pipeline: Control, gather: str) -> None:
    """Send the layers of all ranks to the ranks that will have the whole module.

    Collective over the ranks of a pipeline. In addition to the restored tensors, only one message at a time is in
    memory: one tensor, or several small ones. If some ranks do not receive the whole module, layers first move back to
    the ranks where they were at the beginning of the run. The ranks that do not receive it have the other layers on
    `meta`.

    Args:
        local_layers: the layers of this rank.
        pipeline: the collectives of the pipeline.
        gather: "all", "rank0", "trained", "none" or "auto"; see `choose_receivers`. With "trained", only the parameters
            that train are sent, and the module stays distributed otherwise.

    Raises:
        PipelineError: a rank has trained a tensor that another rank's copy of the layer does not have.
    """
    cut = local_layers.cut
    inventories = gather_inventories(cut, pipeline)
    if gather == AUTO and _trains_few(inventories):
        gather = TRAINED
    receivers = choose_receivers(gather, inventories)
    if len(receivers) < len(inventories):
        move_layers_back(local_layers)
        inventories = gather_inventories(cut, pipeline)
    receives = pipeline.position in receivers
    cut.stays_spread = not receives or gather == TRAINED
    cut.is_whole_elsewhere = 0 in receivers and not receives and gather != TRAINED
    if not receivers or len(inventories) == 1:
        return
    own, gaps = dict(cut.tensors(cut.local)), cut.find_gaps()
    for source, inventory in zip(pipeline.ranks, inventories, strict=True):
        here = source == process_rank()
        tensors = [each for each in inventory.tensors if gather != TRAINED or each[0] in inventory.trained]
        for group in group_tensors(tensors):
            flat = pack_tensors([own[key] for key, *_ in group]) if here else _empty_bytes(group)
            pipeline.broadcast_tensor(flat, source)
            if here or not receives:
                continue
            for (key, shape, _), values in zip(group, unpack_tensors(flat, group), strict=True):
                for slot in gaps.get(key, ()):
                    give_values(slot.tensor, values, slot.table[slot.name])
                if key not in gaps:
                    raise PipelineError(
                        f"rank {source} has trained {key}, of shape {shape}, which {type(cut.module).__name__} does "
                        "not have on this rank; register parameters and buffers before `fit`, on every rank"
                    )
        if not cut.stays_spread:
            for name, value in inventory.extra.items():
                cut.full.get_submodule(name).set_extra_state(value)


def gather_inventories(cut: ModuleCut, pipeline: Control) -> list[RankInventory]:
    """Return the inventories of all ranks of a pipeline. Collective."""
    return [RankInventory(*inventory) for inventory in pipeline.all_gather(tuple(describe_inventory(cut)))]


def describe_inventory(cut: ModuleCut) -> RankInventory:
    """Return the inventory of this rank."""
    tensors = [(key, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for key, t in cut.tensors(cut.local)]
    extra = {
        name: part.get_extra_state()
        for number in cut.local
        for name, part in cut.full[number].named_modules(prefix=list(cut.full._modules)[number])
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }
    foreign = {*range(len(cut.full))} - {*cut.local}
    with NoSubclassFunctions():  # stand-ins replace them, and their functions are slow
        missing = sum(t.nbytes for _, t in cut.tensors(foreign) if t.is_meta)
    available = int(psutil.virtual_memory().available)
    trained = frozenset(key for key, tensor in cut.tensors(cut.local) if tensor.requires_grad)
    return RankInventory(socket.gethostname(), available, missing, cut.stays_spread, tensors, extra, trained)


def _trains_few(inventories: Sequence[RankInventory]) -> bool:
    """Return whether only a small part of layers that were created on `meta` trains, as with adapters of a large model.

    Rank 0 must also have room for the weights of other ranks that train.
    """
    trained = [sum(_count_bytes(each) for each in i.tensors if each[0] in i.trained) for i in inventories]
    whole = sum(_count_bytes(each) for i in inventories for each in i.tensors)
    has_room = sum(trained[1:]) <= inventories[0].available // 2
    return any(i.spread for i in inventories) and 0 < sum(trained) <= MAX_TRAINED_SHARE * whole and has_room


def choose_receivers(gather: str, inventories: Sequence[RankInventory]) -> Sequence[int]:
    """Return the positions of the ranks that get the whole module.

    With "auto", these are all ranks if half of the free memory of each host has room for the layers that its ranks
    lack. Otherwise, only the first rank is chosen if its host has room, and otherwise no rank. If layers were created
    on `meta`, "auto" chooses no rank, and the layers stay where they are.

    Args:
        gather: "all", "rank0", "trained", "none" or "auto".
        inventories: the inventories of all ranks of the pipeline.
    """
    everywhere = range(len(inventories))
    if gather != AUTO:
        return {"all": everywhere, "rank0": range(1), TRAINED: range(1), "none": range(0)}[gather]
    if any(inventory.spread for inventory in inventories):
        return range(0)
    needed: Counter[str] = Counter()
    for inventory in inventories:
        needed[inventory.host] += inventory.missing
    room = {inventory.host: inventory.available // 2 for inventory in inventories}
    if all(needed[host] <= room[host] for host in room):
        return everywhere
    first = inventories[0]
    chosen = range(int(first.missing <= first.available // 2))
    least = min(inventory.available for inventory in inventories)
    rank_zero_info(
        f"The module's layers stay spread over the ranks{' but for rank 0' if chosen else ''}: all of them need "
        f"{max(needed.values()) / 2**30:.1f} GiB on a host where {least / 2**30:.1f} GiB "
        "are free. Set PipelineStrategy(gather='all') to have the whole module on every rank after `fit`"
    )
    return chosen


def group_tensors(tensors: Iterable[Description]) -> Iterator[list[Description]]:
    """Yield the tensors in order, in groups that are sent as one message each.

    A group holds at most `_MAX_JOINED_BYTES` bytes, or a single tensor.
    """
    group: list[Description] = []
    held = 0
    for tensor in tensors:
        size = _padded(_count_bytes(tensor))
        if group and held + size > _MAX_JOINED_BYTES:
            yield group
            group, held = [], 0
        group.append(tensor)
        held += size
    if group:
        yield group


def pack_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of these tensors. Each tensor except the last is padded."""
    parts = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
    for number, part in enumerate(parts[:-1]):
        parts[number] = nn.functional.pad(part, (0, _padded(len(part)) - len(part)))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack_tensors(flat: torch.Tensor, group: Sequence[Description]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a message. If there are several, each of them gets its own memory."""
    start = 0
    for tensor in group:
        size, (_, shape, dtype) = _count_bytes(tensor), tensor
        values = flat[start : start + size].view(getattr(torch, dtype)).view(shape)
        yield values if len(group) == 1 else values.clone()
        start += _padded(size)


def _empty_bytes(group: Sequence[Description]) -> torch.Tensor:
    """Return empty memory for a message with these tensors."""
    sizes = [_count_bytes(tensor) for tensor in group]
    return torch.empty(sum(map(_padded, sizes[:-1])) + sizes[-1], dtype=torch.uint8)


def _count_bytes(tensor: Description) -> int:
    _, shape, dtype = tensor
    return prod(shape) * int(getattr(torch, dtype).itemsize)


def _padded(size: int) -> int:
    """Return the offset after a tensor of `size` bytes: a multiple of 16 bytes, the size of the largest dtype."""
    return -(-size // 16) * 16
