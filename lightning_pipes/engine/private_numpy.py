"""The state of NumPy's global generator: NumPy takes 50 microseconds to tell it, and 35 to take it.

It is compared where it lies with the one that was read last: mostly nothing was drawn in between. How it lies there is
nowhere promised, so that it is compared with what NumPy says of a fresh generator first; where that differs, NumPy is
asked each time.

Half of a pair of normal numbers may be kept apart, and a state with one is read from NumPy each time. It is missed by
one way only: between two calls the user goes back to an earlier state, and from there with normal numbers to where
others were drawn to before.
"""

from __future__ import annotations

import ctypes
import struct
from collections import OrderedDict
from functools import cache
from typing import Any

import numpy as np

State = Any
"""As `np.random.get_state` returns it; not to be changed."""
_POSITION = struct.Struct("=i")
_SIZE = 624 * 4 + _POSITION.size
_CACHED = 3
"""Where in a state it says whether half of a pair of normal numbers is kept for the next call."""


_KEPT = 8
_raws: OrderedDict[int, tuple[bytes, State]] = OrderedDict()
"""States that were read last, without a kept number, each with what the generator holds then; by their ids."""


def numpy_state() -> State:
    """`np.random.get_state()`."""
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
    """`np.random.set_state(state)`."""
    generator = _generator()
    now = _raw(generator)
    if now is None or id(state) not in _raws:
        np.random.set_state(state)
        _raws.clear()  # it may differ by a kept number from the one that was read last
        return
    _raws.move_to_end(id(state))
    raw, _ = _raws[id(state)]
    if now != raw:
        ctypes.memmove(_address(generator), raw, _SIZE)
    np.random.set_bit_generator(generator)  # type: ignore[attr-defined]  # a number that is kept is forgotten


def _generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


def _raw(generator: Any) -> bytes | None:
    """Return the bytes that tell states apart; None where they are not known."""
    if type(generator) is not np.random.MT19937 or not _lies_as_known():
        return None
    return ctypes.string_at(_address(generator), _SIZE)


def _address(generator: Any) -> int:
    address: int = generator.ctypes.state_address
    return address


@cache
def _lies_as_known() -> bool:
    """Return whether key and position lie one behind the other, for one of no particular state."""
    generator = np.random.MT19937(0)
    generator.random_raw(5)
    state: Any = generator.state["state"]
    expected = state["key"].tobytes() + _POSITION.pack(state["pos"])
    return len(expected) == _SIZE and ctypes.string_at(_address(generator), _SIZE) == expected
