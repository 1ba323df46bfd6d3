"""Check the imports and the options of the benchmarks, which changes of the package must not break."""

from __future__ import annotations

import ast
import io
import runpy
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_pipes.testing.ranks import run_ranks
from tests.packaging.json_keys import literal_keys

FOLDER = Path(__file__).parents[2] / "benchmarks"
PACKAGES = {"lightning_pipes", "benchmarks"}
FILES = sorted(FOLDER.rglob("*.py"))
SCRIPTS = [
    path for path in FILES if "_parser(__doc__" in (text := path.read_text()) or "ArgumentParser(description" in text
]
QUICK = {path.name for path in FOLDER.glob("[a-z]*.py")} - {"netlab.py"}


def missing(path: Path) -> list[str]:
    """Return the names that a benchmark imports from this repository and that do not exist."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.level:
            continue
        if node.module.partition(".")[0] not in PACKAGES:
            continue  # from another package
        place = FOLDER.parent.joinpath(*node.module.split("."))
        sources = [place / "__init__.py"] if place.is_dir() else [place.with_suffix(".py")]
        known = set().union(*map(defined, sources), (path.stem for path in place.glob("*")))
        found += [f"{node.module}.{name.name}" for name in node.names if name.name not in known]
    return found


@cache
def defined(source: Path) -> frozenset[str]:
    """Return the names that a module defines, read from its source because an import takes seconds."""
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
def test_imports_of_a_benchmark_exist(path):
    assert missing(path) == []


def start_all(rank: int) -> dict[str, tuple[Any, str]]:
    """Return the exit code and the output of each script with --help, all in one process."""
    ended: dict[str, tuple[Any, str]] = {}
    for path in SCRIPTS:
        sys.argv, out = [str(path), "--help"], io.StringIO()
        code: Any = 0
        try:
            with redirect_stdout(out):
                runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code
        ended[str(path.relative_to(FOLDER))] = code, out.getvalue()
    return ended


def test_all_start() -> None:
    (ended,) = run_ranks(start_all, 1, timeout=120)
    assert {name: code for name, (code, _) in ended.items() if code} == {}
    assert {name for name, (_, said) in ended.items() if "--quick" in said and "--json" in said} >= QUICK


def test_keys_of_json_are_measured() -> None:
    """Check that no printed value is a literal, except for dated ones such as "slowdown_of_2026_11_23"."""
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
