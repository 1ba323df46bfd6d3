"""Reads JSON files and checks their fields; an error names the damaged or mistyped place."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from lightning_pipes.ir import InputError, check_type, short_repr


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the one object in a file.

    Raises:
        InputError: there is no such file, or it holds no object.
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
    """Return the checked entries of a JSON object. Lists become tuples where the type is a tuple.

    Args:
        optional: names of fields that may be absent.

    Raises:
        InputError: an entry is absent, unknown or of another type; names it.
    """
    entries = check_type(what, found, dict[str, Any])
    lacking = [name for name in kinds if name not in entries and name not in optional]
    if lacking:
        raise InputError(f"{what} has no {' and no '.join(map(repr, lacking))}")
    unknown = [name for name in entries if name not in kinds]
    if unknown:
        raise InputError(f"{what} has an unknown field {short_repr(unknown[0])}; there is {', '.join(kinds)}")
    return {name: check_type(f"{what}.{name}", value, kinds[name]) for name, value in entries.items()}
