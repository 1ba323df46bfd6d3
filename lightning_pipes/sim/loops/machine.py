"""The machine that runs the kernel: Python, or machine code that numba makes of the same source where it is
installed."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from lightning_pipes.sim.loops import kernel
from lightning_pipes.sim.loops.tables import Fields, Table

PATIENCE = 1_000_000
"""Steps of the kernel that Python takes before numba is loaded, which takes about as long."""


@dataclass(frozen=True)
class Machine:
    """One way to run the kernel.

    Attributes:
        name: "python" or "numba".
        fixed, chosen: the kernel's functions.
        every: that function of the kernel; None where `rows_of_costs` does it.
        arrays: whether they want arrays, or lists.
    """

    name: str
    fixed: Callable[..., None]
    chosen: Callable[..., int]
    every: Callable[..., None] | None
    arrays: bool

    def read(self, table: Table[Fields]) -> Fields:
        """The numbers of `table`; the kernel does not write to them."""
        return table.arrays if self.arrays else table.lists

    def copy(self, numbers: Any) -> Any:
        """The same numbers, for the kernel to write to."""
        return np.array(numbers, np.int64) if self.arrays else list(numbers)

    def fill(self, n: int, value: int = 0) -> Any:
        """Room for `n` numbers, for the kernel to write to."""
        if not self.arrays:
            return [value] * n
        return np.full(n, value, np.int64) if value else np.zeros(n, np.int64)  # zeros come five times faster


def bound(function: Callable[..., Any], **names: object) -> FunctionType:
    """The same source with other meanings of some of the names that it takes from its module."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__)


PYTHON = Machine("python", kernel.fixed, kernel.chosen, None, arrays=False)


def rows_of_costs() -> Callable[..., None]:
    """`kernel.fixed` for many costs at once: every number that depends on them is a row of an array, one for each."""
    return bound(kernel.fixed, max=np.maximum, leave=bound(kernel.leave, max=np.maximum))


@cache
def numba_machine() -> Machine | None:
    """The compiled kernel; None where numba is not installed."""
    made = compiled(kernel.leave, kernel.pick, kernel.fixed, kernel.every, kernel.chosen)
    return None if made is None else Machine("numba", made["fixed"], made["chosen"], made["every"], arrays=True)


@dataclass(frozen=True)
class Kernel:
    """One way to run a solver's kernel.

    Attributes:
        name: "python" or "numba".
        run: the kernel's functions, by name.
    """

    name: str
    run: SimpleNamespace

    def copy(self, numbers: Any) -> Any:
        """The same numbers, flat, as the kernel takes them."""
        flat = np.array(numbers, np.int64).reshape(-1)
        return flat if self.name == "numba" else flat.tolist()

    def fill(self, n: int, value: int = 0) -> Any:
        """Room for `n` numbers."""
        return np.full(n, value, np.int64) if self.name == "numba" else [value] * n


def compiled(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]] | None:
    """The functions by name as machine code, each calling those listed before it; None where numba is not installed.

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
            made[function.__name__] = jit(bound(function, **made))
    return made


def cache_folder() -> Path | None:
    """Where compiled code is kept: NUMBA_CACHE_DIR if the user says so, else in the user's cache; None, so compiled
    code is not kept, where nothing can be written."""
    asked = os.environ.get("NUMBA_CACHE_DIR")
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(asked) if asked else Path(caches) / "lightning_pipes" / "numba"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: nobody knows the user's home
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


class Progress:
    """How much this process has run of some loop: it decides when numba is loaded, never what comes out."""

    def __init__(self) -> None:
        self.done = 0

    def pays(self, work: int, patience: int) -> bool:
        """Whether more than `patience` will have been run with the next `work`, so that machine code pays."""
        self.done += work
        return self.done > patience


_progress = Progress()


def machine(steps: int) -> Machine:
    """The machine that takes the next `steps` steps: Python until it has taken PATIENCE of them, then numba if there
    is."""
    return (_progress.pays(steps, PATIENCE) and numba_machine()) or PYTHON


def load_kernel() -> str:
    """Loads machine code now rather than when it pays, for who will simulate thousands of times; "numba", or "python"
    where there is none."""
    return machine(PATIENCE + 1).name
