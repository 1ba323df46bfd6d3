"""Saving and loading for a strategy.

A checkpoint has the state of a module that is distributed over ranks. It also has the position of the training in its
data, and the states of the random number generators.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import lightning.pytorch as pl
import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from lightning_pipes.engine.compute.rng import random_state, set_random_state
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.ir import InputError, PipelineError, short_repr
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.checkpoint.checksums import is_sharded
from lightning_pipes.trainer.checkpoint.files import (
    AtomicCheckpointIO,
    CheckpointWriter,
    find_existing,
    load,
    load_mapped,
    local_path,
)
from lightning_pipes.trainer.checkpoint.saving import Saver
from lightning_pipes.trainer.checkpoint.stored_modules import complete_modules
from lightning_pipes.trainer.cuts.cut import ModuleCut
from lightning_pipes.trainer.data.resumable import LoaderPass, ResumableLoader, State, make_resumable
from lightning_pipes.trainer.optimizers.optimizer_shards import OptimizerShards
from lightning_pipes.trainer.optimizers.optimizers import OptimizerLayout
from lightning_pipes.trainer.plan.request import Placement
from lightning_pipes.trainer.private_lightning import optimizer_to_device
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.ranks import Ranks, RankStatus
from lightning_pipes.trainer.ranks.replicas import gather_uneven, gather_whole, has_shards, shard_like
from lightning_pipes.trainer.user.patches import Patches
from lightning_pipes.trainer.user.remote_tensors import RemoteTensor
from lightning_pipes.trainer.weights.deferred import has_meta

if TYPE_CHECKING:
    from lightning_pipes.trainer.checkpoint.sharded import ShardedCheckpoint

CHECKPOINT_KEY = "lightning_pipes"
"""The key of a checkpoint that holds values which other strategies do not use."""
_NAMES_KEY = "names"
"""The key, in the part of a failing rank, of the parameter names of each optimizer."""
_MEETING_KEY = "meeting"
"""The key of a text that only the parts of the same failure have in common."""
_MEETING_SECONDS = 6.0
"""The time that a failing rank waits for other ranks before it writes its part. Blocked ranks have ended by then."""
_WRITING_SECONDS = 600.0
_log = logging.getLogger(__name__)


class TrainingData:
    """The training loaders of one Trainer.

    Args:
        device: the device whose random state is saved together with the random state of the CPU.
        compare: whether to warn if a resumed sampler does not return the same indices as before. This is set on one
            rank only, whose state was saved.
    """

    def __init__(self, device: torch.device, compare: bool) -> None:
        self._device = device
        self._compare = compare
        self._loaded: State | None = None
        self._waiting: list[State | None] = []

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Store the part of a checkpoint that `state` has made. Checkpoints of other strategies have no such part."""
        own = checkpoint.get(CHECKPOINT_KEY, {})
        self._loaded = to_native(own["data"]) if "data" in own else None
        self._waiting = list(self._loaded["loaders"]) if self._loaded is not None else []

    def prepare_loader(self, loader: object) -> object:
        """Return the loader that Lightning should use in place of a training loader.

        This method must be called for one loader after the other, in their order. Loaders that can save their own
        state, and objects that are not a DataLoader, are returned unchanged.
        """
        state = self._waiting.pop(0) if self._waiting else None
        if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
            return loader
        made = make_resumable(loader)
        if state is not None:
            made.resume_from(state, self._compare)
        return made

    def go_on(self, trainer: pl.Trainer, patches: Patches) -> None:
        """Restore the random states and the position of the checkpoint.

        This is called last before the first batch, because other hooks may have drawn random numbers.
        """
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
            patches.callback(private.ignore_warnings(".*your dataloader is not resumable.*"))
        set_random_state(state["random"], self._device)
        if not state["between_epochs"]:
            private.forget_unfinished_batch(trainer)
            private.finish_batch(trainer, state["validation_follows"])
            return
        private.begin_epoch(trainer)
        for loader, earlier in zip(loaders, state["loaders"], strict=False):
            if isinstance(loader, ResumableLoader) and earlier is not None:
                loader.draw_as(earlier)  # again, because Lightning loads ahead if the data have no length

    def epoch_starts(self, trainer: pl.Trainer) -> None:
        """Begin every epoch that is not resumed with the first batch."""
        for loader in private.training_loaders(trainer):
            if isinstance(loader, ResumableLoader):
                loader.begin_anew()

    def forget_loaded(self) -> None:
        """Drop loaded states, which are valid for one run only."""
        self._loaded, self._waiting = None, []

    def state(self, trainer: pl.Trainer) -> State:
        """Return the state of the training data for a checkpoint, as plain values and tensors."""
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
        return {"data": to_portable(found)}


def to_portable(tree: Any) -> Any:
    """Return the same values without NumPy arrays.

    Checkpoints that are read with `weights_only` must not contain NumPy arrays.
    """
    return _map_leaves(tree, lambda leaf: torch.from_numpy(leaf.copy()) if isinstance(leaf, np.ndarray) else leaf)


def to_native(tree: Any) -> Any:
    """Return the inverse of `to_portable`.

    Random states of torch are tensors of bytes and stay tensors. Random states of NumPy have another type.
    """

    def back(leaf: Any) -> Any:
        return leaf.numpy() if isinstance(leaf, torch.Tensor) and leaf.dtype is not torch.uint8 else leaf

    return _map_leaves(tree, back)


def _map_leaves(tree: Any, of: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map_leaves(value, of) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_leaves(value, of) for value in tree)
    return of(tree)


class Checkpointing:
    """Writes and reads the checkpoints of the ranks of one pipeline.

    A checkpoint is one file, for which the first rank gathers the state, or a folder to which each rank adds its part.

    Args:
        ranks: the ranks of the run.
        sharded: whether each rank writes its own part.
        writing: specifies the plugin that writes checkpoints, and whether it writes in the background.
        status: the status of this rank.

    Attributes:
        data: the position of the training in its data.
        sharded: whether each rank writes its own part.
        container: the path of the container that the last run has cut. Random numbers depend on the numbering of its
            layers.
        shards: the parts of the optimizer states that this replica steps, or None if states are whole.
        joins_parts: whether the parts that ranks write after a failure are joined into a whole checkpoint. It becomes
            False once the parts cannot be joined.
        placement: returns the current position of the layers and the requested partition. None before a run exists.
    """

    def __init__(self, ranks: Ranks, sharded: bool, writing: CheckpointWriter, status: RankStatus) -> None:
        self._ranks = ranks
        self.sharded = sharded
        self._writing = writing
        self._status = status
        self._writers = ranks.control if sharded else ranks.pipeline
        self._saver = Saver(self._writers)
        self.shards: OptimizerShards | None = None
        self.data = TrainingData(ranks.device, ranks.control.position == 0)
        self.container: str | None = None
        self.placement: Callable[[], Placement] | None = None
        self.joins_parts = True
        self._after_failure = 0
        self._resumed: str | None = None
        self._placed: Placement | None = None
        self._parts: ShardedCheckpoint | None = None
        self._waiting: tuple[Mapping[str, Any], bool] | None = None

    # ---- saving

    def model_state(self, cut: ModuleCut) -> dict[str, Any]:
        """Return the state dict of the module in the format of the checkpoints.

        The result is empty on ranks that do not write checkpoints.
        """
        state = cut.local_state(outside=self._ranks.grid.position == 0)
        if self.sharded:
            found: dict[str, Any] = gather_uneven(state)
            return found
        return self._gather(cut, gather_whole(state))

    def gather_state(self, cut: ModuleCut, local: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dict of another module, which distributes its layers in the same way as `cut`.

        This method is collective. The state dict is whole on the first rank and empty on the other ranks.
        """
        return self._gather(cut, cut.select_own(local, outside=self._ranks.grid.position == 0))

    def _gather(self, cut: ModuleCut, own: Mapping[str, Any]) -> dict[str, Any]:
        self._ranks.pipeline.connect()
        return gather_model(cut, own, self._ranks.pipeline) if self._ranks.grid.is_in_first_pipeline else {}

    def optimizer_state(self, optimizer: Optimizer, layout: OptimizerLayout) -> dict[str, Any]:
        """Return the state dict of an optimizer in the format of the checkpoints.

        The result is empty on ranks that do not write checkpoints.
        """
        local = optimizer.state_dict() if self.shards is None else self.shards.gather_states(optimizer)
        if self.sharded:
            return layout.named_state(gather_uneven(local))
        local = gather_whole(local)
        self._ranks.pipeline.connect()
        if not self._ranks.grid.is_in_first_pipeline:
            return {}
        return gather_optimizer(local, layout, self._ranks.pipeline)

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        trainer: pl.Trainer,
        cut: ModuleCut | None,
        training: bool,
        storage_options: Any | None,
    ) -> None:
        """Write a checkpoint with the results of `model_state` and `optimizer_state`. All ranks must call this method.

        Args:
            checkpoint: the checkpoint of Lightning, which is changed in place.
            path: the file or folder to write.
            trainer: the Trainer.
            cut: the module to save, or None if the module is whole.
            training: whether training may continue while the checkpoint is written in the background.
            storage_options: the options for the CheckpointIO plugin, or None.

        Raises:
            InputError: storage options were passed, which sharded checkpoints do not support.
        """
        if self.sharded and storage_options is not None:
            raise InputError(
                f"checkpoint='sharded' writes a folder without a CheckpointIO, and can't hand storage_options to it: "
                f"got {short_repr(storage_options)}. Leave them out, or use checkpoint='full'"
            )
        _log.debug("checkpoint: save %s", path)
        self._add_place(checkpoint, trainer)
        self._writers.connect()
        is_first = self._ranks.grid.is_in_first_pipeline
        if not (is_first or self.sharded):
            return
        background = self._writing.background and training
        with self._status.report_errors():
            if self.sharded:
                from lightning_pipes.trainer.checkpoint.sharded import keep_shards

                order = list(checkpoint["state_dict"]) if cut is None else cut.keys
                part = checkpoint if is_first else keep_shards(checkpoint)
                if cut is not None:
                    part = complete_modules(part, cut, share=False)
                self._saver.save_parts(part, order, path, background)
            else:
                write = partial(self._writing.io.save_checkpoint, storage_options=storage_options)
                if cut is not None and self._writers.position == 0:
                    checkpoint = complete_modules(checkpoint, cut)
                self._saver.save(checkpoint, path, write, background)

    def save_after_failure(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        trainer: pl.Trainer,
        cut: ModuleCut,
        layouts: Sequence[OptimizerLayout],
        step: str | None,
        storage_options: Any | None,
    ) -> None:
        """Write the part of this rank after a failure, when collective calls can no longer be used.

        The part is written to `path` with a suffix such as `.rank1of2`. If all ranks call this method soon and after
        the same `step`, the first rank joins their parts into a whole checkpoint.

        Args:
            checkpoint: the checkpoint of this rank.
            path: the path of the whole checkpoint.
            trainer: the Trainer.
            cut: the module to save.
            layouts: the layout of each optimizer.
            step: a text that is the same on all ranks whose parts belong together, or None if parts are never joined.
            storage_options: the options for the CheckpointIO plugin, or None.
        """
        self._add_place(checkpoint, trainer)
        grid, watch = self._ranks.grid, self._ranks.control.watch
        paths = [f"{path}.rank{rank}of{grid.size}" for rank in range(grid.size)]
        part = complete_modules({**checkpoint, _NAMES_KEY: [layout.names for layout in layouts]}, cut)
        self._after_failure += 1
        topic, place = f"checkpoint {self._after_failure}", f"{step} {path}"
        written = f"{topic} written"
        if step is None or self.sharded or self.shards is not None or storage_options is not None:
            self.joins_parts = False
        if type(self._writing.io) is not AtomicCheckpointIO or local_path(path) is None:
            self.joins_parts = False
        if self.joins_parts:
            texts = [
                text.partition(" ") for text in watch.exchange_texts(topic, f"{uuid4().hex} {place}", _MEETING_SECONDS)
            ]
            self.joins_parts = {where for _, _, where in texts} == {place}
            if self.joins_parts:
                part[_MEETING_KEY] = texts[0][0]
            else:  # other ranks may have received all texts just before this rank gave up
                watch.exchange_texts(written, None, 0.0)
        if grid.position > 0 and self.joins_parts:
            local = cut.local_state(outside=False)
            part["state_dict"] = {key: value for key, value in checkpoint["state_dict"].items() if key in local}
        try:
            self._writing.io.save_checkpoint(part, paths[grid.rank], storage_options)
        except BaseException:
            watch.exchange_texts(written, None, 0.0)
            raise
        if not self.joins_parts:
            return
        is_joined = bool(watch.exchange_texts(written, "", _WRITING_SECONDS))
        if grid.rank == 0 and is_joined:
            try:
                own = [paths[rank] for rank in grid.pipeline]
                self._join_parts(checkpoint, own, part[_MEETING_KEY], path, cut, layouts)
            except Exception as error:  # the error of the run itself is more important
                is_joined = False
                _log.warning("%s is not written, and the parts of the ranks stay: %s", path, error)
            for name in paths if is_joined else ():
                with suppress(OSError):
                    self._writing.io.remove_checkpoint(name)
        # The ranks end together, because the launcher may end all of them once one has ended.
        self.joins_parts = bool(watch.exchange_texts(f"{topic} joined", "" if is_joined else None, _WRITING_SECONDS))

    def meet_after_failure(self) -> None:
        """Wait until the other ranks call this method, too, for a few seconds at most."""
        self._after_failure += 1
        self._ranks.control.watch.exchange_texts(f"checkpoint {self._after_failure}", "", _MEETING_SECONDS)

    def _join_parts(
        self,
        checkpoint: dict[str, Any],
        paths: Sequence[str],
        meeting: str,
        path: str | Path,
        cut: ModuleCut,
        layouts: Sequence[OptimizerLayout],
    ) -> None:
        """Read the parts of all ranks and write the whole checkpoint.

        Raises:
            PipelineError: a part belongs to a different failure.
            OSError: a part cannot be read, or the whole checkpoint cannot be written.
        """
        parts = [load(Path(name), map_location="cpu", mmap=True, weights_only=False) for name in paths]
        for name, part in zip(paths, parts, strict=True):
            if part.get(_MEETING_KEY) != meeting:
                raise PipelineError(f"{name} on rank 0 is of an earlier failure; the ranks have no common file system")
        checkpoint["state_dict"] = cut.in_order([part["state_dict"] for part in parts])
        for number, (layout, local) in enumerate(zip(layouts, checkpoint.get("optimizer_states", []), strict=False)):
            states = [
                {
                    part[_NAMES_KEY][number][n]: state
                    for n, state in part["optimizer_states"][number].get("state", {}).items()
                }
                for part in reversed(parts)
            ]
            checkpoint["optimizer_states"][number] = layout.whole_state(local, states)
        self._writing.io.save_checkpoint(complete_modules(checkpoint, cut), path)

    def _add_place(self, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        fault_point("checkpoint")
        if "optimizer_states" in checkpoint:  # absent if only weights are saved
            checkpoint[CHECKPOINT_KEY] = self.data.state(trainer)
            checkpoint[CHECKPOINT_KEY]["module"] = self.container
            if self.placement is not None:
                checkpoint[CHECKPOINT_KEY]["placement"] = self.placement().data()

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint after all pending writes."""
        self._saver.remove(path, self._writing.io)

    def check(self) -> None:
        """Raise a PipelineError if a checkpoint could not be written."""
        self._saver.check()

    def finish(self, down: bool) -> None:
        """Wait for checkpoints that are being written.

        Args:
            down: whether a rank has already failed. Errors of writing are then not raised, so that they do not hide the
                failure.
        """
        if down:
            self._saver.close()
        else:
            with self._status.report_errors():
                self._saver.wait()

    # ---- loading

    def load(
        self,
        path: str | Path,
        weights_only: bool | None,
        module: pl.LightningModule,
        running: bool,
        read: Callable[..., dict[str, Any]],
    ) -> dict[str, Any]:
        """Return a checkpoint that is read from a file or a folder.

        Args:
            path: the path of the checkpoint.
            weights_only: the argument of `torch.load`.
            module: the module of the run.
            running: whether a run is active, in which tuners restore an earlier state.
            read: reads a file in the same way as Lightning.
        """
        _log.debug("checkpoint: load %s", path)
        self._parts = None
        checkpoint: dict[str, Any] | None = None
        local = local_path(path)
        if local is not None:
            path = find_existing(local)
            if is_sharded(path):
                from lightning_pipes.trainer.checkpoint.sharded import ShardedCheckpoint

                self._parts = ShardedCheckpoint(path, weights_only)
                lazily = running or has_meta(module) or has_shards(module)
                checkpoint = self._parts.checkpoint(None if lazily else module.state_dict())
        if checkpoint is None and (has_meta(module) or has_shards(module)):
            checkpoint = load_mapped(self._writing.io, path, weights_only)
        if checkpoint is None:
            checkpoint = read(path, weights_only)
        if not running:
            self.data.load(checkpoint)
            own = checkpoint.get(CHECKPOINT_KEY, {})
            self._resumed = own.get("module")
            self._placed = Placement.from_data(own["placement"]) if "placement" in own else None
        return checkpoint

    def resumed_container(self) -> str | None:
        """Return the path of the container in the last loaded checkpoint, and forget it."""
        found, self._resumed = self._resumed, None
        return found

    def resumed_placement(self) -> Placement | None:
        """Return the placement of the layers in the last loaded checkpoint, and forget it."""
        found, self._placed = self._placed, None
        return found

    def load_later(self, state: Mapping[str, Any], strict: bool) -> None:
        """Keep the weights for a module on `meta` until the module is cut."""
        self._waiting = state, strict

    def load_waiting(self, cut: ModuleCut) -> None:
        """Load the weights that `load_later` has kept."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            load_model(cut, *waiting)

    def load_optimizers(
        self,
        optimizers: Sequence[Optimizer],
        layouts: Sequence[OptimizerLayout],
        states: Sequence[Mapping[str, Any]],
        device: torch.device,
    ) -> None:
        """Load the optimizer states of this rank from the checkpoint that was loaded last."""
        if self._parts is not None:
            parameters = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
            named = zip(layouts, parameters, strict=False)
            states = self._parts.optimizer_states([dict(zip(y.names, own, strict=True)) for y, own in named])
        load_optimizers(optimizers, layouts, states, device)
        if self.shards is not None:
            for optimizer in optimizers:
                self.shards.shard_states(optimizer)


def gather_model(cut: ModuleCut, local: Mapping[str, Any], control: Control) -> dict[str, Any]:
    """Return the state dict of the whole module on the first rank, and {} on other ranks.

    Args:
        cut: the module, whose order of keys is used.
        local: the part of the state dict that this rank has.
        control: the control channel of the ranks.
    """
    parts = control.gather(local, control.ranks[0])
    return {} if parts is None else cut.in_order(parts)


def load_model(cut: ModuleCut, state: Mapping[str, Any], strict: bool) -> None:
    """Load the values of this rank from a state dict of the whole module.

    Raises:
        PipelineError: `strict` is set, and the keys differ from the keys of the whole module.
    """
    if strict and set(state) != set(cut.keys):
        different = sorted(set(state) ^ set(cut.keys))
        raise PipelineError(
            "the keys of the checkpoint differ from the keys of the module. Keys that only one of them has: "
            f"{different[:5]}. Load a checkpoint of the same module, or set strict_loading=False"
        )
    read: Any = getattr(state, "read_like", lambda key, _: state[key])  # sharded checkpoints are read by shards
    with cut.scope.module_view(True):  # batch normalization reads its own state
        own = cut.module.state_dict()
        here = {key for key, value in own.items() if key in state and not isinstance(value, RemoteTensor)}
        loaded = {key: _like(read(key, value), value) if key in here else value for key, value in own.items()}
        cut.module.load_state_dict(loaded)


def _like(value: Any, own: Any) -> Any:
    """Return a loaded value, sharded in the same way as `own`."""
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
    """Load the states of this rank from the `state_dict` of each optimizer in training with one process."""
    for optimizer, layout, whole in zip(optimizers, layouts, states, strict=False):
        own = layout.local_state(whole)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        # Copy the tensors, because they may be views of a file that will be overwritten.
        own["state"] = {
            number: pytree.tree_map_only(torch.Tensor, partial(_copy_like, own=parameters[number]), state)
            for number, state in own["state"].items()
        }
        optimizer.load_state_dict(own)
        optimizer_to_device(optimizer, device)
