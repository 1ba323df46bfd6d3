"""Check that the tests which only `make test-full` runs exist."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_listed_tests_exist() -> None:
    lines = (TESTS / "long_tail.txt").read_text().splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        path, *names = line.partition("[")[0].split("::")
        body = ast.parse((TESTS.parent / path).read_text()).body
        for name in names:
            found = [each for each in body if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == name]
            assert len(found) == 1, line
            body = found[0].body
