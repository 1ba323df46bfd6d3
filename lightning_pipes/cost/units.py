"""Parsing and formatting of sizes, rates and times such as "16GiB", "12.5GB/s" and "10us"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from numbers import Real
from typing import Any, TypeVar

from lightning_pipes.ir import InputError, short_repr

_T = TypeVar("_T")
MAX_VALUE = 1e30
"""The largest accepted value in any unit. Larger values, and values below its reciprocal, are treated as typos."""
_UNIT_PREFIXES = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_BYTE_UNITS = {f"{prefix}B": Fraction(1000**power) for prefix, power in _UNIT_PREFIXES.items()} | {
    f"{prefix.upper()}iB": Fraction(1024**power) for prefix, power in _UNIT_PREFIXES.items() if prefix
}
_BIT_UNITS = {f"{prefix}bit": Fraction(1000**power, 8) for prefix, power in _UNIT_PREFIXES.items()}
_RATE_UNITS = {f"{unit}/s": size for unit, size in (_BYTE_UNITS | _BIT_UNITS).items()}
_SECOND_UNITS = {unit: Fraction(1, 1000**power) for power, unit in enumerate(("s", "ms", "us", "ns"))}
_NUMBER_PATTERN = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf)\s*([A-Za-z/]*)\s*")


def parse_bytes(value: str | float) -> int:
    """Return a size in bytes, as a whole number.

    `"16GiB"` is 16 * 2**30 bytes and `"16GB"` is 16e9 bytes. A number without a unit is a number of bytes.

    Raises:
        InputError: if the value can't be read, or if it is negative or infinite.
    """
    found = _parse_number(value, _BYTE_UNITS, "a size", "16GiB")
    if not math.isfinite(found):
        raise InputError(f"a size has to be finite, got {short_repr(value)}")
    return round(found)


def parse_rate(value: str | float) -> float:
    """Return a rate in bytes per second.

    `"12.5GB/s"` and `"100Gbit/s"` are equal. A number without a unit is a number of bytes per second, and `"inf"` means
    that transfers take no time.

    Raises:
        InputError: if the value can't be read, or if it is not positive.
    """
    found = _parse_number(value, _RATE_UNITS, "a rate", "12.5GB/s")
    if not found:
        raise InputError(f"a rate has to be positive, got {short_repr(value)}")
    return found


def parse_seconds(value: str | float) -> float:
    """Return a time in seconds.

    `"10us"` is 1e-5 seconds. A number without a unit is a number of seconds.

    Raises:
        InputError: if the value can't be read, or if it is negative or infinite.
    """
    found = _parse_number(value, _SECOND_UNITS, "a time", "10us")
    if not math.isfinite(found):
        raise InputError(f"a time has to be finite, got {short_repr(value)}")
    return found


def parse_setting(name: str, parse: Callable[[Any], _T], value: Any) -> _T:
    """Return the value of a setting after parsing it.

    Args:
        name: the name of the setting, which begins the error message.
        parse: one of the parsing functions of this module.
        value: the value to parse.

    Raises:
        InputError: if the value can't be read.
    """
    try:
        return parse(value)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def _read_text(value: object) -> str:
    """Return the text of a value that may be a number with a unit, or an empty string if it can't be one."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        return ""
    try:
        return repr(float(value))
    except OverflowError:
        return "1e999"


def _parse_number(value: str | float, units: Mapping[str, Fraction], what: str, example: str) -> float:
    match = _NUMBER_PATTERN.fullmatch(_read_text(value))
    unit = match[2] if match else None
    if match is None or (unit and unit not in units) or float(match[1]) < 0:
        raise InputError(
            f"{short_repr(value)} is not {what}; write it as {example}, or as a plain number. Units: {', '.join(units)}"
        )
    if match[1].endswith("inf"):
        return math.inf
    if not MAX_VALUE > float(match[1]) > 1 / MAX_VALUE:  # such a fraction might have a billion digits
        if float(match[1]):
            raise InputError(f"{short_repr(value)} is not {what} between {1 / MAX_VALUE:g} and {MAX_VALUE:g}")
        return 0.0
    return float(Fraction(match[1]) * (units[unit] if unit else 1))  # a fraction, so that 10us is exactly 1e-5


def seconds_text(nanoseconds: float) -> str:
    """Return a duration as text with about three significant digits, such as `1.62 s`, `20 ms`, `5.5 us` or `3 ns`."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(nanoseconds) >= size:
            return (
                f"{nanoseconds / size:.3g} {unit}" if nanoseconds < 1000 * size else f"{nanoseconds / size:.0f} {unit}"
            )
    return f"{nanoseconds:.3g} ns"


def bytes_text(size: float) -> str:
    """Return a size as text with about three significant digits, such as `1.5 GiB`, `20 MiB` or `512 bytes`."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} bytes"
