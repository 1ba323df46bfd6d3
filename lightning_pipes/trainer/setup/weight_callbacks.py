"""Adaptation of Lightning's callbacks that access the weights of all layers: averaging, finetuning and pruning."""

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
from lightning_pipes.trainer.checks import equalize_weights
from lightning_pipes.trainer.cuts.cut import ModuleCut
from lightning_pipes.trainer.private_lightning import Averaging
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.ranks import Grid, Ranks
from lightning_pipes.trainer.ranks.replica_world import in_hook
from lightning_pipes.trainer.user.patches import Patches
from lightning_pipes.trainer.user.remote_tensors import HookScope, RemoteTensor, digest_of_tensor

GatherState: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]
"""A collective function that takes the state dict of this rank and returns the state dict of the whole module on ranks
that write a checkpoint.
"""


def check_callbacks(
    found: Iterable[pl.Callback],
    module: pl.LightningModule,
    asynchronous_schedule: str | None,
    saves_parts: bool,
    is_sharded: bool,
    stays: bool,
) -> None:
    """Check that callbacks that access the weights of all layers are compatible with the settings.

    Args:
        found: the callbacks of the Trainer.
        module: the user's module.
        asynchronous_schedule: the name of the schedule if its batches overlap; None for a schedule that flushes.
        saves_parts: whether checkpoints are written in parts.
        is_sharded: whether `configure_model` has sharded layers.
        stays: whether the module is cut into the layers of a container that do not move between ranks.

    Raises:
        PipelineError: a callback is not supported with these settings, or not in a pipeline at all. The message names
            the callback, the setting and a solution.
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
            raise PipelineError(f"{name} prunes each layer separately in a pipeline, but this one {obstacle}")
        if isinstance(callback, cb.StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module):
            raise PipelineError(
                f"{name} updates the statistics of batch normalization in an epoch without backward passes, which a "
                "pipeline does not run. Use WeightAveraging, which also averages these buffers"
            )


def limit_writers(callbacks: Iterable[pl.Callback], grid: Grid, patches: Patches) -> None:
    """Make callbacks that write predictions write only on the first rank of each pipeline, until `patches` is closed.

    All ranks of a pipeline have the same predictions. If every rank wrote a file, each sample would be in several
    files.

    Args:
        callbacks: the callbacks of the Trainer.
        grid: the coordinates of this rank and all other ranks.
        patches: the changes to the callbacks, which are reverted when it is closed.
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
    """Replace a method of a callback on ranks that do not write."""


def localize_callbacks(
    found: Iterable[pl.Callback], cut: ModuleCut, gather: GatherState, ranks: Ranks, patches: Patches
) -> None:
    """Restrict callbacks that access the weights of all layers to the layers of this rank, after the module was cut.

    Each rank updates the average of its own layers, but a checkpoint contains the whole average, as on a single
    process. A callback that unfreezes layers may compare weights of several ranks, as `BaseFinetuning` does.

    Args:
        found: the callbacks of the Trainer.
        cut: the module that has been cut.
        gather: returns the state dict of the whole module from the state dicts of all ranks.
        ranks: the ranks of the run.
        patches: the changes to the callbacks, which are reverted when it is closed.
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

    As long as nothing has been averaged, the averages of local tensors are set to the current weights of the module.
    The callback copied the weights before they were made equal on all ranks, and the ranks may have initialized them
    differently. An average on `meta`, which was on another rank in an earlier run, is also set to the current weights.
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


def _prune_own_layers(callback: cb.ModelPruning, cut: ModuleCut, control: Control, patches: Patches) -> None:
    """Restrict the callback to the layers of this rank, and use the copies of weights of the first rank."""
    pruned, copies = private.pruned_layers(callback)
    equalize_weights(nn.ModuleList(each["data"] for each in copies.values()), control)
    remote = {id(part) for n, layer in enumerate(cut.full) if n not in cut.local for part in layer.modules()}
    remote -= {id(part) for layer in cut.layers.values() for part in layer.modules()}
    private.keep_pruned(callback, [each for each in pruned if id(each[0]) not in remote], copies)
    patches.callback(private.keep_pruned, callback, pruned, copies)


def _compare_everywhere(
    callback: cb.BaseFinetuning, module: pl.LightningModule, scope: HookScope, pipeline: Control, patches: Patches
) -> None:
    """Provide digests of the weights of all ranks while the callback compares weights to add a parameter group."""
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
    """Make the averages of callbacks complete again after the whole module has been restored.

    When training has ended normally, the weights of the module are the averages, and the missing averages are copied
    from them. Otherwise, the averages of layers on other ranks are lost, and the average is removed with a warning.
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
                f"{type(callback).__name__}: training ended before the averaged weights were copied into the module. "
                "They are discarded, because each rank has only the averages of its own layers. Checkpoints that were "
                "saved before contain them"
            )


def _with_values(average: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` with the dtype of `average`."""
    values = tensor.detach().clone().to(average.dtype)
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _save_whole(callback: Averaging | cb.ModelPruning, gather: GatherState, patches: Patches) -> None:
    """Make the callback save the averaged or pruned weights of all ranks in checkpoints."""
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
    """Yield each averaged tensor of the module, the dict that contains its average, and its name in this dict."""
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
