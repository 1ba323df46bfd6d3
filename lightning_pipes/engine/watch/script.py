"""Finds the command that starts this program once more, as another rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_first_directory = os.getcwd()


def find_command() -> tuple[Sequence[str], str] | None:
    """Return the command that starts this program again, with the directory to start it in; None if it can't be started
    again, because it has no file, as a program from standard input or the text behind `python -c`.

    The directory is the one in which this program was started: it may have changed to another one since, and will do so
    in the new process.
    """
    import __main__

    name = getattr(getattr(__main__, "__spec__", None), "name", None)
    if name is not None and name != "__main__":
        return [sys.executable, "-m", name, *sys.argv[1:]], _first_directory
    given = sys.argv[0]
    if name == "__main__":  # a zip file, or a folder with a __main__.py
        found = Path(_first_directory, given)
        return ([sys.executable, str(found), *sys.argv[1:]], _first_directory) if found.exists() else None
    file = getattr(__main__, "__file__", None)
    if file is None:
        return None
    directory = _first_directory
    if not os.path.isabs(given) and file.endswith(os.sep + given):
        directory = file.removesuffix(given)  # Python has made the path of the script absolute at its start
    path = Path(directory, file)
    return ([sys.executable, str(path), *sys.argv[1:]], directory) if path.exists() else None
