"""Checkpoints as folders with a part from every rank, in the format of torch.distributed.checkpoint.

All tensors of the model and the optimizers are stored in this format, by name. The other data that Lightning saves are
in one file of the same folder, together with small values of the optimizers that are not tensors. The `save` function
of torch uses collectives, which would wait for dead ranks. Here, the ranks agree on the plan through `Control`, and
everything after that only needs a store.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_pipes.engine.compute.reducer import is_distributed
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.ir import PipelineError, check_type, short_repr
from lightning_pipes.trainer.checkpoint.checksums import (
    INDEX_FILE,
    ChecksumWriter,
    Index,
    Place,
    Sum,
    damage_error,
    is_sharded,
    seal,
    with_sums,
)
from lightning_pipes.trainer.checkpoint.files import (
    find_existing,
    load,
    put,
    raise_os_error,
    remove,
    replace_path,
    save,
    sync_folder,
    temporary_for,
)
from lightning_pipes.trainer.optimizers.optimizers import number_state_dict
from lightning_pipes.trainer.private_lightning import storage_info
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.replicas import own_box, shard_from_local

REST_FILE = "checkpoint.pt"
"""The file with everything except the tensors of the model and the optimizers."""
_TENSORS_KEY = "lightning_pipes_tensors"
"""The key in `REST_FILE` for the place of each tensor in the checkpoint, by its name in the index."""
_ORDER_KEY = "lightning_pipes_order"
"""The key in `REST_FILE` for the keys of the whole state dict."""
_WRITER_POLL_SECONDS = 0.02
_REPORT_SECONDS = 3.0
"""The time after a failure for which to wait for the report of a rank on another host, which may be gone."""


@dataclass
class Part:
    """The part of a checkpoint that one rank writes.

    Attributes:
        number: the number of the checkpoint, which is the same on every rank.
        path: the path of the whole checkpoint.
        temporary: the folder that is renamed to `path`.
        plan: the tensors that this rank writes.
        planner: the planner, which holds the tensors.
        metadata: the metadata of the whole checkpoint, on the first rank only.
        rest: the content of the file `REST_FILE`, on the first rank only.
    """

    number: int
    path: Path
    temporary: Path
    plan: SavePlan
    planner: DefaultSavePlanner
    metadata: Metadata | None
    rest: dict[str, Any]


def plan_part(checkpoint: Mapping[str, Any], order: Sequence[str], path: Path, number: int, control: Control) -> Part:
    """Agree with the other ranks on the part that each rank writes. No tensor is sent or written.

    Args:
        checkpoint: Lightning's checkpoint with this rank's part of the state dict and of each optimizer's
            `named_state`. Each rank writes its shard of a sharded tensor. Tensors that several ranks have are written
            once.
        order: the keys of the whole state dict.
        path: the path of the whole checkpoint.
        number: a number that is different for every checkpoint and the same on every rank.
        control: the communication between the ranks.
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
        rest[_ORDER_KEY] = list(order)
        rest[_TENSORS_KEY] = {name: place for _, places, _ in found for name, place in places.items()}
        for _, _, values in reversed(found):  # if several ranks have a value, the value of the first rank is used
            for place, value in values.items():
                _set(rest, place, value)
        message = temporary, FileSystemWriter(temporary).prepare_global_plan(plans)
    temporary, plans = control.broadcast(message, first)
    plan = planner.finish_plan(plans[control.position])
    return Part(number, path, temporary, plan, planner, metadata, rest)


def write_part(part: Part, control: Control, store: Any) -> None:
    """Write the part of this rank. The first rank then waits for the other ranks and renames the folder.

    The function does not use collectives, so it can run in any thread.

    Args:
        part: the result of `plan_part`.
        control: the communication between the ranks.
        store: the store in which the ranks report that they have finished.

    Raises:
        PipelineError: another rank could not write its part.
    """
    writer = FileSystemWriter(part.temporary)
    writer.fs = files = _Files()
    own = control.position
    fault_point("checkpoint.write")
    try:
        if own == 0:
            files.sums[REST_FILE] = save(part.rest, part.temporary / REST_FILE)
        with raise_os_error():
            written = writer.write_data(part.plan, part.planner)
            written.wait()
        fault_point("checkpoint.part")
        if own > 0:
            store.set(_key(part, own), _as_json(written.value(), files.sums))
            return
        results, sums = [written.value()], files.sums
        for position in range(1, control.size):
            of_rank, sums_of_rank = _from_json(_receive_report(position, part, control, store), control.ranks[position])
            results.append(of_rank)
            sums.update(sums_of_rank)
        lost = [name for name in sums if not (part.temporary / name).exists()]
        if lost:
            raise PipelineError(
                f"{', '.join(sorted(lost))} can't be seen on rank {control.ranks[0]}; checkpoint='sharded' needs a "
                "folder that all hosts share"
            )
        assert part.metadata is not None
        part.metadata.planner_data = with_sums(sums)
        writer.finish(part.metadata, results)
        sync_folder(part.temporary)
        put(part.temporary, part.path)
    except BaseException as error:
        if own == 0:
            remove(part.temporary)
        else:
            store.set(_key(part, own), json.dumps({"error": f"{type(error).__name__}: {error}"}))
            if isinstance(error, FileNotFoundError) and not part.temporary.exists():
                control.watch.raise_reason()
                raise PipelineError(f"rank {control.ranks[0]} has given it up") from error
        raise


class _Files(FileSystem):
    """File system that creates new files with a checksum, and seals the index.

    Attributes:
        sums: the checksum of each file, by its name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, Sum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a new file for writing."""
        name = Path(path).name
        with open(path, mode.replace("w", "x")) as file:
            made = ChecksumWriter(file)
            yield made
            if name.startswith(INDEX_FILE):
                seal(made)
                file.flush()
                os.fsync(file.fileno())
            else:
                self.sums[name] = made.sum


def _receive_report(position: int, part: Part, control: Control, store: Any) -> str | bytes:
    """Wait for the report of another rank about its part, and return it."""
    key, rank = _key(part, position), control.ranks[position]
    failed_at = None
    while not store.check([key]):
        if control.watch.error is not None and failed_at is None:
            failed_at = time.monotonic()
        if control.ended(position) or (failed_at is not None and time.monotonic() > failed_at + _REPORT_SECONDS):
            raise PipelineError(f"rank {rank} has ended before its part was written")
        time.sleep(_WRITER_POLL_SECONDS)
    content: str | bytes = store.get(key)
    store.delete_key(key)
    return content


def _as_json(written: Sequence[WriteResult], sums: Mapping[str, Sum]) -> str:
    """Return the locations of the tensors that a rank has written, and the checksums of its files."""
    tensors = [
        [r.index.fqn, list(r.index.offset or ()), r.index.index, r.size_in_bytes, s.relative_path, s.offset, s.length]
        for r in written
        for s in [r.storage_data]
    ]
    return json.dumps({"tensors": tensors, "sums": sums})


def _from_json(content: str | bytes, rank: int) -> tuple[list[WriteResult], dict[str, Sum]]:
    """Return the input of `_as_json`, or raise PipelineError if the rank has failed."""
    found = json.loads(content)
    if "error" in found:
        raise PipelineError(f"rank {rank} could not write its part: {found['error']}")
    written = [
        WriteResult(MetadataIndex(name, torch.Size(corner), number), size, storage_info(file, offset, length))
        for name, corner, number, size, file, offset, length in found["tensors"]
    ]
    return written, {name: Sum(*values) for name, values in found["sums"].items()}


def _key(part: Part, position: int) -> str:
    return f"{part.number}/{position}"


class ShardedCheckpoint:
    """A checkpoint in a folder, from which every rank reads its own part.

    Args:
        path: the folder.
        weights_only: as in torch.load, for everything except the tensors of the model and the optimizers.

    Raises:
        PipelineError: a file is missing, belongs to another checkpoint, or has changed. Files with tensors are verified
            when the first tensor is read from them.
    """

    def __init__(self, path: Path, weights_only: bool | None = None) -> None:
        self._path = path
        self._index = Index.read(path)
        self._whole = set[str]()
        """The files whose checksums were verified."""
        files = (place.file for places in self._index.places.values() for place in places)
        for name in {REST_FILE, *files, *(self._index.sums or ())}:
            if not (path / name).is_file():
                raise damage_error(path, f"{name} is missing")
        self._check(REST_FILE)
        self._rest = load(path / REST_FILE, map_location="cpu", weights_only=weights_only)
        try:
            self._tensors: dict[str, Any] = self._rest.pop(_TENSORS_KEY)
            self._order: list[str] = self._rest.pop(_ORDER_KEY)
        except (AttributeError, KeyError, TypeError) as error:
            raise damage_error(path, f"{REST_FILE} does not have the format of a sharded checkpoint") from error
        unknown = sorted(set(self._tensors) - set(self._index.places))
        if unknown:
            raise damage_error(
                path, f"{INDEX_FILE} does not know {unknown[0]}, which {REST_FILE} names: they are of different saves"
            )

    def checkpoint(self, into: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return Lightning's checkpoint without the optimizer states of parameters.

        Args:
            into: a state dict whose tensors are overwritten and returned, if their names, shapes and dtypes are the
                same. If it is None, the state dict of the checkpoint reads a tensor when it is accessed.
        """
        found = {**self._rest}
        places = {place[1]: name for name, place in self._tensors.items() if place[0] == "state_dict"}
        order = dict.fromkeys(key for key in self._order if key in places or key in found["state_dict"])
        keys = list({**order, **found["state_dict"], **places})
        lazy = _Weights(keys, found["state_dict"], places, self._read)
        found["state_dict"] = lazy if into is None else {key: _copy_into(lazy[key], into.get(key)) for key in keys}
        return found

    def optimizer_states(self, wanted: Sequence[Mapping[str, Tensor]] | None = None) -> list[dict[str, Any]]:
        """Return the `state_dict` of each optimizer, as in a single process.

        Args:
            wanted: for each optimizer, the parameters whose states are read, by name. States are sharded in the same
                way as these parameters. If it is None, the whole states of all parameters are read.
        """
        saved = self._rest["optimizer_states"]
        states = [{name: dict(state) for name, state in one["state"].items()} for one in saved]
        for name, place in self._tensors.items():
            if place[0] == "optimizer_states" and (wanted is None or place[2] in wanted[place[1]]):
                _, number, parameter, entry = place
                like = None if wanted is None else wanted[number][parameter]
                states[number].setdefault(parameter, {})[entry] = self._read(name, like)
        return [number_state_dict(state, one["param_groups"]) for state, one in zip(states, saved, strict=True)]

    def _read(self, name: str, like: Any = None) -> Tensor:
        """Read a tensor by its name in the index, or only the shard of this rank if `like` is sharded."""
        whole = self._index.shapes[name]
        own = own_box(like) if isinstance(like, Tensor) and tuple(like.shape) == whole else None
        corner, shape = own or ((0,) * len(whole), whole)
        found: Tensor | None = None
        missing = math.prod(shape)
        for place in self._index.places[name]:
            begins = tuple(map(max, corner, place.corner))
            ends = tuple(min(c + n, d + m) for c, n, d, m in zip(corner, shape, place.corner, place.shape, strict=True))
            sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
            if min(sizes, default=1) <= 0:
                continue
            part = self._load(name, place)
            missing -= math.prod(sizes)
            if sizes == shape == place.shape:
                found = part
                continue
            found = part.new_empty(shape) if found is None else found
            _slice(found, begins, corner, sizes).copy_(_slice(part, begins, place.corner, sizes))
        if missing:
            raise damage_error(self._path, f"{missing} elements of {name} are in no file")
        if found is None:  # the shard is empty
            found = self._load(name, self._index.places[name][0]).new_empty(shape)
        return found if own is None else shard_from_local(found, like)

    def _load(self, name: str, place: Place) -> Tensor:
        """Read a part of a tensor."""
        self._check(place.file)
        with open(self._path / place.file, "rb") as file:
            file.seek(place.offset)
            data = io.BytesIO(file.read(place.length))
        try:
            found: Tensor = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # an older version has written no sums
            raise damage_error(self._path, f"{name} in {place.file}: {type(error).__name__}: {error}") from error
        if tuple(found.shape) != place.shape:
            raise damage_error(self._path, f"{name} in {place.file} has not the shape that {INDEX_FILE} has")
        return found

    def _check(self, file: str) -> None:
        if self._index.sums is not None and file not in self._whole:
            if file not in self._index.sums:
                raise damage_error(self._path, f"{INDEX_FILE} has no checksum of {file}")
            self._index.sums[file].check(self._path / file)
            self._whole.add(file)


class _Weights(MutableMapping[str, Any]):
    """State dict that reads its tensors one by one. Values that are assigned to a key replace the tensor."""

    def __init__(
        self,
        keys: Sequence[str],
        others: Mapping[str, Any],
        places: Mapping[str, str],
        read: Callable[[str, Any], Tensor],
    ) -> None:
        self._keys, self._others, self._places, self._read = dict.fromkeys(keys), {**others}, {**places}, read

    def __getitem__(self, key: str) -> Any:
        return self.read_like(key, None)

    def read_like(self, key: str, like: Any) -> Any:
        """Return a value, or only this rank's shard of a tensor in the checkpoint if `like` is sharded."""
        return self._read(self._places[key], like) if key in self._places else self._others[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._places.pop(key, None)
        self._keys[key], self._others[key] = None, value

    def __delitem__(self, key: str) -> None:
        del self._keys[key]
        self._places.pop(key, None)
        self._others.pop(key, None)

    def __contains__(self, key: object) -> bool:
        """Return whether the key exists, without reading its tensor."""
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def consolidate(folder: str | Path, file: str | Path, weights_only: bool | None = None) -> None:
    """Convert a folder that `checkpoint="sharded"` has written to an ordinary Lightning checkpoint in one file.

    The function runs in a single process, which needs memory for the whole checkpoint. The file can be loaded with
    `load_from_checkpoint`, and any number of ranks can resume from it.

    Args:
        folder: the folder of the sharded checkpoint.
        file: the file to write.
        weights_only: as in torch.load. False also loads objects of any class, such as hyperparameters. This runs code
            from the folder, so only use it for folders from a source that you trust.

    Raises:
        InputError: an argument has the wrong type.
        PipelineError: the folder does not contain a complete checkpoint, or the checkpoint is damaged.
        pickle.UnpicklingError: the checkpoint contains objects that require weights_only=False.
    """
    for name, value, kind in (
        ("folder", folder, str | Path),
        ("file", file, str | Path),
        ("weights_only", weights_only, bool | None),
    ):
        check_type(f"consolidate: {name}", value, kind)
    try:
        found = find_existing(Path(folder))
        is_sharded(found)
    except OSError as error:  # an invalid file name
        raise PipelineError(f"folder {short_repr(folder)} can't be read: {error.strerror}") from error
    parts = ShardedCheckpoint(found, weights_only)
    checkpoint = parts.checkpoint({})
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = parts.optimizer_states()
    with replace_path(Path(file)) as temporary:
        save(checkpoint, temporary)


def _copy_into(value: Any, given: Any) -> Any:
    """Return the value, in the memory of the given tensor if both have the same shape and dtype."""
    both = isinstance(value, Tensor) and isinstance(given, Tensor)
    return given.detach().copy_(value) if both and given.shape == value.shape and given.dtype == value.dtype else value


def _slice(part: Tensor, begins: Sequence[int], corner: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a view of the box that begins at `begins` in the whole tensor, in a part that begins at `corner`."""
    for axis, (begin, at, size) in enumerate(zip(begins, corner, sizes, strict=True)):
        part = part.narrow(axis, begin - at, size)
    return part


def keep_shards(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint without tensors and states that are not sharded, because another rank writes them."""
    tensors, index, _ = _split(checkpoint)
    kept = _without_tensors(checkpoint)
    for name, place in index.items():
        if is_distributed(tensors[name]):
            _set(kept, place, tensors[name])
    return kept


def _split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], dict[Any, Any]]:
    """Return the tensors by unique names, the place of each of them, and the other values at such places."""
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
    """Store a value at the place where `_split` found it."""
    if place[0] == "state_dict":
        rest["state_dict"][place[1]] = value
    else:
        _, number, parameter, entry = place
        rest["optimizer_states"][number]["state"].setdefault(parameter, {})[entry] = value
