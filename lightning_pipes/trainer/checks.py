"""Checks before training for modules and callbacks that a pipeline does not support or runs differently.

This module also makes the weights and the random state of all ranks equal at the start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.plugins import Precision, TransformerEnginePrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_pipes.engine.compute.reducer import is_distributed
from lightning_pipes.engine.compute.rng import random_state, set_random_state
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.cuts.layers.pipelined import batch_statistics
from lightning_pipes.trainer.cuts.layers.proxy import Layers
from lightning_pipes.trainer.private_lightning import callbacks, spectral_norms
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.replicas import Replicas
from lightning_pipes.trainer.user.user_objects import is_packed
from lightning_pipes.trainer.weights.spread import INCOMPLETE_ATTRIBUTE, SPREAD_ATTRIBUTE


def check_run(module: pl.LightningModule, trainer: pl.Trainer, background: bool) -> None:
    """Raise PipelineError for a precision plugin, a module or callbacks that can't be used in a pipeline.

    Args:
        module: the user's module.
        trainer: the Trainer.
        background: whether checkpoints are written in the background while training continues.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    check_precision(trainer.strategy.precision_plugin)
    check_module(module, fitting)
    if fitting and background:
        check_async(callbacks(trainer))


def check_precision(plugin: Precision) -> None:
    """Raise PipelineError for a precision plugin that requires the same layers on all processes."""
    if isinstance(plugin, TransformerEnginePrecision):
        raise PipelineError(
            f"{type(plugin).__name__} can't be used in a pipeline. Transformer Engine reduces the largest values of "
            "float8 tensors over all processes after each layer, and stages run different layers. Use "
            "precision='bf16-mixed' or 'bf16-true'"
        )


def check_async(found: Iterable[pl.Callback]) -> None:
    """Raise PipelineError for a callback that does not work with checkpoints written in the background."""
    for callback in found:
        if isinstance(callback, cb.ModelCheckpoint) and callback.save_last == "link":
            raise PipelineError(
                "ModelCheckpoint(save_last='link') would link to a checkpoint that is not written yet; use "
                "save_last=True, or PipelineStrategy(async_checkpoint=False)"
            )


def check_module(module: pl.LightningModule, fitting: bool) -> None:
    """Raise PipelineError for a module that can't be run in a pipeline.

    Args:
        module: the user's module.
        fitting: whether the module is trained.
    """
    owner = type(module).__name__
    if fitting and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise PipelineError(
            f"{owner}.training_step takes dataloader_iter; a pipeline needs the batch itself: training_step(batch)"
        )
    for name, part in module.named_modules():
        if fitting and isinstance(part, nn.SyncBatchNorm):
            raise PipelineError(
                f"{owner}.{name} is a SyncBatchNorm, which would wait for ranks that hold other layers; use BatchNorm, "
                "whose stage sees all samples of a micro-batch"
            )
    for name, parameter in module.named_parameters():
        if parameter.is_meta and INCOMPLETE_ATTRIBUTE in vars(module):
            raise PipelineError(
                f"{owner}.{name} has no values: the last run with this object failed, and the layers of other ranks "
                "could not be fetched back. Create a new module, and continue from a checkpoint with trainer.fit(..., "
                "ckpt_path=...)"
            )
        if hasattr(parameter, "__tensor_flatten__") and not is_distributed(parameter):
            raise PipelineError(
                f"{owner}.{name} is a {type(parameter).__name__}, which consists of several tensors, as quantized "
                "weights do; ranks compare, send and save plain ones. Keep frozen weights in bfloat16, and quantize "
                "the layers after training"
            )
        if isinstance(parameter, UninitializedParameter):
            raise PipelineError(f"{owner}.{name} has no shape yet; initialize lazy layers with a first forward")


def warn_about_microbatch_effects(full: nn.Module) -> None:
    """Warn about layers of the pipelined container whose results change if batches are cut into micro-batches."""
    names = [name for name in batch_statistics(full) if full.get_submodule(name).training]
    if names:
        rank_zero_warn(
            f"layer{'s' * (len(names) > 1)} {_listed(names)}: batch normalization sees one micro-batch at a time, so "
            "training differs from one process; use GroupNorm or LayerNorm, or PipelineStrategy(microbatches=1)"
        )
    names = spectral_norms(full)
    if names:
        rank_zero_warn(
            f"layer{'s' * (len(names) > 1)} {_listed(names)}: spectral normalization improves its estimate in every "
            "forward, so once for every micro-batch; training differs a little from one process. "
            "PipelineStrategy(microbatches=1) avoids it"
        )


def warn_about_module(module: pl.LightningModule, full: Layers | None) -> None:
    """Warn about hooks and layers of the user's module that are likely to behave differently in a pipeline.

    These are copies of the pipelined container, trained weights under an adapter of peft, and a `backward` method that
    is not called.

    Args:
        module: the user's module.
        full: the container that is cut; None if hooks see all weights.
    """
    copies = [] if full is None else _copies(module, full)
    if copies:
        rank_zero_warn(
            f"{_listed(copies)} has the same layers as the container that is cut into stages. A hook that averages "
            "the weights of one into the other, such as for a teacher, is refused, because each process has only the "
            "weights of its own stages"
        )
    trained = list(_names_under_adapters(module))
    if trained:
        rank_zero_warn(
            f"{_listed(trained)}: trains although it has an adapter of peft, so each process keeps its gradients and "
            "optimizer states; freeze it by requires_grad_(False), or merge the adapter to train without one"
        )
    if is_overridden("backward", module) and module.automatic_optimization:
        rank_zero_warn(
            f"{type(module).__name__}.backward is not called: every stage runs its own part of the backward pass"
        )


def _names_under_adapters(module: nn.Module) -> Iterator[str]:
    """Yield the names of trained weights in layers that have an adapter of peft, except biases, which it may train."""
    for name, part in module.named_modules():
        base = getattr(part, "base_layer", None) if getattr(part, "adapter_layer_names", ()) else None
        for leaf, weight in base.named_parameters() if isinstance(base, nn.Module) else ():
            if weight.requires_grad and not leaf.endswith("bias"):
                yield f"{name}.base_layer.{leaf}"


def _copies(module: pl.LightningModule, full: nn.Module) -> list[str]:
    """Return the names of other modules with parameters of the same shapes, in order, as the parameters of `full`."""
    shapes = [p.shape for p in full.parameters()]
    inside = {id(part) for part in full.modules()}
    others = [(name, part) for name, part in module.named_modules() if name and id(part) not in inside]
    copies = [(name, part) for name, part in others if [p.shape for p in part.parameters()] == shapes]
    return [name for name, part in copies if shapes and full not in part.modules()]


def warn_about_small_batch(rows: int, stages: int, pieces: int, asked: int) -> None:
    """Warn about a batch with fewer samples than stages, and log if it is cut into fewer micro-batches than requested.

    There is no warning if one micro-batch is requested. Batches are not cut then, so that a batch of an unknown class
    counts as one sample.

    Args:
        rows: the number of samples in the batch.
        stages: the number of stages.
        pieces: the number of micro-batches that the batch is cut into.
        asked: the number of micro-batches in the settings.
    """
    if pieces < asked:
        rank_zero_info(
            f"A batch of {rows} sample{'s' * (rows > 1)} is cut into {pieces} micro-batch{'es' * (pieces > 1)} "
            f"instead of {asked}"
        )
    if rows < stages and asked > 1:
        rank_zero_warn(
            f"a batch of {rows} sample{'s' * (rows > 1)} can't keep {stages} stages busy. Set batch_size to several "
            "samples for each stage"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])


_CHUNK_INTEGERS = 1 << 16
"""The number of 8-byte integers that are summed at a time, which fit into the cache of a processor."""
_CHECK_MODULUS = (1 << 61) - 1


def broadcast_random_state(control: Control, device: torch.device) -> None:
    """Set the random generators of all ranks to the state of rank 0, which is the same as on a single process.

    Samplers and `random_split` without a generator of their own then select the same samples on every stage.
    """
    set_random_state(control.broadcast(random_state(device), control.ranks[0]), device)


def equalize_weights(module: nn.Module, control: Control, replicas: Replicas | None = None) -> bool:
    """Set the parameters and buffers of all ranks to the values of rank 0. Collective.

    Tensors that are on `meta` on any rank are skipped. If the checksums of all ranks are equal, no tensors are sent.
    Each shard of a parameter is set to the shard on the first rank of its pipeline, and on the first replica if all
    replicas have the same shard.

    Args:
        module: the module.
        control: the control channel of the ranks.
        replicas: the ranks with the same stages, if parameters are sharded.

    Returns:
        whether an earlier run has left layers of any rank on `meta`.

    Raises:
        PipelineError: the ranks have built different modules.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    if replicas is not None and SPREAD_ATTRIBUTE not in vars(module):
        for _, tensor in named:
            if is_distributed(tensor) and not tensor.is_meta:
                replicas.share_shard(tensor)
    tensors = {name: tensor for name, tensor in named if not is_distributed(tensor)}
    spread = SPREAD_ATTRIBUTE in vars(module)
    if control.size == 1:
        return spread
    shapes = {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}
    meta = tuple(t.is_meta for t in tensors.values())
    names = hashlib.blake2b(repr((list(shapes.items()), meta)).encode(), digest_size=16).hexdigest()
    found = control.all_gather((names, checksum_tensors(t for t in tensors.values() if not t.is_meta), spread))
    if len({(names, values) for names, values, _ in found}) > 1:
        _take_over(tensors, shapes, control)
    return any(spread for *_, spread in found)


def checksum_tensors(tensors: Iterable[torch.Tensor]) -> int:
    """Return a checksum of tensors. Other bits or another order give another checksum except in one case of 2**60."""
    total = 1
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        for chunk in torch.split(data, 8 * _CHUNK_INTEGERS):
            part = chunk if chunk.numel() % 8 == 0 else nn.functional.pad(chunk, (0, -chunk.numel() % 8))
            if part.data_ptr() % 8:
                part = part.clone()
            numbers = part.view(torch.int64)
            total = (total * _CHECK_MODULUS + int((numbers * _factors()[: numbers.numel()]).sum())) % 2**64
    return total


@cache
def _factors() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**62), 2**62, (_CHUNK_INTEGERS,), generator=generator) * 2 + 1


def _take_over(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, object], control: Control) -> None:
    """Check that the ranks have built the same module, and copy the values of rank 0. Collective."""
    expected = control.broadcast(shapes, control.ranks[0])
    different = sorted(n for n in {*shapes, *expected} if shapes.get(n) != expected.get(n))
    if any(control.any(bool(different))):
        where = f"; on this rank, these differ: {', '.join(different[:5])}" if different else ""
        raise PipelineError(
            f"the ranks have built different modules: names, shapes or types differ from rank 0{where}. Build the "
            "module from settings and seeds that are the same on every rank"
        )
    packed = [name for name, tensor in tensors.items() if is_packed(tensor) and not tensor.is_meta]
    own = {name: checksum_tensors([tensors[name]]) for name in packed}
    first = control.broadcast(own, control.ranks[0])
    unequal = [name for name in own if own[name] != first.get(name)]
    if any(control.any(bool(unequal))):
        where = f": {', '.join(unequal[:5])}" if unequal else ""
        raise PipelineError(
            f"quantized or otherwise packed weights differ between ranks{where}. "
            "Make them from the same file or with the same seed on every rank"
        )
    on_meta = control.any(*(tensors[name].is_meta for name in expected)) if expected else []
    for name, meta in zip(expected, on_meta, strict=True):
        if not meta:
            data = tensors[name].detach()
            flat = data.cpu().contiguous().reshape(-1).view(torch.uint8)
            control.broadcast_tensor(flat, control.ranks[0])
            data.copy_(flat.view(data.dtype).view(data.shape))
