"""Ranks that start equal: the same weights, and the same random numbers for data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipes.engine.compute.reducer import is_distributed
from lightning_pipes.engine.compute.rng import random_state, set_random_state
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.module.pipelined import SPREAD
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.replicas import Replicas

_CHUNK = 1 << 16
"""Numbers of eight bytes that are summed up at a time, few enough for a processor's cache."""
_PRIME = (1 << 61) - 1


def broadcast_random_state(control: Control, device: torch.device) -> None:
    """Gives all ranks the generators of rank 0, which has run what one process would have run.

    So samplers and `random_split` without a generator of their own choose the same samples on every stage.
    """
    set_random_state(control.broadcast(random_state(device), control.ranks[0]), device)


def equal_weights(module: pl.LightningModule, control: Control, replicas: Replicas | None = None) -> bool:
    """Give all ranks the parameters and buffers of rank 0, except tensors on `meta` on any rank.

    Of sharded parameters each rank has the shards of the first stage's ranks, and of the first replica where replicas
    have the same.

    Equal ranks are found by checksums in one exchange. Return whether an earlier run has left the layers of any rank
    spread out.

    Args:
        replicas: the ranks with the same stages, where parameters are sharded.

    Raises:
        PipelineError: the ranks have built different modules.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    if replicas is not None and SPREAD not in vars(module):
        for _, tensor in named:
            if is_distributed(tensor) and not tensor.is_meta:
                replicas.share_shard(tensor)
    tensors = {name: tensor for name, tensor in named if not is_distributed(tensor)}
    spread = SPREAD in vars(module)
    if control.size == 1:
        return spread
    shapes = {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}
    meta = tuple(t.is_meta for t in tensors.values())
    names = hashlib.blake2b(repr((list(shapes.items()), meta)).encode(), digest_size=16).hexdigest()
    found = control.all_gather((names, checksum(t for t in tensors.values() if not t.is_meta), spread))
    if len({(names, values) for names, values, _ in found}) > 1:
        _take_over(tensors, shapes, control)
    return any(spread for *_, spread in found)


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a checksum of tensors; other bits or another order change it but for one case in 2**60."""
    total = 1
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for chunk in torch.split(data, 8 * _CHUNK):
            part = chunk if chunk.numel() % 8 == 0 else nn.functional.pad(chunk, (0, -chunk.numel() % 8))
            if part.data_ptr() % 8:
                part = part.clone()
            numbers = part.view(torch.int64)
            total = (total * _PRIME + int((numbers * _factors()[: numbers.numel()]).sum())) % 2**64
    return total


@cache
def _factors() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator) * 2 + 1


def _take_over(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, object], control: Control) -> None:
    """Takes over what rank 0 has. Collective."""
    expected = control.broadcast(shapes, control.ranks[0])
    different = sorted(n for n in {*shapes, *expected} if shapes.get(n) != expected.get(n))
    if any(control.any(bool(different))):
        where = f"; here differ: {', '.join(different[:5])}" if different else ""
        raise PipelineError(
            f"the ranks have built different modules: names, shapes or types are not those of rank 0{where}. "
            "Build the module from settings and seeds that are the same on every rank"
        )
    on_meta = control.any(*(tensors[name].is_meta for name in expected)) if expected else []
    for name, meta in zip(expected, on_meta, strict=True):
        if not meta:
            data = tensors[name].detach()
            flat = data.cpu().contiguous().reshape(-1).view(torch.uint8)
            control.broadcast_tensor(flat, control.ranks[0])
            data.copy_(flat.view(data.dtype).view(data.shape))
