"""Loops that are written once and run either in Python or as machine code that numba compiles from the same source."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from inspect import getfile
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from lightning_pipes.sim.loops.tables import Fields, Table

LATEST_TIME = 1 << 60
"""A time in nanoseconds that is later than all other times of a loop. The sum of two such times fits into 64 bits."""


@dataclass(frozen=True)
class Kernel:
    """One implementation of a set of loops.

    Attributes:
        name: "python", which takes lists, or "numba", which takes int64 arrays.
        run: the functions, by name.
    """

    name: str
    run: SimpleNamespace

    @property
    def takes_arrays(self) -> bool:
        """Whether the functions take arrays. Otherwise, they take lists."""
        return self.name == "numba"

    def read(self, table: Table[Fields]) -> Fields:
        """Return the fields of `table`. The kernel does not modify them."""
        return table.arrays if self.takes_arrays else table.lists

    def copy(self, numbers: Any) -> Any:
        """Return a flat copy of the numbers that the kernel may modify."""
        if isinstance(numbers, list) and not self.takes_arrays:
            return list(numbers)
        flat = np.array(numbers, np.int64).reshape(-1)
        return flat if self.takes_arrays else flat.tolist()

    def fill(self, n: int, value: int = 0) -> Any:
        """Return `n` numbers equal to `value` that the kernel may modify."""
        if not self.takes_arrays:
            return [value] * n
        return np.full(n, value, np.int64) if value else np.zeros(n, np.int64)  # np.zeros is five times faster


class JitKernel:
    """Loops with an automatic choice between Python and numba. The choice affects the speed, but never the results.

    Args:
        functions: functions of one module. Each function must come after the functions that it calls.
        patience: the number of steps that run in Python before numba is loaded. Loading takes about as long as these
            steps.
    """

    def __init__(self, *functions: Callable[..., Any], patience: int) -> None:
        self.patience = patience
        self.python = Kernel("python", SimpleNamespace(**{function.__name__: function for function in functions}))
        self._functions = functions
        self._done = 0

    @cached_property
    def numba(self) -> Kernel | None:
        """The compiled loops; None if numba is not installed."""
        made = compile_functions(*self._functions)
        return None if made is None else Kernel("numba", SimpleNamespace(**made))

    @property
    def fastest(self) -> Kernel:
        """The compiled loops, or the Python loops if numba is not installed."""
        return self.numba or self.python

    def select(self, steps: int) -> Kernel:
        """Return the kernel for the next `steps` steps: Python for the first `patience` steps, and then numba."""
        self._done += steps
        return self.fastest if self._done > self.patience else self.python

    def load(self) -> str:
        """Load the compiled loops now. Return "numba", or "python" if numba is not available."""
        return self.select(self.patience + 1).name


def rebind_globals(function: Callable[..., Any], **names: object) -> FunctionType:
    """Return a copy of the function in which some global names refer to other objects."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)


def compile_functions(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]] | None:
    """Return the functions by name as machine code, or None if numba is not installed or can't be imported.

    Each function calls the compiled versions of the functions before it. A function is compiled at its first call,
    which takes a few seconds for a kernel, and is cached in `cache_folder()`.
    """
    if find_spec("numba") is None:
        return None
    try:
        import numba
    except ImportError as error:
        warnings.warn(
            f"numba is installed, but can't be imported ({error}). The same code runs without it, which is slower. "
            "Repair or uninstall numba",
            stacklevel=2,
        )
        return None
    folder = cache_folder()
    if folder is not None:
        folder /= _digest_of_sources(functions)
    made: dict[str, Callable[..., Any]] = {}
    with _caching_in(numba.config, folder):
        jit = numba.njit(cache=folder is not None)
        for function in functions:
            made[function.__name__] = jit(rebind_globals(function, **made))
    return made


def _digest_of_sources(functions: Sequence[Callable[..., Any]]) -> str:
    """Return a digest of the modules in the folders of the functions.

    A cache of older sources may refer to modules that no longer exist, which numba reports as an error.
    """
    folders = {Path(getfile(function)).parent for function in functions}
    digest = sha256()
    for path in sorted(file for folder in folders for file in folder.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path | None:
    """Return the folder for compiled code, or None if no folder is writable and compiled code can't be cached.

    The folder is NUMBA_CACHE_DIR if the user sets it. Otherwise, it is in the cache directory of the user.
    """
    asked = os.environ.get("NUMBA_CACHE_DIR")
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(asked) if asked else Path(caches) / "lightning_pipes" / "numba"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: the user's home is unknown
        return None


@contextmanager
def _caching_in(config: Any, folder: Path | None) -> Iterator[None]:
    """Cache functions that are compiled in this context in `folder`.

    By default, numba would write next to our source files.
    """
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder or "")
    try:
        yield
    finally:
        config.CACHE_DIR = before
