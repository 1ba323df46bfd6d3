"""Finds the command that starts the current program again, for another rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_first_directory = os.getcwd()


_JOB_LAUNCHERS = {"submitit": "submitit", "joblib": "joblib", "loky": "joblib"}
"""Packages whose own main module runs a job in a process, and the names of the launchers that use them."""


def find_job_launcher() -> str | None:
    """Return the name of the launcher that started this process for a job, such as submitit or joblib, or None.

    Starting the main module again would not run the job.
    """
    import __main__

    name = getattr(getattr(__main__, "__spec__", None), "name", None) or ""
    return _JOB_LAUNCHERS.get(name.partition(".")[0])


def find_command() -> tuple[Sequence[str], str] | None:
    """Return the command that starts the current program again, and the directory in which to start it.

    The directory is the working directory at the start of this program. If the program has changed its working
    directory since then, the new process will do the same.

    Returns:
        The command and the directory. None if the program can't be started again because it does not have a file, such
        as a program from standard input or from `python -c`.
    """
    import __main__

    name = getattr(getattr(__main__, "__spec__", None), "name", None)
    if name is not None and name != "__main__":
        return [sys.executable, "-m", name, *sys.argv[1:]], _first_directory
    given = sys.argv[0]
    if name == "__main__":  # a zip file, or a directory with a __main__.py
        found = Path(_first_directory, given)
        return ([sys.executable, str(found), *sys.argv[1:]], _first_directory) if found.exists() else None
    file = getattr(__main__, "__file__", None)
    if file is None:
        return None
    directory = _first_directory
    if not os.path.isabs(given) and file.endswith(os.sep + given):
        directory = file.removesuffix(given)  # Python made the path of the script absolute when it started
    path = Path(directory, file)
    return ([sys.executable, str(path), *sys.argv[1:]], directory) if path.exists() else None
