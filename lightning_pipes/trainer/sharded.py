"""Checkpoints as folders, to which every rank adds what it holds, in the format of torch.distributed.checkpoint.

All tensors of the model and the optimizers are in that format, by name. What else Lightning saves is in one file of the
same folder, together with small values of the optimizers that are no tensors. torch's own `save` has collectives that
wait for dead ranks; the ranks agree by `Control` here, and everything after that needs a store only.
"""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load

from lightning_pipes.engine.points import point
from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.control import Control
from lightning_pipes.trainer.files import existing, put, remove, replacing, save, saying_why, sync, temporary_for
from lightning_pipes.trainer.optimizers import numbered

REST = "checkpoint.pt"
"""The file with everything but the tensors of the model and the optimizers."""
INDEX = ".metadata"
"""The file by which torch.distributed.checkpoint finds tensors; written last."""
_TENSORS = "lightning_pipes_tensors"
"""In the rest: where each tensor belongs, by its name in the index."""
_ORDER = "lightning_pipes_order"
"""In the rest: the keys of the whole state dict."""
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 3.0
"""How long after a failure a rank of another host, which may be gone, may take to say that its part is written."""


@dataclass
class Part:
    """What one rank adds to a checkpoint.

    Attributes:
        number: of the checkpoint; the same on every rank.
        path: of the whole checkpoint.
        temporary: the folder that becomes it.
        plan: which tensors this rank writes.
        planner: has them.
        metadata: of the whole, on the first rank only.
        rest: what goes into the file `REST`, on the first rank only.
    """

    number: int
    path: Path
    temporary: Path
    plan: SavePlan
    planner: DefaultSavePlanner
    metadata: Metadata | None
    rest: dict[str, Any]


def plan_part(checkpoint: Mapping[str, Any], order: Sequence[str], path: Path, number: int, control: Control) -> Part:
    """Agrees with the other ranks on who writes what; no tensor is sent, and none is written.

    Args:
        checkpoint: Lightning's, with this rank's part of the state dict and of each optimizer's `named_state`.
        order: the keys of the whole state dict.
        number: different for every checkpoint, the same on every rank.
    """
    tensors, index, small = _split(checkpoint)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(tensors, None, control.position == 0)
    first = control.ranks[0]
    found = control.gather((planner.create_local_plan(), index, small), first)
    message, metadata, rest = None, None, dict[str, Any]()
    if found is not None:
        plans, metadata = planner.create_global_plan([plan for plan, _, _ in found])
        temporary = temporary_for(path)
        temporary.mkdir()
        rest = _without_tensors(checkpoint)
        rest[_ORDER] = list(order)
        rest[_TENSORS] = {name: place for _, places, _ in found for name, place in places.items()}
        for _, _, values in reversed(found):  # of what several ranks hold, the first one's counts
            for place, value in values.items():
                _set(rest, place, value)
        message = temporary, FileSystemWriter(temporary).prepare_global_plan(plans)
    temporary, plans = control.broadcast(message, first)
    plan = planner.finish_plan(plans[control.position])
    return Part(number, path, temporary, plan, planner, metadata, rest)


def write_part(part: Part, control: Control, store: Any) -> None:
    """Writes this rank's part; the first rank then waits for the others, and gives the whole its name.

    Uses no collective, so that it can run in any thread.

    Args:
        store: through which the ranks say that they are done.

    Raises:
        PipelineError: another rank could not write its part.
    """
    writer = FileSystemWriter(part.temporary)
    own = control.position
    point("checkpoint.write")
    try:
        if own == 0:
            save(part.rest, part.temporary / REST)
        with saying_why():
            written = writer.write_data(part.plan, part.planner)
            written.wait()
        point("checkpoint.part")
        if own > 0:
            store.set(_key(part, own), pickle.dumps(written.value()))
            return
        others = range(1, control.size)
        results = [written.value(), *(_result_of(position, part, control, store) for position in others)]
        lost = {r.storage_data.relative_path for of_rank in results for r in of_rank}
        lost = {name for name in lost if not (part.temporary / name).exists()}
        if lost:
            raise PipelineError(
                f"{', '.join(sorted(lost))} can't be seen on rank {control.ranks[0]}; checkpoint='sharded' needs a "
                "folder that all hosts share"
            )
        assert part.metadata is not None
        writer.finish(part.metadata, results)
        sync(part.temporary)
        put(part.temporary, part.path)
    except BaseException as error:
        if own == 0:
            remove(part.temporary)
        else:
            store.set(_key(part, own), pickle.dumps(f"{type(error).__name__}: {error}"))
            if isinstance(error, FileNotFoundError) and not part.temporary.exists():
                control.watch.learn_reason()
                raise PipelineError(f"rank {control.ranks[0]} has given it up") from error
        raise


def _result_of(position: int, part: Part, control: Control, store: Any) -> Any:
    """What another rank wrote, when it has."""
    key, rank = _key(part, position), control.ranks[position]
    failed_at = None
    while not store.check([key]):
        if control.watch.error is not None and failed_at is None:
            failed_at = time.monotonic()
        if control.ended(position) or (failed_at is not None and time.monotonic() > failed_at + _GRACE_SECONDS):
            raise PipelineError(f"rank {rank} has ended before its part was written")
        time.sleep(_POLL_SECONDS)
    result = pickle.loads(store.get(key))
    store.delete_key(key)
    if isinstance(result, str):
        raise PipelineError(f"rank {rank} could not write its part: {result}")
    return result


def _key(part: Part, position: int) -> str:
    return f"{part.number}/{position}"


class ShardedCheckpoint:
    """A checkpoint in a folder, of which every rank reads what it needs.

    Args:
        path: the folder.
        weights_only: as torch.load takes it.
    """

    def __init__(self, path: Path, weights_only: bool | None = None) -> None:
        self._path = path
        self._rest = torch.load(path / REST, map_location="cpu", weights_only=weights_only)
        self._tensors: dict[str, Any] = self._rest.pop(_TENSORS)
        self._order: list[str] = self._rest.pop(_ORDER)

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether there is one."""
        return (path / INDEX).is_file()

    def checkpoint(self, into: Mapping[str, Any]) -> dict[str, Any]:
        """Lightning's checkpoint, but for what the optimizers have by parameter.

        Args:
            into: a state dict whose tensors are overwritten and taken, where names, shapes and types are the same. If
                some are on `meta`, the checkpoint's state dict reads a tensor when it is asked for it.
        """
        found = {**self._rest}
        places = {place[1]: name for name, place in self._tensors.items() if place[0] == "state_dict"}
        order = dict.fromkeys(key for key in self._order if key in places or key in found["state_dict"])
        keys = list({**order, **found["state_dict"], **places})
        if any(value.is_meta for value in into.values() if isinstance(value, Tensor)):
            found["state_dict"] = _Weights(keys, found["state_dict"], places, self._read)
        else:
            weights = self._read({name: into.get(key) for key, name in places.items()})
            values = {**found["state_dict"], **{key: weights[name] for key, name in places.items()}}
            found["state_dict"] = {key: values[key] for key in keys}
        return found

    def optimizer_states(self, wanted: Sequence[Sequence[str]] | None = None) -> list[dict[str, Any]]:
        """One process's `state_dict` of each optimizer, with the states of the `wanted` parameters, or of all."""
        saved = self._rest["optimizer_states"]
        names = {
            name: place
            for name, place in self._tensors.items()
            if place[0] == "optimizer_states" and (wanted is None or place[2] in wanted[place[1]])
        }
        tensors = self._read(dict.fromkeys(names))
        states = [{name: dict(state) for name, state in one["state"].items()} for one in saved]
        for name, (_, number, parameter, entry) in names.items():
            states[number].setdefault(parameter, {})[entry] = tensors[name]
        return [numbered(state, one["param_groups"]) for state, one in zip(states, saved, strict=True)]

    def _read(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors by their names in the index; into those that are given, where they fit."""
        reader = FileSystemReader(self._path)
        metadata = reader.read_metadata().state_dict_metadata
        tensors: dict[str, Any] = {}
        for name, given in names.items():
            about: Any = metadata[name]
            fits = isinstance(given, Tensor) and given.shape == about.size and given.dtype == about.properties.dtype
            tensors[name] = given if fits else torch.empty(about.size, dtype=about.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as every rank reads by itself
            load(tensors, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
        return tensors


class _Weights(Mapping[str, Any]):
    """A state dict whose tensors are read one by one."""

    def __init__(
        self,
        keys: Sequence[str],
        others: Mapping[str, Any],
        places: Mapping[str, str],
        read: Callable[[Mapping[str, Any]], dict[str, Any]],
    ) -> None:
        self._keys, self._others, self._places, self._read = keys, others, places, read

    def __getitem__(self, key: str) -> Any:
        if key in self._places:
            name = self._places[key]
            return self._read({name: None})[name]
        return self._others[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def consolidate(folder: str | Path, file: str | Path) -> None:
    """Makes an ordinary Lightning checkpoint, one file, from a folder that `checkpoint="sharded"` has written.

    Needs no processes and memory for the whole. The file loads with `load_from_checkpoint` and resumes anywhere.

    Raises:
        PipelineError: the folder has no complete checkpoint.
    """
    source = existing(Path(folder))
    if not ShardedCheckpoint.is_at(source):
        raise PipelineError(f"{folder} is no folder with a complete checkpoint: it has no {INDEX}")
    parts = ShardedCheckpoint(source, weights_only=False)
    checkpoint = parts.checkpoint({})
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = parts.optimizer_states()
    with replacing(Path(file)) as temporary:
        save(checkpoint, temporary)


def _split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], dict[Any, Any]]:
    """The tensors by a name of their own, where each of them belongs, and what else is at such places."""
    tensors: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    small: dict[Any, Any] = {}
    places: list[tuple[Any, Any]] = [(("state_dict", key), value) for key, value in checkpoint["state_dict"].items()]
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", ())):
        for parameter, state in optimizer["state"].items():
            places += [(("optimizer_states", number, parameter, entry), value) for entry, value in state.items()]
    for place, value in places:
        if isinstance(value, Tensor):
            name = "/".join(map(str, place))
            tensors[name], index[name] = value, place
        else:
            small[place] = value
    return tensors, index, small


def _without_tensors(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    rest = {**checkpoint, "state_dict": {}}
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = [{**optimizer, "state": {}} for optimizer in checkpoint["optimizer_states"]]
    return rest


def _set(rest: dict[str, Any], place: Sequence[Any], value: Any) -> None:
    """Puts a value where `_split` found it."""
    if place[0] == "state_dict":
        rest["state_dict"][place[1]] = value
    else:
        _, number, parameter, entry = place
        rest["optimizer_states"][number]["state"].setdefault(parameter, {})[entry] = value
