"""Benchmarks are no tests, and must not be broken by what is changed elsewhere."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.packaging.json_keys import literal_keys

FOLDER = Path(__file__).parents[2] / "benchmarks"
PACKAGES = {"lightning_pipes", "benchmarks"}
FILES = sorted(FOLDER.rglob("*.py"))
SCRIPTS = [
    path for path in FILES if "_parser(__doc__" in (text := path.read_text()) or "ArgumentParser(description" in text
]

START = """
import contextlib, io, runpy, sys
for path in sys.argv[1:]:
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
        if node.module.partition(".")[0] not in PACKAGES:
            continue  # from elsewhere
        place = FOLDER.parent.joinpath(*node.module.split("."))
        sources = [place / "__init__.py"] if place.is_dir() else [place.with_suffix(".py")]
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_what_a_benchmark_imports_is_there(path):
    assert missing(path) == []


@pytest.mark.slow
def test_all_start():
    command = [sys.executable, "-c", START, *map(str, SCRIPTS)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    started = dict(line.rsplit(" ", 1) for line in ended.stdout.splitlines())
    assert set(started) == set(map(str, SCRIPTS))


def test_keys_of_json_are_measured() -> None:
    """A number of an earlier run has its date in the name: "slowdown_of_2026_11_23"."""
    assert literal_keys(FOLDER) == {}


def test_literals_among_keys_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "LAST = {'last': 1.5}\nRATE = 2.0\ndef more(x):\n    return {'more': RATE, 'x': x}\n"
    )
    (tmp_path / "bench.py").write_text(
        f"from {tmp_path.name}.other import LAST, RATE, more\n"
        """
import json
def main(report, x):
    keys = {"measured": x, "seed": 3, "speed_of_2026_11_23": 4.0, "start": 0.0}
    keys |= more(x) if x else LAST
    keys["named"] = -RATE
    report.keys |= {f"made_{x}": 7, "entry": LAST["last"]}
    print(json.dumps(keys | report.keys | dict(given=1.25, fine=x) | {**{"inner": {"deep": 9}}}))
"""
    )
    keys = ["'more'", "'last'", "'named'", "'entry'", "'given'", "'deep'"]
    assert literal_keys(tmp_path) == {f"{tmp_path.name}.bench": {*keys, "f'made_{x}'"}}
