"""Running averages of weights by Lightning's callbacks, where each rank has its own layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as cb
from torch import nn

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.module.remote_tensors import HookScope, RemoteTensor
from lightning_pipes.trainer.patches import Patches

Averaging: TypeAlias = cb.WeightAveraging | cb.StochasticWeightAveraging
GatherState: TypeAlias = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Return the state dict of the whole module where a checkpoint is written, from that of this rank. Collective."""


def check_averages(found: Iterable[pl.Callback], module: nn.Module, settings: Mapping[str, bool]) -> None:
    """Refuse callbacks that average weights where they can't do what they do in one process.

    Args:
        settings: whether the run has each setting under which no rank can, and how to do without it.

    Raises:
        PipelineError: names the callback, the setting and a way out.
    """
    for callback in found:
        if not isinstance(callback, Averaging):
            continue
        name = type(callback).__name__
        for setting, is_asked in settings.items():
            if is_asked:
                raise PipelineError(f"{name} can't average weights {setting}, or average checkpoints after training")
        if isinstance(callback, cb.StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module):
            raise PipelineError(
                f"{name} measures batch normalisation anew in an epoch without backwards, which a pipeline has not; "
                "use WeightAveraging, which averages these buffers, too"
            )


def spread_averages(
    found: Iterable[pl.Callback],
    module: pl.LightningModule,
    scope: HookScope,
    gather: GatherState,
    patches: Patches,
) -> None:
    """Have each callback that averages weights keep the average of this rank's layers, as `module` has been cut.

    Each rank updates the average of its own layers. A checkpoint gets the whole average, as in one process.
    """
    for callback in found:
        if isinstance(callback, Averaging) and callback._average_model is not None:
            _spread_average(callback, module, scope)
            _save_whole(callback, gather, patches)


def _spread_average(callback: Averaging, module: pl.LightningModule, scope: HookScope) -> None:
    """Replace the average of each tensor on another rank by a stand-in.

    The others become the module's until something has been averaged: a rank may have drawn other weights than the
    first, before all ranks got its weights. So do those that a run before had on another rank.
    """
    average = _averaged_module(callback)
    begins = _count_averaged(callback) == 0
    with scope.running("setup", everywhere=True):
        for name, tensor in _named_tensors(module):
            owner, _, last = name.rpartition(".")
            part = average.get_submodule(owner)
            table: dict[str, Any] = part._parameters if last in part._parameters else part._buffers
            kind = table[last].dtype
            if isinstance(tensor, RemoteTensor):
                table[last] = copy.deepcopy(tensor.to(kind))
            elif begins or table[last].is_meta:
                values = tensor.detach().clone().to(kind)
                is_parameter = isinstance(table[last], nn.Parameter)
                table[last] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values


def _save_whole(callback: Averaging, gather: GatherState, patches: Patches) -> None:
    """Have the callback put the average of all ranks into a checkpoint."""
    if isinstance(callback, cb.WeightAveraging):
        save = callback.on_save_checkpoint

        def save_average(trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
            save(trainer, module, checkpoint)
            checkpoint["state_dict"] = gather(checkpoint["state_dict"])

        patches.replace_method(callback, "on_save_checkpoint", save_average)
        return
    state_dict = callback.state_dict

    def whole_state() -> dict[str, Any]:
        state = state_dict()
        return {**state, "average_model_state": gather(state["average_model_state"])}

    patches.replace_method(callback, "state_dict", whole_state)


def _averaged_module(callback: Averaging) -> nn.Module:
    average = callback._average_model
    assert average is not None
    return average.module if isinstance(average, torch.optim.swa_utils.AveragedModel) else average


def _count_averaged(callback: Averaging) -> int:
    if isinstance(callback, cb.WeightAveraging):
        assert callback._average_model is not None
        return int(callback._average_model.n_averaged)
    return callback._init_n_averaged


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
