"""Checksums of checkpoint files, and the index of a sharded checkpoint.

Checksums are computed while files are written, and compared before files are read.

A file of torch is a zip file with a checksum for each of its records, but torch does not verify them when it reads the
file. Therefore, our files end with a seal, the CRC-32 of all bytes before it. Other programs can still read the files:
in a zip file the seal is the comment, and a pickle ends before the seal. The CRC-32 of one GiB takes 0.3 s.

The index of a sharded checkpoint contains the location of each tensor and the checksums of the files. It is the pickle
in which torch.distributed.checkpoint looks up tensors. Unpickling can run code from the file. To prevent this, the
index is read with placeholder objects that only store the arguments of the original objects.
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

_SEAL_FORMAT = b"\nlightning_pipes crc32 %08x\n"
_SEAL_PATTERN = re.compile(rb"\nlightning_pipes crc32 ([0-9a-f]{8})\n")
_SEAL_BYTES = len(_SEAL_FORMAT % 0)
_ZIP_MAGIC = b"PK\x03\x04"
_READ_BYTES = 2**20
CHECKPOINT_WAY_OUT = "Use an earlier checkpoint, or another copy of this one"


class Sum(NamedTuple):
    """The size of a file in bytes and its CRC-32, by which changes are detected."""

    size: int
    crc32: int

    def check(self, path: Path) -> None:
        """Raise PipelineError if the file has another size or another checksum."""
        if path.stat().st_size != self.size:
            raise damage_error(path, f"it has {path.stat().st_size} bytes, and {self.size} were written")
        with open(path, "rb") as file:
            if _crc_of(file, self.size) != self.crc32:
                raise damage_error(path, "its contents do not match the checksum that was written")


class ChecksumWriter:
    """File that is written from start to end and updates a checksum."""

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
    """Zip file that gets a seal as its comment. torch.save writes to it, and then `seal` has to be called."""

    _last = b""
    """The last two bytes, which are not written yet, because they contain the length of the comment of a zip file."""

    def write(self, data: Any) -> int:
        """Write data, except for the last two bytes, and add it to the checksum."""
        view = memoryview(data).cast("B")
        if view.nbytes:
            whole = view if view.nbytes > 1 else memoryview(self._last + bytes(view))
            if whole is view:
                super().write(self._last)
            super().write(whole[:-2])
            self._last = bytes(whole[-2:])
        return view.nbytes

    def seal(self) -> None:
        """Write the seal. Nothing may be written after it.

        A file in another format, such as the file of a patched torch.save, gets no seal.
        """
        if self._last != bytes(2):
            super().write(self._last)
            return
        super().write(_SEAL_BYTES.to_bytes(2, "little"))
        super().write(_SEAL_FORMAT % self.sum.crc32)


def seal(file: ChecksumWriter) -> None:
    """Write the seal of a file in a format that marks its own end, such as a pickle."""
    file.write(_SEAL_FORMAT % file.sum.crc32)


def check(path: Path, sealed: bool = False) -> None:
    """Raise PipelineError if the checksum of a file is wrong. The message contains the path and a way out.

    Files of other programs and of older versions have no seal. For these files, the checksums of torch are verified.

    Args:
        path: the file.
        sealed: whether the file must have a seal.
    """
    size = path.stat().st_size
    if size == 0:
        raise damage_error(path, "it is empty")
    with open(path, "rb") as file:
        is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        content = max(0, size - _SEAL_BYTES)
        file.seek(content)
        found = _SEAL_PATTERN.fullmatch(file.read())
        if found is None and sealed:
            raise damage_error(path, "it does not end with its checksum")
        if found is not None:
            file.seek(0)
            if _crc_of(file, content) != int(found[1], 16):
                raise damage_error(path, "its contents do not match the checksum that was written")
        elif is_zip:
            _check_zip(path)


def _check_zip(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as whole:
            broken = 0 < len(whole.comment) <= _SEAL_BYTES  # a seal that was changed or cut off
            for record in whole.infolist():
                if record.CRC and not broken:  # 0 with torch.serialization.set_crc32_options(False)
                    with whole.open(record) as file:
                        while file.read(_READ_BYTES):
                            pass
    except Exception as error:  # any error, because the file may contain anything
        raise damage_error(path, f"{type(error).__name__}: {error}") from error
    if broken:
        raise damage_error(path, "its checksum can't be read")


def _crc_of(file: IO[bytes], size: int) -> int:
    crc = 0
    while size and (data := file.read(min(size, _READ_BYTES))):
        crc, size = zlib.crc32(data, crc), size - len(data)
    return crc


def damage_error(path: str | os.PathLike[str], how: str) -> PipelineError:
    """Return an error with the damage and a way out."""
    return PipelineError(f"the checkpoint {os.fspath(path)} is damaged: {how}. {CHECKPOINT_WAY_OUT}")


INDEX_FILE = ".metadata"
"""The name of the index, which is written last."""
_CHECKSUMS_KEY = "lightning_pipes_sums"


def is_sharded(path: Path) -> bool:
    """Return whether the path is a folder with a sharded checkpoint."""
    return (path / INDEX_FILE).is_file()


@dataclass(frozen=True)
class Place:
    """The location of a part of a tensor: a file, and the range of bytes that torch.load reads.

    Attributes:
        file: the name of the file.
        offset: the first byte.
        length: the number of bytes.
        corner: the position of the part's first element in the whole tensor, by axis.
        shape: the shape of the part.
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
        shapes: the shape of each tensor, by its name.
        places: the locations of the parts of each tensor, by its name.
        sums: the checksum of each file except the index. None if an older version has written the checkpoint.
    """

    shapes: Mapping[str, tuple[int, ...]]
    places: Mapping[str, Sequence[Place]]
    sums: Mapping[str, Sum] | None

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Return the index of a folder without running code from the file.

        Raises:
            PipelineError: there is no index, it is damaged, or it has unexpected content.
        """
        path = folder / INDEX_FILE
        if not folder.exists():
            raise PipelineError(f"there is no {folder}; name the folder that checkpoint='sharded' has written")
        if folder.is_file():
            raise PipelineError(
                f"{folder} is a single file, as written with checkpoint='full', and not a folder with a sharded "
                "checkpoint. Use the file as it is"
            )
        if not path.is_file():
            raise PipelineError(
                f"The folder {folder} is not a complete sharded checkpoint: it has no {INDEX_FILE}, which is written "
                f"last. {CHECKPOINT_WAY_OUT}"
            )
        check(path)
        try:
            with open(path, "rb") as file:
                found = _Reader(file).load()
            sums = (found.state["planner_data"] or {}).get(_CHECKSUMS_KEY)
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
        except Exception as error:  # any error, because the file may contain anything
            raise damage_error(path, f"{type(error).__name__}: {error}") from error
        if index.sums is not None:
            check(path, sealed=True)
        return index


def with_sums(sums: Mapping[str, Sum]) -> dict[str, Any]:
    """Return the `planner_data` of an index that contains the checksums, so that `Index.read` finds them."""
    return {_CHECKSUMS_KEY: {name: tuple(found) for name, found in sums.items()}}


def _numbers(size: Any) -> tuple[int, ...]:
    """Return the numbers of a torch.Size in an index."""
    return tuple(map(int, *size.arguments))


def _place(entry: Mapping[str, Any], name: str, corner: tuple[int, ...], shape: tuple[int, ...]) -> Place:
    if entry.get("transform_descriptors"):
        raise ValueError(f"{name} is stored in a form that checkpoint='sharded' does not write")
    return Place(_file(entry["relative_path"]), int(entry["offset"]), int(entry["length"]), corner, shape)


def _file(name: str) -> str:
    """Return the name of a file, after checking that it is directly in the folder."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is outside of the folder")
    return name


class _Thing:
    """Placeholder for an object of any class, which stores the arguments and the state of the object."""

    def __new__(cls, *arguments: Any) -> _Thing:
        made = object.__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Unpickler that does not import or call anything that the pickle refers to."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Thing,), {})  # a new class each time, so that a pickle cannot affect others
