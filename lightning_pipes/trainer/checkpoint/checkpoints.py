"""Ordinary Lightning checkpoints from a model that is spread out, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.module.optimizers import OptimizerLayout
from lightning_pipes.trainer.module.pipelined import CutModule
from lightning_pipes.trainer.private_lightning import optimizer_to_device
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.shards import shard_like


def gather_model(cut: CutModule, local: Mapping[str, Any], control: Control) -> dict[str, Any]:
    """The state dict of the whole module on the first rank, in its own order of keys; empty elsewhere.

    Args:
        local: this rank's part of it.
    """
    parts = control.gather(local, control.ranks[0])
    return {} if parts is None else cut.in_order(parts)


def load_model(cut: CutModule, state: Mapping[str, Any], strict: bool) -> None:
    """Loads from a state dict of the whole module what lives on this rank.

    Raises:
        PipelineError: with `strict`, the keys are not those of the whole module.
    """
    if strict and set(state) != set(cut.keys):
        different = sorted(set(state) ^ set(cut.keys))
        raise PipelineError(f"the checkpoint's keys are not those of the module; only in one: {different[:5]}")
    own = cut.module.state_dict()
    cut.module.load_state_dict({key: _like(state.get(key, value), value) for key, value in own.items()})


def _like(value: Any, own: Any) -> Any:
    """Return a loaded value sharded as the own one is."""
    both = isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor)
    return shard_like(value, own) if both and value.shape == own.shape else value


def _copy_like(value: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _like(value, own)
    return found.clone()


def gather_optimizer(local: Mapping[str, Any], layout: OptimizerLayout, control: Control) -> dict[str, Any]:
    """Gather the whole `state_dict` of an optimizer on the first rank; return {} on other ranks."""
    states = control.gather(layout.states_by_name(local), control.ranks[0])
    return {} if states is None else layout.whole_state(local, reversed(states))


def load_optimizers(
    optimizers: Sequence[Optimizer],
    layouts: Sequence[OptimizerLayout],
    states: Sequence[Mapping[str, Any]],
    device: Any,
) -> None:
    """Loads from one process's `state_dict` of each optimizer what belongs to this rank."""
    for optimizer, layout, whole in zip(optimizers, layouts, states, strict=False):
        own = layout.local_state(whole)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # Copies: the tensors may be parts of a file that will be overwritten.
        own["state"] = {
            number: pytree.tree_map_only(torch.Tensor, partial(_copy_like, own=parameters[number]), state)
            for number, state in own["state"].items()
        }
        optimizer.load_state_dict(own)
        optimizer_to_device(optimizer, device)
