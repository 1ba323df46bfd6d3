"""Checksums of checkpoint files, made while they are written and compared before they are read.

A file of torch's is a zip file with a checksum of each of its records, which torch does not look at when it reads. So
a file ends with a seal of our own, the CRC-32 of all bytes before it. Everybody else reads the file as ever: in a zip
file the seal is the comment, and a pickle ends before it. The CRC-32 of a GiB takes 0.3 s.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
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
        """Raises PipelineError if the file is another, or has changed."""
        if path.stat().st_size != self.size:
            raise damaged(path, f"it has {path.stat().st_size} bytes, and {self.size} were written")
        with open(path, "rb") as file:
            if _crc_of(file, self.size) != self.crc32:
                raise damaged(path, "its checksum is not the one that was written")


class Summing:
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


class SealedZip(Summing):
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


def seal(file: Summing) -> None:
    """Ends a file of a form that says itself where it ends, such as a pickle."""
    file.write(_SEAL % file.sum.crc32)


def check(path: Path, sealed: bool = False) -> None:
    """Raise PipelineError, with the file and a way out, if a file's checksum differs.

    Of files without a seal, which other programs and older versions write, torch's checksums are compared instead.

    Args:
        sealed: the file is known to have a seal.
    """
    size = path.stat().st_size
    if size == 0:
        raise damaged(path, "it is empty")
    with open(path, "rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
        content = max(0, size - _LENGTH)
        file.seek(content)
        found = _SEALED.fullmatch(file.read())
        if found is None and sealed:
            raise damaged(path, "it does not end with its checksum")
        if found is not None:
            file.seek(0)
            if _crc_of(file, content) != int(found[1], 16):
                raise damaged(path, "its checksum is not the one that was written")
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
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    if broken:
        raise damaged(path, "its checksum can't be read")


def _crc_of(file: IO[bytes], size: int) -> int:
    crc = 0
    while size and (data := file.read(min(size, _CHUNK))):
        crc, size = zlib.crc32(data, crc), size - len(data)
    return crc


def damaged(path: str | os.PathLike[str], how: str) -> PipelineError:
    """An error that says so, and what can be done."""
    return PipelineError(f"the checkpoint {os.fspath(path)} is damaged: {how}. {WAY_OUT}")
