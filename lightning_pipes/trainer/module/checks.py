"""Checks before training starts, of what can't work, or works differently than on one process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import lightning.pytorch as pl
from lightning.pytorch import callbacks as cb
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.module.pipelined import INCOMPLETE, batch_statistics
from lightning_pipes.trainer.module.proxy import Layers
from lightning_pipes.trainer.private_lightning import callbacks, spectral_norms

_UNSUITABLE: dict[type[pl.Callback], str] = {
    cb.BaseFinetuning: "looks for the layers of all stages in the optimizer of one; set requires_grad in "
    "configure_model, or give the layers learning rates by a scheduler",
    cb.ModelPruning: "prunes the layers of all stages, of which each process holds its own only; prune after training",
}


def check_run(module: pl.LightningModule, trainer: pl.Trainer, background: bool) -> None:
    """Raises PipelineError for a module or callbacks that can't be used.

    Args:
        background: checkpoints are written while training goes on.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    check_module(module, fitting)
    if fitting:
        check_callbacks(callbacks(trainer))
        if background:
            check_async(callbacks(trainer))


def check_callbacks(found: Iterable[pl.Callback]) -> None:
    """Raises PipelineError for a callback that needs the whole module on every process."""
    for callback in found:
        for kind, reason in _UNSUITABLE.items():
            if isinstance(callback, kind):
                raise PipelineError(f"{type(callback).__name__} can't be used in a pipeline: it {reason}")


def check_async(found: Iterable[pl.Callback]) -> None:
    """Raises PipelineError for a callback that can't have checkpoints written in the background."""
    for callback in found:
        if isinstance(callback, cb.ModelCheckpoint) and callback.save_last == "link":
            raise PipelineError(
                "ModelCheckpoint(save_last='link') would link to a checkpoint that is not written yet; use "
                "save_last=True, or PipelineStrategy(async_checkpoint=False)"
            )


def check_module(module: pl.LightningModule, fitting: bool) -> None:
    """Raises PipelineError for a module that can't be trained in a pipeline."""
    owner = type(module).__name__
    if fitting and not module.automatic_optimization:
        raise PipelineError(
            f"{owner} uses manual optimization; its training_step would call backward and step while other stages "
            "still wait for the batch. Set automatic_optimization = True and return the loss"
        )
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
        if parameter.is_meta and INCOMPLETE in vars(module):
            raise PipelineError(
                f"{owner}.{name} is gone: the last run with this object failed, and the layers of other ranks could "
                "not be fetched back. Make a new one, and go on from a checkpoint with trainer.fit(..., ckpt_path=...)"
            )
        if isinstance(parameter, UninitializedParameter):
            raise PipelineError(f"{owner}.{name} has no shape yet; initialise lazy layers with a first forward")


def warn_about_pieces(full: nn.Module) -> None:
    """Warns of layers that differ where training batches are cut into micro-batches."""
    names = [name for name in batch_statistics(full) if full.get_submodule(name).training]
    if names:
        rank_zero_warn(
            f"{_listed(names)}: batch normalisation sees one micro-batch at a "
            "time, so training differs from one process; use GroupNorm or LayerNorm, or microbatches=1"
        )
    names = spectral_norms(full)
    if names:
        rank_zero_warn(
            f"{_listed(names)}: spectral normalisation improves its estimate in every forward, so once for every "
            "micro-batch, and training differs a little from one process"
        )


def warn_about(module: pl.LightningModule, full: Layers) -> None:
    """Warns of layers and hooks that see the layers of one stage, or nothing."""
    copies = _copies(module, full)
    if copies:
        rank_zero_warn(
            f"{_listed(copies)}: a module like the pipelined one. A hook that averages one into the other, as "
            "for a teacher, is refused: each process has the weights of its own stages, and this one needs all"
        )
    if is_overridden("backward", module):
        rank_zero_warn(
            f"{type(module).__name__}.backward is not called: every stage runs its own part of the backward pass"
        )


def _copies(module: pl.LightningModule, full: nn.Module) -> list[str]:
    """Return names of modules with the same shapes of parameters as `full`, in the same order."""
    shapes = [p.shape for p in full.parameters()]
    inside = {id(part) for part in full.modules()}
    others = [(name, part) for name, part in module.named_modules() if name and id(part) not in inside]
    copies = [(name, part) for name, part in others if [p.shape for p in part.parameters()] == shapes]
    return [name for name, part in copies if shapes and full not in part.modules()]


def warn_about_small_batch(rows: int, stages: int) -> None:
    """Warns of a batch with fewer samples than there are stages, or nothing."""
    if rows < stages:
        rank_zero_warn(
            f"a batch of {rows} sample{'s' * (rows > 1)} can't keep {stages} stages busy, so most of them wait at any "
            "time; use a batch_size of several samples for each stage"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])
