"""Where training is in its data and random numbers: written into checkpoints, and found again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_pipes.engine.compute.rng import random_state, set_random_state
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.checkpoint.resumable import LoaderPass, ResumableLoader, State, resumable

KEY = "lightning_pipes"
"""Where a checkpoint has what other strategies do not know of."""


class TrainingData:
    """The training loaders of one Trainer.

    Args:
        device: whose random numbers are saved with those of the CPU.
        compare: warn when a resumed sampler does not give what it gave before; on one rank, whose state it was.
    """

    def __init__(self, device: torch.device, compare: bool) -> None:
        self._device = device
        self._compare = compare
        self._loaded: State | None = None
        self._waiting: list[State | None] = []

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Remembers what `state` gave; a checkpoint of another strategy has nothing to remember."""
        own = checkpoint.get(KEY, {})
        self._loaded = native(own["data"]) if "data" in own else None
        self._waiting = list(self._loaded["loaders"]) if self._loaded is not None else []

    def prepared(self, loader: object) -> object:
        """The loader that Lightning should take for a training loader: called for one after the other, in their order.

        Loaders that can save their own state, and what is no DataLoader, stay as they are.
        """
        state = self._waiting.pop(0) if self._waiting else None
        if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
            return loader
        made = resumable(loader)
        if state is not None:
            made.resume_from(state, self._compare)
        return made

    def go_on(self, trainer: pl.Trainer) -> None:
        """Has the random numbers of the checkpoint; called last before the first batch, after other hooks drew some."""
        state, self._loaded, self._waiting = self._loaded, None, []
        if state is None:
            return
        loaders = private.training_loaders(trainer)
        if len(loaders) != len(state["loaders"]):
            warnings.warn(
                f"there are {len(loaders)} training loaders, and {len(state['loaders'])} when the checkpoint was "
                "written; samples may come twice or not at all in this epoch",
                stacklevel=2,
            )
        elif all(isinstance(loader, ResumableLoader) or hasattr(loader, "state_dict") for loader in loaders):
            private.ignore_warnings(".*your dataloader is not resumable.*")
        set_random_state(state["random"], self._device)
        if not state["between_epochs"]:
            private.finish_batch(trainer, state["validation_follows"])
            return
        private.begin_epoch(trainer)
        for loader, earlier in zip(loaders, state["loaders"], strict=False):
            if isinstance(loader, ResumableLoader) and earlier is not None:
                loader.draw_as(earlier)  # again: Lightning loads ahead where it does not know the end of the data

    def epoch_starts(self, trainer: pl.Trainer) -> None:
        """Every epoch that is not resumed begins with the first batch."""
        for loader in private.training_loaders(trainer):
            if isinstance(loader, ResumableLoader):
                loader.begin_anew()

    def forget(self) -> None:
        """Drop loaded states, which are for one run only."""
        self._loaded, self._waiting = None, []

    def state(self, trainer: pl.Trainer) -> State:
        """For a checkpoint: plain values and tensors."""
        loaded, trained, _ = private.batches_of_epoch(trainer)
        loaders = private.training_loaders(trainer)
        passes = private.training_passes(trainer)
        between = private.between_epochs(trainer)
        if between or not passes:
            passes = [None] * len(loaders)
        states = [
            passed.state(loaded - trained, trained)
            if isinstance(passed, LoaderPass)
            else loader.state()
            if isinstance(loader, ResumableLoader)
            else None
            for loader, passed in zip(loaders, passes, strict=True)
        ]
        found = {
            "random": random_state(self._device),
            "loaders": states,
            "between_epochs": between,
            "validation_follows": private.validation_follows(trainer),
        }
        return {"data": portable(found)}


def portable(tree: Any) -> Any:
    """The same values without NumPy's arrays, which careful readers of checkpoints refuse."""
    return _mapped(tree, lambda leaf: torch.from_numpy(leaf.copy()) if isinstance(leaf, np.ndarray) else leaf)


def native(tree: Any) -> Any:
    """The other direction of `portable`; torch's own random states are bytes, NumPy's are not."""

    def back(leaf: Any) -> Any:
        return leaf.numpy() if isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.uint8 else leaf

    return _mapped(tree, back)


def _mapped(tree: Any, of: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(value, of) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, of) for value in tree)
    return of(tree)
