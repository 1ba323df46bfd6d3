"""What is in the source distribution and in the wheel that is built from it."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ["lightning_pipes", "strategies", "conf", "hydra_plugins", "examples", "tests"]
SINGLE = ["pyproject.toml", "README.md", "LICENSE"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SINGLE:
        shutil.copy(ROOT / name, source)
    made = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return out


def test_the_links_are_links() -> None:
    for name in ("strategies", "conf"):
        link = ROOT / "lightning_pipes" / name
        assert link.is_symlink(), f"{link} is a file: clone again with `git clone -c core.symlinks=true`"
        assert link.resolve() == ROOT / name


def test_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        entries = next(name for name in names if name.endswith("entry_points.txt"))
        parser = configparser.ConfigParser()
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        parser.read_string(archive.read(entries).decode())

    def here(folder: str, pattern: str) -> set[str]:
        return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern)}

    assert "lightning_pipes/py.typed" in names
    assert {f"lightning_pipes/{name}" for name in here("strategies", "*.py") | here("strategies", "*.md")} <= names
    assert {f"lightning_pipes/{name}" for name in here("conf", "*.yaml") | here("conf", "*.py")} <= names
    assert here("hydra_plugins", "*.py") <= names
    for part in ("ir", "cost", "sim", "planning", "engine", "trainer", "tune", "testing"):
        assert here(f"lightning_pipes/{part}", "*.py") <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lightning_pipes", "hydra_plugins"}
    assert "hydra_plugins/__init__.py" not in names

    assert {f"lightning_pipes/sim/page/{name}" for name in ("template.html", "page.css", "page.js")} <= names
    assert dict(parser["console_scripts"]) == {"lightning-pipes": "lightning_pipes.tune.cli:main"}
    schedules = dict(parser["lightning_pipes.schedules"])
    assert {"gpipe", "1f1b", "interleaved", "kfkb"} <= set(schedules)
    for value in schedules.values():
        module = value.split(":")[0].replace(".", "/")
        assert {f"{module}.py", f"{module}/__init__.py"} & names, f"{value} is not in the wheel"


def test_sdist_holds_files_where_the_checkout_has_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {"LICENSE", "lightning_pipes/conf/train.yaml", "lightning_pipes/strategies/kfkb/schedule.py"} <= names
