"""Benchmarks are no tests, and must not be broken by what is changed elsewhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
PACKAGE = "lightning_pipes"
FILES = sorted(FOLDER.glob("*.py"))
SCRIPTS = [path for path in FILES if "ArgumentParser(" in path.read_text()]

START = """
import contextlib, io, runpy, sys
sys.path.insert(0, sys.argv[1])
for path in sys.argv[2:]:
    sys.argv = [path, "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (path, end.code)
    print(path, "--quick" in said.getvalue())
"""


def missing(path: Path) -> list[str]:
    """What a benchmark imports from here that is not there."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
            continue
        base = FOLDER if node.module.partition(".")[0] != PACKAGE else FOLDER.parent
        place = base.joinpath(*node.module.split("."))
        sources = [place / "__init__.py"] if place.is_dir() else [place.with_suffix(".py")]
        if base == FOLDER and not sources[0].exists():
            continue  # from elsewhere
        known = set().union(*map(defined, sources), (path.stem for path in place.glob("*")))
        found += [f"{node.module}.{name.name}" for name in node.names if name.name not in known]
    return found


@cache
def defined(source: Path) -> frozenset[str]:
    """The names that a module has after its import, as far as its text says; no import, which takes seconds."""
    if not source.exists():
        return frozenset()
    names: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names.update(name.asname or name.name for name in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.If, ast.Try)):
            names.update(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            names.update(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return frozenset(names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path):
    assert missing(path) == []


@pytest.mark.slow
def test_all_start():
    command = [sys.executable, "-c", START, str(FOLDER), *map(str, SCRIPTS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    started = dict(line.rsplit(" ", 1) for line in ended.stdout.splitlines())
    assert set(started) == set(map(str, SCRIPTS))
