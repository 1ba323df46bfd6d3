"""Validation of values from outside. Each error names the value, the expected value, and the actual value.

Without these checks, a number that is passed as text fails ten calls later in another library, NaN silently passes
comparisons that it should fail, and True counts as 1.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import fields
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints


class PipelineError(RuntimeError):
    """Base class of all errors that lightning_pipes defines.

    Args:
        reason: what happened and where, and what was expected.
        way_out: what the user can do about it. The message consists of the reason and the way out.

    Attributes:
        reason: what happened. This is the whole message if the way out is part of it.
        way_out: what the user can do, or an empty string if the reason already contains it.
    """

    def __init__(self, reason: str = "", way_out: str = "") -> None:
        joint = ". " if way_out[:1].isupper() else "; "
        super().__init__(f"{reason}{joint}{way_out}" if way_out else reason)
        self.reason, self.way_out = reason, way_out


class PlanError(PipelineError):
    """A plan can't be made or executed, because its stages, spans, memory or versions do not fit."""


class InputError(PlanError):
    """An input can't be used, such as a setting, an argument, a file, a number, a unit or a name.

    It derives from PlanError, so that a single `except` catches every error that is found before anything runs.
    """


class ProgramError(PipelineError):
    """A program is not a correct order of its plan: an instruction is missing, duplicated, unpaired or too early."""


class DeadlockError(ProgramError):
    """All ranks wait for each other. The message lists the instructions that each rank waits for."""


_T = TypeVar("_T")
_MAX_REPR_CHARACTERS = 80
"""The maximum number of characters of a value in an error message."""
_hints: dict[type, Mapping[str, Any]] = {}
_SCALAR_KINDS = frozenset({int, bool, str, NoneType})


def short_repr(value: object) -> str:
    """Return the repr of a value for error messages, shortened to at most 80 characters."""
    try:
        text = repr(value)
    except Exception as error:  # an int with more digits than Python prints, or an error in a user's __repr__
        text = f"<{type(value).__name__}: {type(error).__name__}>"
    return text if len(text) <= _MAX_REPR_CHARACTERS else f"{text[: _MAX_REPR_CHARACTERS - 4]} ..."


def check_count(what: str, value: object, hint: str = "", most: int | None = None) -> int:
    """Return `value` as an int after checking that it is at least 1 and at most `most`.

    Args:
        what: the name of the value in the error message.
        value: the value to check.
        hint: text to append to the error message.
        most: the maximum. If None, there is no maximum.

    Raises:
        InputError: if the value is not a whole number, less than 1, or more than `most`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{what} must be a whole number, got {short_repr(value)}{hint}")
    value = int(value)
    if value < 1:
        raise InputError(f"{what} must be at least 1, got {short_repr(value)}{hint}")
    if most is not None and value > most:
        raise InputError(f"{what} must be at most {most}, got {short_repr(value)}{hint}")
    return value


def check_number(
    what: str, value: object, needs: str = "a number", fits: Callable[[float], bool] = math.isfinite, hint: str = ""
) -> float:
    """Return `value` after checking that it is a number for which `fits` returns True. NaN is never accepted.

    Args:
        what: the name of the value in the error message.
        value: the value to check.
        needs: the condition in words, as it appears in the error message.
        fits: the condition. By default, the number must be finite.
        hint: text to append to the error message.

    Raises:
        InputError: if the value is not a number, or if it does not meet the condition.
    """
    if not _is_number(value) or not fits(value):  # type: ignore[arg-type]
        raise InputError(f"{what} must be {needs}, got {short_repr(value)}{hint}")
    return value  # type: ignore[return-value]


def check_type(what: str, value: object, hint: Any) -> Any:
    """Return `value` after checking that it has the type `hint`. Lists become tuples if `hint` is a tuple.

    Args:
        what: the name of the value in the error message.
        value: the value to check. NaN is not accepted as a number, and True is not accepted as a whole number.
        hint: a type that is used in settings and files: numbers, strings, booleans, None, unions of them, literals,
            tuples, lists, sequences, mappings, functions and classes.

    Raises:
        InputError: if the value has another type. The message names the part that is wrong.
    """
    made, wrong = _read(what, value, hint)
    if wrong:
        raise InputError(wrong)
    return made


def check_fields(made: Any, entries: bool = True) -> None:
    """Check the type of every field of a dataclass. Call it first in `__post_init__`.

    Args:
        made: the dataclass instance. Lists are replaced by tuples if the field is a tuple.
        entries: whether to check the entries of tuples and mappings too. There may be a million of them.

    Raises:
        InputError: if a field has another type.
    """
    for name, hint in field_types(type(made)).items():
        value = getattr(made, name)
        kind = type(value)
        if (kind is hint and kind in _SCALAR_KINDS) or (
            not entries and kind in (tuple, dict) and _may_hold(hint, kind)
        ):
            continue
        found = check_type(f"{type(made).__name__}: {name}", value, hint)
        if found is not value:
            object.__setattr__(made, name, found)


def field_types(kind: type) -> Mapping[str, Any]:
    """Return the types of the fields of a dataclass by name."""
    if kind not in _hints:
        known = get_type_hints(kind)
        _hints[kind] = {field.name: known[field.name] for field in fields(kind) if field.init}
    return _hints[kind]


def type_name(hint: Any) -> str:
    """Return a description of a type in words."""
    origin, of = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        *first, last = [type_name(each) for each in of]
        return f"{', '.join(first)} or {last}"
    if origin is Literal:
        return " or ".join(map(repr, of))
    if origin is tuple and of[-1:] != (...,):
        return f"{len(of)} values: {', '.join(map(type_name, of))}"
    if origin in (tuple, list, Sequence):
        return f"a list, each entry {type_name(of[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping from {type_name(of[0])} to {type_name(of[1])}"
    if origin is Callable or hint is Callable:
        return "a function"
    named = {int: "a whole number", float: "a number", bool: "True or False", str: "a text", NoneType: "None"}
    kind = origin or hint
    return named.get(kind) or f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"


def _may_hold(hint: Any, kind: type) -> bool:
    """Return whether values of the type `hint` may be instances of the class `kind`."""
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(kind, origin)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # an int that is too large for a float
        return False


def _read(what: str, value: Any, hint: Any) -> tuple[Any, str]:
    """Return the converted value and the reason for rejecting it. The reason is empty if the value is accepted."""
    origin, of = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return value, ""
    if origin in (Union, UnionType):
        return _read_one_of(what, value, hint, of)
    fine = True
    if origin is Literal:
        fine = any(type(value) is type(each) and value == each for each in of)
    elif origin in (tuple, list, Sequence):
        return _read_several(what, value, hint)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        return _read_mapping(what, value, hint)
    elif origin is Callable or hint is Callable:
        fine = callable(value)
    elif hint is bool or hint is str or hint is None or hint is NoneType:
        fine = isinstance(value, NoneType if hint is None else hint)
    elif hint is int:
        fine = isinstance(value, Integral) and not isinstance(value, bool)
    elif hint is float:
        fine = _is_number(value)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        fine = isinstance(value, hint)
    else:
        fine = not isinstance(value, type) and isinstance(value, origin or hint)
    return value, "" if fine else f"{what} must be {type_name(hint)}, got {short_repr(value)}"


def _read_one_of(what: str, value: Any, hint: Any, of: Sequence[Any]) -> tuple[Any, str]:
    reasons = []
    for each in of:
        made, wrong = _read(what, value, each)
        if not wrong:
            return made, ""
        reasons.append(wrong)
    inner = [wrong for each, wrong in zip(of, reasons, strict=True) if each is not NoneType]
    if len(inner) == 1 and value is not None and not inner[0].startswith(f"{what} must be"):
        return value, inner[0]  # only this type can be intended, and a part of the value is wrong
    return value, f"{what} must be {type_name(hint)}, got {short_repr(value)}"


def _read_several(what: str, value: Any, hint: Any) -> tuple[Any, str]:
    origin, of = get_origin(hint), get_args(hint)
    exact = origin is tuple and of[-1:] != (...,)
    kinds = (tuple, MutableSequence) if origin in (tuple, list) else (Sequence,)
    if not isinstance(value, kinds) or isinstance(value, (str, bytes, bytearray)) or (exact and len(value) != len(of)):
        return value, f"{what} must be {type_name(hint)}, got {short_repr(value)}"
    made, changed = [], origin is tuple and not isinstance(value, tuple)
    for number, each in enumerate(value):
        found, wrong = _read(f"{what}[{number}]", each, of[number] if exact else of[0])
        if wrong:
            return value, wrong
        changed |= found is not each
        made.append(found)
    if not changed:
        return value, ""
    return tuple(made) if origin is tuple else made, ""


def _read_mapping(what: str, value: Any, hint: Any) -> tuple[Any, str]:
    if not isinstance(value, Mapping):
        return value, f"{what} must be {type_name(hint)}, got {short_repr(value)}"
    of = get_args(hint)
    made, changed = {}, False
    for key, each in value.items():
        _, wrong = _read(f"a key of {what}", key, of[0])
        found, within = _read(f"{what}[{short_repr(key)}]", each, of[1])
        if wrong or within:
            return value, wrong or within
        changed |= found is not each
        made[key] = found
    return (made if changed else value), ""


def lookup_name(things: Mapping[str, _T], name: str, what: str) -> _T:
    """Return the entry of `things` called `name`, ignoring case.

    Args:
        things: the entries by name.
        name: the name to look up.
        what: the kind of entry in the error message.

    Raises:
        InputError: if there is no such entry. The message lists all names and suggests a similar one.
    """
    check_type(what, name, str)
    folded = {each.casefold(): each for each in things}
    if name.casefold() in folded:
        return things[folded[name.casefold()]]
    raise InputError(f"there is no {what} called {short_repr(name)}. {suggest_name(name, things)}")


def suggest_name(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return sentences for an error message about an unknown name: the most similar name, and a list of all names.

    Args:
        name: the unknown name.
        names: the known names.
        cutoff: the similarity from 0 to 1 that a name must have to be suggested.
    """
    folded = {each.casefold(): each for each in names}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=cutoff)
    hint = f"Did you mean {folded[close[0]]!r}? " if close else ""
    return f"{hint}Choose from: {', '.join(folded.values())}"


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the JSON object that a file contains.

    Raises:
        InputError: if the file can't be read or does not contain a JSON object.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{short_repr(str(path))} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds {short_repr(found)}, and should hold an object, {{...}}")
    return found


def check_json_fields(
    what: str, found: object, kinds: Mapping[str, Any], optional: Collection[str] = ()
) -> dict[str, Any]:
    """Return the entries of a JSON object after checking their types. Lists become tuples if the type is a tuple.

    Args:
        what: the name of the object in the error message.
        found: the object.
        kinds: the type of each field.
        optional: the names of fields that may be absent.

    Raises:
        InputError: if an entry is absent, unknown or of another type. The message names the entry.
    """
    entries = check_type(what, found, dict[str, Any])
    lacking = [name for name in kinds if name not in entries and name not in optional]
    if lacking:
        raise InputError(f"{what} has no {' and no '.join(map(repr, lacking))}")
    unknown = [name for name in entries if name not in kinds]
    if unknown:
        raise InputError(f"{what} has an unknown field {short_repr(unknown[0])}; there is {', '.join(kinds)}")
    return {name: check_type(f"{what}.{name}", value, kinds[name]) for name, value in entries.items()}
