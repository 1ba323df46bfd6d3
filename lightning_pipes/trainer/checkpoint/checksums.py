"""Checksums of checkpoint files, and the index of a sharded checkpoint. Checksums are made while they are written and
compared before they are read.

A file of torch's is a zip file with a checksum of each of its records, which torch does not look at when it reads. So
a file ends with a seal of our own, the CRC-32 of all bytes before it. Everybody else reads the file as ever: in a zip
file the seal is the comment, and a pickle ends before it. The CRC-32 of a GiB takes 0.3 s.

The index of a sharded checkpoint: where each tensor is, and the checksums of the files.

It is the pickle by which torch.distributed.checkpoint finds tensors. To unpickle it is to run what is in it; here it is
read by stand-ins, which only remember what they would have been made of.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from lightning_pipes.ir import PipelineError

_SEAL = b"\nlightning_pipes crc32 %08x\n"
_SEALED = re.compile(rb"\nlightning_pipes crc32 ([0-9a-f]{8})\n")
_LENGTH = len(_SEAL % 0)
_ZIP = b"PK\x03\x04"
_CHUNK = 2**20
WAY_OUT = "Use an earlier checkpoint, or another copy of this one"


class Sum(NamedTuple):
    """The size of a file in bytes and its CRC-32, which detect changes."""

    size: int
    crc32: int

    def check(self, path: Path) -> None:
        """Raise PipelineError if the file is another, or has changed."""
        if path.stat().st_size != self.size:
            raise damage_error(path, f"it has {path.stat().st_size} bytes, and {self.size} were written")
        with open(path, "rb") as file:
            if _crc_of(file, self.size) != self.crc32:
                raise damage_error(path, "its checksum is not the one that was written")


class ChecksumWriter:
    """A file written from start to end, with a running checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = Sum(0, 0)

    def write(self, data: Any) -> int:
        """Write data and add it to the checksum."""
        view = memoryview(data)
        self._file.write(view)
        self.sum = Sum(self.sum.size + view.nbytes, zlib.crc32(view, self.sum.crc32))
        return view.nbytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class SealedZip(ChecksumWriter):
    """A zip file in the making that gets a seal as its comment; torch.save writes to it, then `seal` is called."""

    _last = b""
    """The end of what was written, held back: in the last two bytes of a zip file is the length of its comment."""

    def write(self, data: Any) -> int:
        """Flush the file."""
        view = memoryview(data).cast("B")
        if view.nbytes:
            whole = view if view.nbytes > 1 else memoryview(self._last + bytes(view))
            if whole is view:
                super().write(self._last)
            super().write(whole[:-2])
            self._last = bytes(whole[-2:])
        return view.nbytes

    def seal(self) -> None:
        """Ends the file; nothing may be written after it. A file of another form, as of a patched torch.save, gets no
        seal."""
        if self._last != bytes(2):
            super().write(self._last)
            return
        super().write(_LENGTH.to_bytes(2, "little"))
        super().write(_SEAL % self.sum.crc32)


def seal(file: ChecksumWriter) -> None:
    """End a file of a form that says itself where it ends, such as a pickle."""
    file.write(_SEAL % file.sum.crc32)


def check(path: Path, sealed: bool = False) -> None:
    """Raise PipelineError, with the file and a way out, if a file's checksum differs.

    Of files without a seal, which other programs and older versions write, torch's checksums are compared instead.

    Args:
        sealed: the file is known to have a seal.
    """
    size = path.stat().st_size
    if size == 0:
        raise damage_error(path, "it is empty")
    with open(path, "rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
        content = max(0, size - _LENGTH)
        file.seek(content)
        found = _SEALED.fullmatch(file.read())
        if found is None and sealed:
            raise damage_error(path, "it does not end with its checksum")
        if found is not None:
            file.seek(0)
            if _crc_of(file, content) != int(found[1], 16):
                raise damage_error(path, "its checksum is not the one that was written")
        elif is_zip:
            _check_zip(path)


def _check_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as whole:
            broken = 0 < len(whole.comment) <= _LENGTH  # a seal that has changed, or its beginning
            for record in whole.infolist():
                if record.CRC and not broken:  # none: torch.serialization.set_crc32_options(False)
                    with whole.open(record) as file:
                        while file.read(_CHUNK):
                            pass
    except Exception as error:  # of any kind, as anything may be in the file
        raise damage_error(path, f"{type(error).__name__}: {error}") from error
    if broken:
        raise damage_error(path, "its checksum can't be read")


def _crc_of(file: IO[bytes], size: int) -> int:
    crc = 0
    while size and (data := file.read(min(size, _CHUNK))):
        crc, size = zlib.crc32(data, crc), size - len(data)
    return crc


def damage_error(path: str | os.PathLike[str], how: str) -> PipelineError:
    """Return an error that says so, and what can be done."""
    return PipelineError(f"the checkpoint {os.fspath(path)} is damaged: {how}. {WAY_OUT}")


INDEX = ".metadata"
"""The file; written last."""
_SUMS = "lightning_pipes_sums"


def is_sharded(path: Path) -> bool:
    """Return whether there is a sharded checkpoint at a path."""
    return (path / INDEX).is_file()


@dataclass(frozen=True)
class Place:
    """Where a part of a tensor is: the name of the file, and a part of its bytes, which torch.load reads.

    Attributes:
        corner: where the part begins in the whole tensor, by axis.
        shape: of the part.
    """

    file: str
    offset: int
    length: int
    corner: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Index:
    """The parts of a sharded checkpoint.

    Attributes:
        shapes: of each tensor, by its name.
        places: of the parts of each tensor, by its name.
        sums: of each file but this one; None where an older version has written none.
    """

    shapes: Mapping[str, tuple[int, ...]]
    places: Mapping[str, Sequence[Place]]
    sums: Mapping[str, Sum] | None

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Return the index of a folder; nothing in the file is run.

        Raises:
            PipelineError: there is none, it is damaged, or anything else is in it.
        """
        path = folder / INDEX
        if not folder.exists():
            raise PipelineError(f"there is no {folder}; name the folder that checkpoint='sharded' has written")
        if folder.is_file():
            raise PipelineError(
                f"{folder} is one file, as checkpoint='full' writes it, and no folder of parts; use the file as it is"
            )
        if not path.is_file():
            raise PipelineError(
                f"{folder} is no folder with a complete checkpoint: it has no {INDEX}, which is written last. {WAY_OUT}"
            )
        check(path)
        try:
            with open(path, "rb") as file:
                found = _Reader(file).load()
            sums = (found.state["planner_data"] or {}).get(_SUMS)
            tensors = {name: each.state for name, each in found.state["state_dict_metadata"].items()}
            shapes = {name: _numbers(each["size"]) for name, each in tensors.items()}
            parts = {
                (name, _numbers(chunk.state["offsets"])): _numbers(chunk.state["sizes"])
                for name, each in tensors.items()
                for chunk in each["chunks"]
            }
            places: dict[str, list[Place]] = {}
            for key, value in found.state["storage_data"].items():
                name, corner = key.state["fqn"], _numbers(key.state["offset"])
                places.setdefault(name, []).append(_place(value.state, name, corner, parts[name, corner]))
            known = None if sums is None else {_file(f): Sum(int(n), int(c)) for f, (n, c) in sums.items()}
            index = cls(shapes, places, known)
        except Exception as error:  # of any kind, as anything may be in the file
            raise damage_error(path, f"{type(error).__name__}: {error}") from error
        if index.sums is not None:
            check(path, sealed=True)
        return index


def with_sums(sums: Mapping[str, Sum]) -> dict[str, Any]:
    """Return the entries that the index has to hold, in its `planner_data`, for `Index.read` to find the sums."""
    return {_SUMS: {name: tuple(found) for name, found in sums.items()}}


def _numbers(size: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size in an index."""
    return tuple(map(int, *size.arguments))


def _place(entry: Mapping[str, Any], name: str, corner: tuple[int, ...], shape: tuple[int, ...]) -> Place:
    if entry.get("transform_descriptors"):
        raise ValueError(f"{name} is stored in a form that checkpoint='sharded' does not write")
    return Place(_file(entry["relative_path"]), int(entry["offset"]), int(entry["length"]), corner, shape)


def _file(name: str) -> str:
    """Return the name of a file that is in the folder itself."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is outside of the folder")
    return name


class _Thing:
    """Stands for an object of any class, and knows what that would have been made of."""

    def __new__(cls, *arguments: Any) -> _Thing:
        made = object.__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Reads a pickle, and neither imports nor calls anything that is named in it."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Thing,), {})  # of its own for each, so that no pickle can change what others get
