"""The part of a strategy that saves and loads: the state of a module that is spread out, from `setup_environment`
on, and where training is in its data and random numbers."""

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
from lightning_pipes.trainer.checkpoint.resumable import LoaderPass, ResumableLoader, State, make_resumable
from lightning_pipes.trainer.checkpoint.saving import Saver
from lightning_pipes.trainer.checkpoint.stored_modules import complete_modules
from lightning_pipes.trainer.module.deferred import has_meta
from lightning_pipes.trainer.module.optimizer_shards import OptimizerShards
from lightning_pipes.trainer.module.optimizers import OptimizerLayout
from lightning_pipes.trainer.module.pipelined import CutModule
from lightning_pipes.trainer.module.remote_tensors import RemoteTensor
from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.plan.request import Placement
from lightning_pipes.trainer.private_lightning import optimizer_to_device
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.ranks import Ranks, RankStatus
from lightning_pipes.trainer.ranks.replicas import gather_uneven, gather_whole, has_shards, shard_like

if TYPE_CHECKING:
    from lightning_pipes.trainer.checkpoint.sharded import ShardedCheckpoint

KEY = "lightning_pipes"
"""Where a checkpoint has what other strategies do not know of."""
_NAMES = "names"
"""Where the part of a failing rank has the names of its parameters, by optimizer."""
_MEETING = "meeting"
"""Where it has the text that only parts of one failure share."""
_MEETING_SECONDS = 6.0
"""How long a failing rank waits for the others before it writes its part: those that are blocked are ended then."""
_WRITING_SECONDS = 600.0
_log = logging.getLogger(__name__)


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
        """Remember what `state` gave; a checkpoint of another strategy has nothing to remember."""
        own = checkpoint.get(KEY, {})
        self._loaded = to_native(own["data"]) if "data" in own else None
        self._waiting = list(self._loaded["loaders"]) if self._loaded is not None else []

    def prepare_loader(self, loader: object) -> object:
        """Return the loader that Lightning should take for a training loader: called for one after the other, in their
        order.

        Loaders that can save their own state, and what is no DataLoader, stay as they are.
        """
        state = self._waiting.pop(0) if self._waiting else None
        if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict"):
            return loader
        made = make_resumable(loader)
        if state is not None:
            made.resume_from(state, self._compare)
        return made

    def go_on(self, trainer: pl.Trainer, patches: Patches) -> None:
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
            patches.callback(private.ignore_warnings(".*your dataloader is not resumable.*"))
        set_random_state(state["random"], self._device)
        if not state["between_epochs"]:
            private.forget_unfinished_batch(trainer)
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

    def forget_loaded(self) -> None:
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
        return {"data": to_portable(found)}


def to_portable(tree: Any) -> Any:
    """Return the same values without NumPy's arrays, which careful readers of checkpoints refuse."""
    return _map_leaves(tree, lambda leaf: torch.from_numpy(leaf.copy()) if isinstance(leaf, np.ndarray) else leaf)


def to_native(tree: Any) -> Any:
    """Return the other direction of `to_portable`; torch's own random states are bytes, NumPy's are not."""

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
    """Checkpoints of one pipeline's ranks: in one file that the first rank gathers, or in parts.

    Args:
        sharded: in parts.
        writing: by what, and when.
        status: of this rank.

    Attributes:
        data: where training is in its data.
        sharded: in parts.
        container: the path of what the last run has cut; random numbers depend on which layers are counted.
        shards: has the parts of optimizer states that this replica steps; None where states are whole.
        joins_parts: the parts that ranks write after a failure become whole checkpoints; True until one did not.
        placement: returns where the layers of the run are now, and what was asked for; None before there is a run.
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

    def model_state(self, cut: CutModule) -> dict[str, Any]:
        """Return the state dict of the whole module where it is written, as the form of the checkpoints has it."""
        state = cut.local_state(outside=self._ranks.grid.position == 0)
        if self.sharded:
            found: dict[str, Any] = gather_uneven(state)
            return found
        return self._gather(cut, gather_whole(state))

    def gather_state(self, cut: CutModule, local: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dict of another module with the spread of `cut`.

        It is whole on the first rank and empty on the others. Collective.
        """
        return self._gather(cut, cut.select_own(local, outside=self._ranks.grid.position == 0))

    def _gather(self, cut: CutModule, own: Mapping[str, Any]) -> dict[str, Any]:
        self._ranks.pipeline.connect()
        return gather_model(cut, own, self._ranks.pipeline) if self._ranks.grid.is_in_first_pipeline else {}

    def optimizer_state(self, optimizer: Optimizer, layout: OptimizerLayout) -> dict[str, Any]:
        """Return the same of an optimizer."""
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
        cut: CutModule | None,
        training: bool,
        storage_options: Any | None,
    ) -> None:
        """Write what `model_state` and `optimizer_state` gave, and more; all ranks call it.

        Args:
            cut: what is saved; None if the module is whole.
            training: goes on meanwhile, if it may.

        Raises:
            InputError: there are storage options, which checkpoints in parts do not take.
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
        cut: CutModule,
        layouts: Sequence[OptimizerLayout],
        step: str | None,
        storage_options: Any | None,
    ) -> None:
        """Write the part of this rank, to `path` with `.rank1of2` at its end, as collective calls may not end now.

        Where all ranks call this soon, after the same `step`, the first one joins their parts to a whole checkpoint.

        Args:
            checkpoint: what this rank has.
            layouts: of the optimizers.
            step: a text that is the same on ranks whose parts belong together; None where parts are never joined.
        """
        self._add_place(checkpoint, trainer)
        grid, watch = self._ranks.grid, self._ranks.control.watch
        paths = [f"{path}.rank{rank}of{grid.size}" for rank in range(grid.size)]
        part = complete_modules({**checkpoint, _NAMES: [layout.names for layout in layouts]}, cut)
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
                part[_MEETING] = texts[0][0]
            else:  # others may have seen all texts just before this rank gave up
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
                self._join_parts(checkpoint, own, part[_MEETING], path, cut, layouts)
            except Exception as error:  # the run's own error counts
                is_joined = False
                _log.warning("%s is not written, and the parts of the ranks stay: %s", path, error)
            for name in paths if is_joined else ():
                with suppress(OSError):
                    self._writing.io.remove_checkpoint(name)
        # Together, as what started the ranks may end all of them.
        self.joins_parts = bool(watch.exchange_texts(f"{topic} joined", "" if is_joined else None, _WRITING_SECONDS))

    def meet_after_failure(self) -> None:
        """Wait until the other ranks are here, too, or seconds have passed."""
        self._after_failure += 1
        self._ranks.control.watch.exchange_texts(f"checkpoint {self._after_failure}", "", _MEETING_SECONDS)

    def _join_parts(
        self,
        checkpoint: dict[str, Any],
        paths: Sequence[str],
        meeting: str,
        path: str | Path,
        cut: CutModule,
        layouts: Sequence[OptimizerLayout],
    ) -> None:
        """Write the whole checkpoint.

        Raises:
            PipelineError: a part is not of this failure.
            OSError: one can't be read, or the whole not written.
        """
        parts = [load(Path(name), map_location="cpu", mmap=True, weights_only=False) for name in paths]
        for name, part in zip(paths, parts, strict=True):
            if part.get(_MEETING) != meeting:
                raise PipelineError(f"{name} on rank 0 is of an earlier failure; the ranks have no common file system")
        checkpoint["state_dict"] = cut.in_order([part["state_dict"] for part in parts])
        for number, (layout, local) in enumerate(zip(layouts, checkpoint.get("optimizer_states", []), strict=False)):
            states = [
                {
                    part[_NAMES][number][n]: state
                    for n, state in part["optimizer_states"][number].get("state", {}).items()
                }
                for part in reversed(parts)
            ]
            checkpoint["optimizer_states"][number] = layout.whole_state(local, states)
        self._writing.io.save_checkpoint(complete_modules(checkpoint, cut), path)

    def _add_place(self, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
        fault_point("checkpoint")
        if "optimizer_states" in checkpoint:  # not for weights alone
            checkpoint[KEY] = self.data.state(trainer)
            checkpoint[KEY]["module"] = self.container
            if self.placement is not None:
                checkpoint[KEY]["placement"] = self.placement().data()

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, after pending writes."""
        self._saver.remove(path, self._writing.io)

    def check(self) -> None:
        """Raise PipelineError if something could not be written."""
        self._saver.check()

    def finish(self, down: bool) -> None:
        """Wait for the checkpoints that are being written; where the ranks are `down`, an earlier failure is
        not to be covered."""
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
        """Return a checkpoint, from a file that is one, or a folder.

        Args:
            running: while training, tuners go back to where they started.
            read: reads a file as Lightning does.
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
            own = checkpoint.get(KEY, {})
            self._resumed = own.get("module")
            self._placed = Placement.from_data(own["placement"]) if "placement" in own else None
        return checkpoint

    def resumed_container(self) -> str | None:
        """Return the path of the container in the last loaded checkpoint; once."""
        found, self._resumed = self._resumed, None
        return found

    def resumed_placement(self) -> Placement | None:
        """Return where layers were when the checkpoint was written that was loaded last; once."""
        found, self._placed = self._placed, None
        return found

    def load_later(self, state: Mapping[str, Any], strict: bool) -> None:
        """Keep weights for a module without values until it is cut."""
        self._waiting = state, strict

    def load_waiting(self, cut: CutModule) -> None:
        """Load what `load_later` kept."""
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
        """Load what belongs to this rank, from the checkpoint that was loaded last."""
        if self._parts is not None:
            parameters = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
            named = zip(layouts, parameters, strict=False)
            states = self._parts.optimizer_states([dict(zip(y.names, own, strict=True)) for y, own in named])
        load_optimizers(optimizers, layouts, states, device)
        if self.shards is not None:
            for optimizer in optimizers:
                self.shards.shard_states(optimizer)


def gather_model(cut: CutModule, local: Mapping[str, Any], control: Control) -> dict[str, Any]:
    """Return the state dict of the whole module on the first rank, in its own order of keys; empty on other ranks.

    Args:
        local: this rank's part of it.
    """
    parts = control.gather(local, control.ranks[0])
    return {} if parts is None else cut.in_order(parts)


def load_model(cut: CutModule, state: Mapping[str, Any], strict: bool) -> None:
    """Load from a state dict of the whole module what lives on this rank.

    Raises:
        PipelineError: with `strict`, the keys are not those of the whole module.
    """
    if strict and set(state) != set(cut.keys):
        different = sorted(set(state) ^ set(cut.keys))
        raise PipelineError(f"the checkpoint's keys are not those of the module; only in one: {different[:5]}")
    read: Any = getattr(state, "read_like", lambda key, _: state[key])  # parts of a checkpoint are read as shards
    with cut.scope.module_view(True):  # batch normalization asks for what it has
        own = cut.module.state_dict()
        here = {key for key, value in own.items() if key in state and not isinstance(value, RemoteTensor)}
        loaded = {key: _like(read(key, value), value) if key in here else value for key, value in own.items()}
        cut.module.load_state_dict(loaded)


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
    """Load from one process's `state_dict` of each optimizer what belongs to this rank."""
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
