"""Serialises objects as data: reading the bytes can't run code, whatever their origin.

The bytes are a pickle. A reader accepts only opcodes that build data: numbers, text, containers, tensors, arrays, and
our own dataclasses. Other classes and functions are refused by name.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from lightning_pipes.ir import PipelineError


class NotPlainError(PipelineError):
    """Bytes that contain more than data, or that this module has not written."""


def dumps(thing: Any, aside: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Return the bytes of any object that pickles; tensors come back as plain ones on the CPU.

    Args:
        aside: gets the contents of tensors and arrays, which are part of the bytes otherwise.
    """
    stream = io.BytesIO()
    _Writer(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=aside).dump(thing)
    return stream.getvalue()


def loads(data: bytes | memoryview, aside: Iterable[Any] = ()) -> Any:
    """Return the object of these bytes, if it is data.

    Raises:
        NotPlainError: it is not.
    """
    try:
        return _Reader(io.BytesIO(data), buffers=aside).load()
    except NotPlainError:
        raise
    except Exception as error:  # damaged bytes may lead to any error
        raise NotPlainError(f"bytes that are not an object: {type(error).__name__}: {error}") from error


def allow_classes(*kinds: type) -> None:
    """Accept objects of these classes as data: creating one must have no other effect."""
    _kinds.update(kinds)


class _Writer(pickle.Pickler):
    """Moves tensors and arrays out of the stream; a view does not drag along its larger storage."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return _reduce_tensor(thing)
        if isinstance(thing, torch.layout):
            return _layout, (str(thing),)
        if isinstance(thing, enum.Enum):
            return type(thing), (thing.value,)
        if type(thing) is np.ndarray or isinstance(thing, np.generic):
            array = np.asarray(thing)
            if array.dtype.kind in _NUMBERS and array.dtype.itemsize:
                whole = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                parts = pickle.PickleBuffer(whole.data), array.dtype.str, array.shape, isinstance(thing, np.generic)
                return _array, parts
        return NotImplemented


_Unpickler: Any = pickle._Unpickler  # the one in Python; type checkers do not know what is in it


class _Reader(_Unpickler):  # type: ignore[misc]
    """An unpickler in Python, so that each step can be checked."""

    dispatch = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if not _is_plain(found):
            raise NotPlainError(f"{module}.{name} is more than data")
        return found

    def _call(self) -> None:
        if not _is_callable(self.stack[-2]):
            raise NotPlainError(f"{self.stack[-2]} is not to be called")
        _Unpickler.load_reduce(self)

    def _make(self) -> None:
        if not isinstance(self.stack[-2], type):
            raise NotPlainError(f"{self.stack[-2]} is no class")
        _Unpickler.load_newobj(self)

    def _build(self) -> None:
        thing = self.stack[-2]
        if isinstance(thing, type) or not _is_plain(type(thing)):
            raise NotPlainError(f"{thing} is not to be changed")
        _Unpickler.load_build(self)

    dispatch[pickle.REDUCE[0]] = _call
    dispatch[pickle.NEWOBJ[0]] = _make
    dispatch[pickle.BUILD[0]] = _build
    for _code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        del dispatch[_code[0]]  # what data take no use of


_NUMBERS = "biufcMmSU"
"""Kinds of array whose bytes are what they are; others hold addresses."""
_OURS = ("lightning_pipes.", "torch.distributed.checkpoint.")
_kinds: set[Any] = {
    *(bytearray, complex, frozenset, range, set, slice),
    *(collections.OrderedDict, collections.deque, collections.Counter),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, torch.Size, torch.device),
    *(pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.WindowsPath),
}


def _is_plain(found: Any) -> bool:
    """Return whether it may be part of data: a class of plain objects, one of our constructors, or a constant."""
    if isinstance(found, torch.dtype | torch.memory_format) or found in _makers:
        return True
    return isinstance(found, type) and (_is_callable(found) or _is_record(found))


def _is_callable(found: Any) -> bool:
    """Return whether it may be called with any data."""
    if found in _makers:
        return True
    return isinstance(found, type) and (
        found in _kinds or found in pytree.SUPPORTED_NODES or (issubclass(found, enum.Enum) and _is_ours(found))
    )


def _is_record(found: type) -> bool:
    """Return whether its objects are made from their fields without calling their code."""
    return _is_ours(found) and (is_dataclass(found) or issubclass(found, tuple))


def _is_ours(found: type) -> bool:
    return found.__module__.startswith(_OURS)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    plain = tensor.detach().cpu()
    if type(plain) is not torch.Tensor or plain.layout != torch.strided or plain.is_quantized:
        return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    plain = plain.resolve_conj().resolve_neg()
    if plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
        plain = plain.clone()
    data = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    return _tensor, (pickle.PickleBuffer(data.numpy().data), plain.dtype, tuple(plain.shape), plain.stride())


def _tensor(buffer: Any, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    if not memoryview(buffer).nbytes:
        return torch.empty(shape, dtype=dtype)
    data = torch.frombuffer(buffer, dtype=torch.uint8).clone()
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), 0, shape, stride)


def _array(buffer: Any, dtype: str, shape: Sequence[int], single: bool) -> Any:
    kind = np.dtype(dtype)
    if kind.kind not in _NUMBERS:
        raise NotPlainError(f"an array of {kind} is more than data")
    array = np.ndarray(shape, kind, bytearray(buffer))
    return array[()] if single else array


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise NotPlainError(f"{name} is no layout of a tensor")
    return found


_makers = (_tensor, _array, _layout)
