"""Helpers that run many quick cases as one test, and that let the cases of several tests share one run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., None])


def for_each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test once for each of `values`, all within one test case of pytest.

    Use it like `pytest.mark.parametrize` for cases that take milliseconds and need no fixtures of their own. A failure
    gets a note with the values of the failing case. Stacked decorators run all combinations.

    Args:
        names: name of one argument of the test, or a tuple of several names.
        values: the values that the argument takes in turn. For several names, each value is a tuple with one entry per
            name.
    """
    several = isinstance(names, tuple)
    every = [value if several else (value,) for value in values]
    keys = names if isinstance(names, tuple) else (names,)
    assert every, f"no values of {keys}"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        assert set(keys) <= set(signature.parameters), f"{test.__name__} takes no {keys}"

        @wraps(test)
        def run(*given: Any, **fixtures: Any) -> None:
            for value in every:
                case = dict(zip(keys, value, strict=True))
                try:
                    test(*given, **fixtures, **case)
                except pytest.skip.Exception as skipped:
                    raise AssertionError(f"a case of {test.__name__} was skipped, with {case}: {skipped}") from None
                except BaseException as error:
                    error.add_note("with " + ", ".join(f"{key} = {one!r}" for key, one in case.items()))
                    raise

        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


SELECTED: list[pytest.Item] = []
"""The tests that this session runs."""


def selected_values(test: Callable[..., None], name: str) -> list[Any]:
    """Return the values of one argument with which this session runs a test, in order.

    Tests whose cases share processes call it before these processes start, so that cases deselected by `-m` or `-k`
    cost nothing.
    """
    return [
        item.callspec.params[name]
        for item in SELECTED
        if isinstance(item, pytest.Function) and item.function.__code__ is test.__code__ and hasattr(item, "callspec")
    ]


def count_calls(work: Callable[[], object]) -> int:
    """Return the number of function calls made by `work`.

    This measure of cost does not depend on the load of the machine.
    """
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
