"""Lightning's callbacks that work on the weights of all layers, where each rank has its own: running averages, layers
that train later than others, and pruning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.module.checks import equalize_weights
from lightning_pipes.trainer.module.pipelined import CutModule
from lightning_pipes.trainer.module.remote_tensors import HookScope, RemoteTensor, digest_of_tensor
from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.private_lightning import Averaging
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.ranks import Grid, Ranks
from lightning_pipes.trainer.ranks.replica_world import in_hook

GatherState: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Return the state dict of the whole module where a checkpoint is written, from that of this rank. Collective."""


def check_callbacks(
    found: Iterable[pl.Callback],
    module: pl.LightningModule,
    asynchronous_schedule: str | None,
    saves_parts: bool,
    is_sharded: bool,
    stays: bool,
) -> None:
    """Refuse callbacks that work on the weights of all layers under settings in which they can't.

    Args:
        asynchronous_schedule: name of a schedule whose batches overlap; None for one that flushes.
        saves_parts: whether checkpoints are written in parts.
        is_sharded: whether `configure_model` has sharded layers.
        stays: whether the module is cut in layers of a container, which stay where they are.

    Raises:
        PipelineError: names the callback, the setting and a way out.
    """
    parts = "with checkpoint='sharded', whose parts have one state of each layer: use checkpoint='full'"
    moved = "of layers that may move or are cut by units: leave replan out, and name a container, module=..."
    settings = {
        f"with schedule {asynchronous_schedule!r}, whose stages are at other batches: use one that flushes between "
        "batches, such as '1f1b'": asynchronous_schedule is not None,
        parts: saves_parts,
        "of layers that configure_model has sharded: leave the shards out": is_sharded,
    }
    for callback in found:
        name = type(callback).__name__
        prunes = isinstance(callback, cb.ModelPruning)
        for setting, is_asked in {**settings, moved: prunes and not stays}.items():
            if not is_asked:
                continue
            if isinstance(callback, Averaging):
                raise PipelineError(f"{name} can't average weights {setting}, or average checkpoints after training")
            if prunes:
                raise PipelineError(f"{name} can't prune weights {setting}, or prune them after training")
            if isinstance(callback, cb.BaseFinetuning) and setting is not parts:
                raise PipelineError(
                    f"{name} can't change the parameter groups of optimizers {setting}, or set requires_grad in "
                    "configure_model"
                )
        for obstacle in private.find_pruning_obstacles(callback) if isinstance(callback, cb.ModelPruning) else ():
            raise PipelineError(f"{name} prunes each layer by itself in a pipeline, and this one {obstacle}")
        if isinstance(callback, cb.StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module):
            raise PipelineError(
                f"{name} measures batch normalisation anew in an epoch without backwards, which a pipeline does not "
                "run; use WeightAveraging, which averages these buffers, too"
            )


def limit_writers(callbacks: Iterable[pl.Callback], grid: Grid, patches: Patches) -> None:
    """Let writers of predictions write on the first rank of each pipeline alone, until `patches` are closed.

    All ranks of a pipeline have the same predictions, so that a file for each rank would have each sample several
    times.
    """
    writes = grid.position == 0 and grid.shard == 0
    for callback in callbacks:
        if not isinstance(callback, BasePredictionWriter) or grid.length * grid.shards == 1:
            continue
        for name in ("write_on_batch_end", "write_on_epoch_end"):
            method = getattr(callback, name)
            patches.replace_method(callback, name, partial(_write, method) if writes else _write_nothing)


def _write(method: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    with in_hook(on_all_ranks=False):
        method(*args, **kwargs)


def _write_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for a method that another rank calls."""


def localize_callbacks(
    found: Iterable[pl.Callback], cut: CutModule, gather: GatherState, ranks: Ranks, patches: Patches
) -> None:
    """Have callbacks that work on the weights of all layers work on this rank's layers, as the module has been cut.

    Each rank updates the average of its own layers. A checkpoint gets the whole average, as in one process. A callback
    that unfreezes layers may compare weights of several ranks, as Lightning's does.
    """
    module, scope = cut.module, cut.scope
    for callback in found:
        if isinstance(callback, cb.ModelPruning):
            _prune_own_layers(callback, cut, ranks.control, patches)
            _save_whole(callback, gather, patches)
        if isinstance(callback, cb.BaseFinetuning):
            _compare_everywhere(callback, module, scope, ranks.pipeline, patches)
        if isinstance(callback, Averaging) and private.find_average(callback) is not None:
            _localize_average(callback, module, scope)
            _save_whole(callback, gather, patches)


def _localize_average(callback: Averaging, module: pl.LightningModule, scope: HookScope) -> None:
    """Replace the average of each tensor on another rank by a stand-in.

    The others become the module's until something has been averaged: a rank may have drawn other weights than the
    first, before all ranks got its weights. So do those that a run before had on another rank.
    """
    begins = private.count_averaged(callback) == 0
    made: dict[int, torch.Tensor] = {}  # tied weights have one average
    with scope.running("setup", on_all_ranks=True):
        for tensor, table, name in _averaged_tensors(callback, module):
            kind = table[name].dtype
            if id(tensor) in made:
                table[name] = made[id(tensor)]
            elif isinstance(tensor, RemoteTensor):
                made[id(tensor)] = table[name] = copy.deepcopy(tensor.to(kind))
            elif begins or table[name].is_meta:
                made[id(tensor)] = table[name] = _with_values(table[name], tensor)


def _prune_own_layers(callback: cb.ModelPruning, cut: CutModule, control: Control, patches: Patches) -> None:
    """Have the callback prune what is here, and begin anew from the copies of the first rank where it does so."""
    pruned, copies = private.pruned_layers(callback)
    equalize_weights(nn.ModuleList(each["data"] for each in copies.values()), control)
    remote = {id(part) for n, layer in enumerate(cut.full) if n not in cut.local for part in layer.modules()}
    remote -= {id(part) for layer in cut.layers.values() for part in layer.modules()}
    private.keep_pruned(callback, [each for each in pruned if id(each[0]) not in remote], copies)
    patches.callback(private.keep_pruned, callback, pruned, copies)


def _compare_everywhere(
    callback: cb.BaseFinetuning, module: pl.LightningModule, scope: HookScope, pipeline: Control, patches: Patches
) -> None:
    """Let the callback compare weights of other ranks, too, when it looks for the weights of its optimizer."""
    unfreeze = callback.unfreeze_and_add_param_group

    def unfreeze_everywhere(*args: Any, **kwargs: Any) -> None:
        with scope.suspend_hooks():
            own = {f"self.{name}": digest_of_tensor(p) for name, p in module.named_parameters()}
        scope.digests = {name: digest for part in pipeline.all_gather(own) for name, digest in part.items()}
        try:
            unfreeze(*args, **kwargs)
        finally:
            scope.digests = {}

    patches.replace_method(callback, "unfreeze_and_add_param_group", unfreeze_everywhere)


def restore_averages(found: Iterable[pl.Callback], module: pl.LightningModule) -> None:
    """Have each average be whole again, now that `module` is.

    Training that ends gives the module its average. Where it has not, the layers of other ranks have lost theirs.
    """
    for callback in found:
        if not isinstance(callback, Averaging) or private.find_average(callback) is None:
            continue
        remote: list[tuple[torch.Tensor, dict[str, Any], str]] = []
        own: list[tuple[torch.Tensor, dict[str, Any], str]] = []
        for tensor, table, name in _averaged_tensors(callback, module):
            (remote if isinstance(table[name], RemoteTensor) else own).append((tensor, table, name))
        if not remote:
            continue
        if all(torch.equal(tensor, table[name].to(tensor)) for tensor, table, name in own):
            made: dict[int, torch.Tensor] = {}
            for tensor, table, name in remote:
                if id(tensor) not in made:
                    made[id(tensor)] = _with_values(table[name], tensor)
                table[name] = made[id(tensor)]
        else:
            private.drop_average(callback)
            rank_zero_warn(
                f"{type(callback).__name__}: training ended before its average went into the module, and ranks have "
                "the average of their own layers only, so it is dropped; checkpoints from before have it"
            )


def _with_values(average: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` of the type of `average`."""
    values = tensor.detach().clone().to(average.dtype)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _save_whole(callback: Averaging | cb.ModelPruning, gather: GatherState, patches: Patches) -> None:
    """Have the callback put the average, or the pruned weights, of all ranks into a checkpoint."""
    if not isinstance(callback, cb.StochasticWeightAveraging):
        save = callback.on_save_checkpoint

        def save_gathered(trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
            save(trainer, module, checkpoint)
            checkpoint["state_dict"] = gather(checkpoint["state_dict"])

        patches.replace_method(callback, "on_save_checkpoint", save_gathered)
        return
    state_dict = callback.state_dict

    def whole_state() -> dict[str, Any]:
        state = state_dict()
        return {**state, "average_model_state": gather(state["average_model_state"])}

    patches.replace_method(callback, "state_dict", whole_state)


def _averaged_tensors(callback: Averaging, module: nn.Module) -> Iterator[tuple[torch.Tensor, dict[str, Any], str]]:
    """Yield each tensor of the module that is averaged, the table that has its average, and the name there."""
    average = private.find_average(callback)
    assert average is not None
    whole = isinstance(average, AveragedModel)
    averaged = average.get_submodule("module") if whole else average
    named = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False) if whole else ()
    for key, tensor in chain(named, buffers):
        owner, _, name = key.rpartition(".")
        part = averaged.get_submodule(owner)
        yield tensor, part._parameters if name in part._parameters else part._buffers, name
