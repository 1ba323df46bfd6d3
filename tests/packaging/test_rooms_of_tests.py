"""Check that the tests of a module have its name and folder, and that tests share only helpers."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ACROSS = {"benchmarks", "compat", "examples", "faults", "fuzz", "gpu", "launch", "packaging", "toys"}
"""Folders of tests that examine the whole package instead of one layer."""
OF_A_TEST = re.compile(r"\btests\.(?:\w+\.)*test_\w+|^\s*from \.[\w.]*(?: import )?\btest_\w+", re.MULTILINE)
"""The import of a test file as a module, also in the text of a script."""


def modules(package: Path) -> dict[str, set[Path]]:
    """Return the folders of the modules with each name, relative to the package.

    A folder counts as part of itself.
    """
    found: dict[str, set[Path]] = {}
    for folder, below, files in os.walk(package, followlinks=True):  # the schedules are behind a link
        room = Path(folder).relative_to(package)
        for name in below:
            found.setdefault(name, set()).update({room, room / name})
        for name in (file.removesuffix(".py") for file in files if file.endswith(".py")):
            found.setdefault(name, set()).add(room)
    return found


def misplaced(tests: Path, package: Path) -> list[str]:
    """Return tests in a folder that the package does not have, and tests that are not in the folder of their module.

    A test of several modules may be at the top of a layer if no module of the layer has its name.
    """
    of, wrong = modules(package), []
    for path in sorted(tests.rglob("test_*.py")):
        here = path.parent.relative_to(tests)
        layer = here.parts[0]
        if layer in ACROSS:
            continue
        homes = {home for home in of.get(path.stem.removeprefix("test_"), ()) if home.parts[:1] == (layer,)}
        if not (package / here).is_dir():
            wrong.append(f"{path.relative_to(tests)}: there is no {here} in {package.name}")
        elif homes and here not in homes:
            wrong.append(f"{path.relative_to(tests)} belongs into {' or '.join(sorted(map(str, homes)))}")
    return wrong


def shared(tests: Path) -> list[str]:
    """Return the test files that import another test file as a module."""
    found = ((path, match[0].strip()) for path in tests.rglob("*.py") for match in OF_A_TEST.finditer(path.read_text()))
    return sorted(f"{path.relative_to(tests)}: {name}" for path, name in found)


def test_tests_are_in_the_rooms_of_their_modules() -> None:
    assert misplaced(ROOT / "tests", ROOT / "lightning_pipes") == []


def test_nothing_is_imported_from_a_test() -> None:
    assert shared(ROOT / "tests") == [], "put what they share into a module without test_ in its name"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sim/loops/test_static.py", ""),
        ("sim/test_closed_forms.py", ""),
        ("engine/test_static.py", ""),  # the module of that name is in another layer
        ("faults/test_static.py", ""),
        ("sim/test_static.py", "sim/test_static.py belongs into sim/loops"),
        ("sim/rooms/test_anything.py", "sim/rooms/test_anything.py: there is no sim/rooms in lightning_pipes"),
    ],
)
def test_a_stray_is_found(name: str, said: str, tmp_path: Path) -> None:
    for path in ("lightning_pipes/sim/loops/static.py", "lightning_pipes/engine/__init__.py", f"tests/{name}"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert misplaced(tmp_path / "tests", tmp_path / "lightning_pipes") == ([said] if said else [])


@pytest.mark.parametrize(
    "line",
    [
        "from {}.sim.test_timeline import helper",
        "    import {}.test_cli",
        "from .test_timeline import helper",
        "from ..sim import test_timeline",
        'SCRIPT = "from {}.sim.loops.test_static import split; split()"',
    ],
)
def test_an_import_from_a_test_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text(line.format("tests"))
    assert len(shared(tmp_path)) == 1


def test_listed_tests_exist() -> None:
    """Check that the tests which only `make test-full` runs exist."""
    lines = (ROOT / "tests" / "long_tail.txt").read_text().splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        path, *names = line.partition("[")[0].split("::")
        body = ast.parse((ROOT / path).read_text()).body
        for name in names:
            found = [each for each in body if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == name]
            assert len(found) == 1, line
            body = found[0].body
