"""Ranks that start equal: the same weights, and the same random numbers for data."""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from lightning_pipes.engine.rng import random_state, set_random_state
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.control import Control


def broadcast_random_state(control: Control, device: torch.device) -> None:
    """Gives all ranks the generators of rank 0, which has run what one process would have run.

    So samplers and `random_split` without a generator of their own choose the same samples on every stage.
    """
    set_random_state(control.broadcast(random_state(device), control.ranks[0]), device)


def broadcast_weights(module: pl.LightningModule, control: Control) -> None:
    """Gives all ranks the parameters and buffers of rank 0, but for those that are on `meta` on any rank.

    Raises:
        PipelineError: the ranks have built different modules.
    """
    if control.size == 1:
        return
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    shapes = {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}
    expected = control.broadcast(shapes, control.ranks[0])
    different = sorted(n for n in {*shapes, *expected} if shapes.get(n) != expected.get(n))
    if any(control.any(bool(different))):
        where = f"; here differ: {', '.join(different[:5])}" if different else ""
        raise PipelineError(
            f"the ranks have built different modules: names, shapes or types are not those of rank 0{where}. "
            "Build the module from settings and seeds that are the same on every rank"
        )
    on_meta = control.any(*(t.is_meta for t in tensors.values())) if tensors else []
    for tensor in (t for t, meta in zip(tensors.values(), on_meta, strict=True) if not meta):
        data = tensor.detach()
        flat = data.cpu().contiguous().reshape(-1).view(torch.uint8)
        control.broadcast_tensor(flat, control.ranks[0])
        data.copy_(flat.view(data.dtype).view(data.shape))
