"""Fast access to the state of NumPy's global generator, which NumPy returns in 50 microseconds and sets in 35.

The memory of the generator is compared with its content at the last read, because mostly no number was drawn in
between. NumPy does not document the layout of this memory. Therefore, the layout is first checked on a new generator.
If it differs from the expected layout, each state is read from NumPy and set by NumPy.

The generator may also hold the second of a pair of normal numbers outside this memory. A state with such a number is
always read from NumPy. The number is missed only in one case: between two calls, the user goes back to an earlier state
and then draws normal numbers until the memory is the same as at the last read.
"""

from __future__ import annotations

import ctypes
import struct
from collections import OrderedDict
from functools import cache
from typing import Any

import numpy as np

State = Any
"""A state as returned by `np.random.get_state`; it must not be changed."""
_POSITION = struct.Struct("=i")
_SIZE = 624 * 4 + _POSITION.size
_CACHED = 3
"""The index in a state of the flag for a second normal number that is stored for the next call."""


_KEPT = 8
_raws: OrderedDict[int, tuple[bytes, State]] = OrderedDict()
"""The last states that were read and have no stored normal number, by id, each with the memory of the generator."""


def numpy_state() -> State:
    """Return the same as `np.random.get_state()`."""
    raw = _raw(_generator())
    if raw is not None and _raws:
        last, held = _raws[next(reversed(_raws))]
        if last == raw:
            return held
    state: State = np.random.get_state()
    if raw is not None and not state[_CACHED]:
        _raws[id(state)] = raw, state
        if len(_raws) > _KEPT:
            _raws.popitem(last=False)
    return state


def set_numpy_state(state: State) -> None:
    """Do the same as `np.random.set_state(state)`."""
    generator = _generator()
    now = _raw(generator)
    if now is None or id(state) not in _raws:
        np.random.set_state(state)
        _raws.clear()  # the last read state may differ by a stored normal number
        return
    _raws.move_to_end(id(state))
    raw, _ = _raws[id(state)]
    if now != raw:
        ctypes.memmove(_address(generator), raw, _SIZE)
    np.random.set_bit_generator(generator)  # type: ignore[attr-defined]  # a stored normal number is discarded


def _generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


def _raw(generator: Any) -> bytes | None:
    """Return the bytes of a generator's state, or None if their place in memory is not known."""
    if type(generator) is not np.random.MT19937 or not _lies_as_known():
        return None
    return ctypes.string_at(_address(generator), _SIZE)


def _address(generator: Any) -> int:
    address: int = generator.ctypes.state_address
    return address


@cache
def _lies_as_known() -> bool:
    """Return whether the key and the position are next to each other in memory, by the example of a new generator."""
    generator = np.random.MT19937(0)
    generator.random_raw(5)
    state: Any = generator.state["state"]
    expected = state["key"].tobytes() + _POSITION.pack(state["pos"])
    return len(expected) == _SIZE and ctypes.string_at(_address(generator), _SIZE) == expected
