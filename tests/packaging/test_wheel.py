"""Check the contents of the source distribution and of the wheel built from it, and installations of each source."""

from __future__ import annotations

import configparser
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ["lightning_pipes", "strategies", "conf", "hydra_plugins", "examples", "tests"]
SINGLE = ["pyproject.toml", "setup.py", "README.md", "LICENSE"]
LINKS = ["strategies", "conf"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sources with symbolic links, as git writes them."""
    source = tmp_path_factory.mktemp("clone")
    for part in PARTS:
        shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SINGLE:
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def linkless(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sources with a text file in place of each link, as git writes them on Windows."""
    source = tmp_path_factory.mktemp("linkless")
    shutil.copytree(clone, source, symlinks=True, dirs_exist_ok=True)
    for name in LINKS:
        link = source / "lightning_pipes" / name
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    return source


@pytest.fixture(scope="module")
def built(linkless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a source distribution and a wheel built from it."""
    pytest.importorskip("build")
    source, out = linkless, tmp_path_factory.mktemp("dist")
    made = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return out


def test_the_links_are_links() -> None:
    for name in LINKS:
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


def test_sdist_holds_no_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {"LICENSE", "setup.py", "conf/train.yaml", "strategies/kfkb/schedule.py"} <= names


def run(*command: str | Path, **environment: str) -> str:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=["3.11", "3.12", "3.13"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new virtual environment that can build the package but lacks our dependencies."""
    version = request.param
    found = [sys.executable, shutil.which(f"python{version}") or ""]
    found += map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    check = f"import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"
    for each in filter(None, found):
        if subprocess.run([each, "-c", check], capture_output=True).returncode == 0:
            break
    else:
        pytest.skip(f"there is no Python {version} with venv on this machine")
    environment = tmp_path_factory.mktemp("environment")
    run(each, "-m", "venv", environment)
    (site,) = environment.glob("lib/*/site-packages")
    for old in (*site.glob("setuptools*"), *site.glob("_distutils_hack")):
        shutil.rmtree(old)
    own = Path(find_origin("setuptools")).parents[1]
    for needed in (own / "_distutils_hack", *own.glob("setuptools*")):
        (site / needed.name).symlink_to(needed)
    return environment / "bin" / "python"


def find_origin(package: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


def zip_with_links(source: Path, path: Path) -> Path:
    """Write an archive in which a link is a marked file that contains its target, as `git archive` does."""
    with zipfile.ZipFile(path, "w") as archive:
        for folder, folders, files in os.walk(source):
            for name in [*files, *(each for each in folders if Path(folder, each).is_symlink())]:
                member = Path(folder, name)
                inside = Path("sources", member.relative_to(source))
                if member.is_symlink():
                    info = zipfile.ZipInfo(str(inside))
                    info.create_system, info.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
                    archive.writestr(info, os.readlink(member))
                else:
                    archive.write(member, inside)
    return path


IMPORTS = """
import importlib.metadata, importlib.resources, importlib.util
import lightning_pipes
entries = importlib.metadata.entry_points(group="lightning_pipes.schedules")
assert len(entries) > 15, entries
assert [entry.name for entry in entries if importlib.util.find_spec(entry.module) is None] == []
assert importlib.util.find_spec("hydra_plugins.lightning_pipes.job_array")
assert importlib.resources.files("lightning_pipes.conf").joinpath("schedule", "kfkb.yaml").is_file()
from lightning_pipes.strategies.gpipe import GPipe
print(lightning_pipes.__file__)
"""
TRAINS = """
from hydra import compose, initialize_config_module
from hydra.core.plugins import Plugins
assert "JobArrayLauncher" in {kind.__name__ for kind in Plugins.instance().discover()}
from lightning_pipes import PipelineStrategy
with initialize_config_module("lightning_pipes.conf", version_base="1.3"):
    PipelineStrategy(compose("train", ["schedule=kfkb"]).schedule.name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["sdist", "wheel", "clone", "zip"])
def test_installs(origin: str, python: Path, built: Path, clone: Path, tmp_path: Path) -> None:
    source = {
        "sdist": lambda: next(built.glob("*.tar.gz")),
        "wheel": lambda: next(built.glob("*.whl")),
        "clone": lambda: shutil.copytree(clone, tmp_path / "clone", symlinks=True),
        "zip": lambda: zip_with_links(clone, tmp_path / "sources.zip"),
    }[origin]()
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--force-reinstall"]
    run(python, "-m", "pip", "install", *options, source)
    (site,) = python.parents[1].glob("lib/*/site-packages")
    assert run(python, "-W", "error", "-c", IMPORTS).strip() == str(site / "lightning_pipes" / "__init__.py")
    run(python, "-m", "compileall", "-q", site / "lightning_pipes")
    # our dependencies are installed for this version
    if site.parent.name == f"python{sys.version_info[0]}.{sys.version_info[1]}":
        folders = {str(Path(find_origin(each)).parents[1]) for each in ("torch", "hydra")}
        run(python, "-c", f"import sys; sys.path += {sorted(folders)}\n{TRAINS}")


@pytest.mark.slow
def test_an_editable_install_without_links_is_refused(linkless: Path, tmp_path: Path) -> None:
    program = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=linkless, capture_output=True, text=True)
    assert done.returncode != 0
    assert "lightning_pipes.conf and lightning_pipes.strategies cannot be imported" in done.stderr
    assert "core.symlinks=true" in done.stderr


@pytest.mark.slow
def test_sources_without_the_folders_are_refused(linkless: Path, tmp_path: Path) -> None:
    shutil.copytree(linkless, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("strategies"))
    done = subprocess.run([sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "lightning_pipes.strategies cannot be built" in done.stderr
