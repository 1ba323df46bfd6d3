"""Random values that make no sense in most places, predicates for values that make sense, and deadlines."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_pipes.testing.ranks import scale_timeout

NAN, INF = math.nan, math.inf


class Unprintable:
    """An object whose repr raises an error, as the repr of partly initialized objects does."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 5, -1, -7, 10**6, 10**9, 10**30, 2**63, -(2**64)),
    *(0.0, 0.5, 1.0, 2.5, -0.5, 1e-320, 1e308, NAN, INF, -INF, Fraction(1, 2), 1j, np.int64(3), np.float64("nan")),
    *("", "x", "4", "auto", "1f1b", "16GiB", "12.5GB/s", "10us", "-1s", "1e999999999", "inf", "nan", "\0", "é" * 500),
    *(b"x", [], (), {}, set(), [1], [0, 0], [3, 1], [-1], ["x"], [None], [NAN], [[1]], {"a": 1}, {1: 2}, {"k": 2}),
    *(np.array([1, 2]), np.zeros(0), torch.tensor(3), torch.zeros(2), range(3), timedelta(0), timedelta(minutes=1)),
    *(object(), int, len, Path("x"), Unprintable(), 10**5000, ValueError("x"), slice(1), ..., [10**9] * 3),
)


def integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def number(value: object) -> bool:
    real = isinstance(value, int | float | np.floating | np.integer | Fraction) and not isinstance(value, bool)
    return real and (isinstance(value, float | np.floating) or abs(value) < 1e308) and value == value


def count(value: Any, most: int | None = None) -> bool:
    return integer(value) and value >= 1 and (most is None or value <= most)


def flag(value: object) -> bool:
    return isinstance(value, bool)


def text(value: object) -> bool:
    return isinstance(value, str)


def several(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(of, value))


def optional(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or of(value)


@dataclass(frozen=True)
class Door:
    """A constructor or function that takes arguments from users.

    Attributes:
        make: the constructor or function.
        sense: for each argument, a predicate that returns whether a value makes sense.
        fine: arguments that are valid together.
        call_it: the names of arguments in error messages, if these differ from the arguments.
        given_name: the name of the door in reports, if it is not the name of `make`.
    """

    make: Callable[..., Any]
    sense: dict[str, Callable[[Any], bool]]
    fine: dict[str, Any] = field(default_factory=dict)
    call_it: dict[str, str] = field(default_factory=dict)
    given_name: str = ""

    @property
    def name(self) -> str:
        """The name of the door in reports."""
        return self.given_name or self.make.__qualname__


def perturbed(rng: random.Random, door: Door) -> dict[str, Any]:
    """Return the door's arguments with one or two of them replaced by random values."""
    given = dict(door.fine)
    for name in rng.sample(sorted(door.sense), min(len(door.sense), rng.choice((1, 1, 1, 2)))):
        given[name] = rng.choice(VALUES)
    return given


@contextmanager
def deadline(seconds: float, what: object) -> Iterator[None]:
    """Raise an error if the block does not end in time, so that a hang is found and named."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no end after {limit:.0f} s: {what}")

    limit, before = scale_timeout(seconds), signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
