"""Loops that are written once and run by Python, or as machine code that numba makes of the same source."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from lightning_pipes.sim.loops.tables import Fields, Table


@dataclass(frozen=True)
class Kernel:
    """One way to run some loops.

    Attributes:
        name: "python", which takes lists, or "numba", which takes int64 arrays.
        run: the functions, by name.
    """

    name: str
    run: SimpleNamespace

    @property
    def takes_arrays(self) -> bool:
        """Whether the functions take arrays; else lists."""
        return self.name == "numba"

    def read(self, table: Table[Fields]) -> Fields:
        """Return the numbers of `table`, to which the kernel does not write."""
        return table.arrays if self.takes_arrays else table.lists

    def copy(self, numbers: Any) -> Any:
        """Return the same numbers, flat, for the kernel to write to."""
        if isinstance(numbers, list) and not self.takes_arrays:
            return list(numbers)
        flat = np.array(numbers, np.int64).reshape(-1)
        return flat if self.takes_arrays else flat.tolist()

    def fill(self, n: int, value: int = 0) -> Any:
        """Return room for `n` numbers, for the kernel to write to."""
        if not self.takes_arrays:
            return [value] * n
        return np.full(n, value, np.int64) if value else np.zeros(n, np.int64)  # zeros come five times faster


class JitKernel:
    """Loops, and the choice between Python and numba, which decides how long they take and never what comes out.

    Args:
        functions: of one module, each after those that it calls.
        patience: steps that Python takes before numba is loaded, which takes about as long.
    """

    def __init__(self, *functions: Callable[..., Any], patience: int) -> None:
        self.patience = patience
        self.python = Kernel("python", SimpleNamespace(**{function.__name__: function for function in functions}))
        self._functions = functions
        self._done = 0

    @cached_property
    def numba(self) -> Kernel | None:
        """The compiled loops; None where numba is not installed."""
        made = compile_functions(*self._functions)
        return None if made is None else Kernel("numba", SimpleNamespace(**made))

    @property
    def fastest(self) -> Kernel:
        """The compiled loops; Python where numba is not installed."""
        return self.numba or self.python

    def select(self, steps: int) -> Kernel:
        """Return what runs the next `steps` steps: Python until it has run `patience` of them, then numba."""
        self._done += steps
        return self.fastest if self._done > self.patience else self.python

    def load(self) -> str:
        """Load machine code now; return "numba", or "python" where there is none."""
        return self.select(self.patience + 1).name


def rebind_globals(function: Callable[..., Any], **names: object) -> FunctionType:
    """Return the same source with other meanings of some of the names that it takes from its module."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)


def compile_functions(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]] | None:
    """Return the functions by name as machine code, each calling those listed before it; None where numba is not
    installed.

    A function is compiled when it is first called, a kernel in a few seconds, and kept in `cache_folder()`.
    """
    if find_spec("numba") is None:
        return None
    try:
        import numba
    except ImportError as error:
        warnings.warn(f"numba is installed and can't be used ({error}); going on without it is slower", stacklevel=2)
        return None
    folder = cache_folder()
    made: dict[str, Callable[..., Any]] = {}
    with _caching_in(numba.config, folder):
        jit = numba.njit(cache=folder is not None)
        for function in functions:
            made[function.__name__] = jit(rebind_globals(function, **made))
    return made


def cache_folder() -> Path | None:
    """Return where compiled code is kept: NUMBA_CACHE_DIR if the user says so, else in the user's cache; None, so
    compiled code is not kept, where nothing can be written."""
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
    """Functions that are made in here are kept in `folder`; by itself numba would write beside our source."""
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder or "")
    try:
        yield
    finally:
        config.CACHE_DIR = before
