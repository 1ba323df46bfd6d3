"""The command that starts the current program again."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from lightning_pipes.engine.watch import script


def find(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], spec: str | None = None, file: Path | None = None
) -> tuple[list[str], str] | None:
    """Return the arguments and the directory that `find_command` finds for the given main module."""
    main = ModuleType("__main__")
    main.__spec__ = None if spec is None else ModuleSpec(spec, None)
    if file is not None:
        main.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", argv)
    found = script.find_command()
    return None if found is None else ([*found[0][1:]], found[1])


def test_command_of_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command runs in the directory where the program was started, because the script itself changes to another."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "app.zip").touch()
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(script, "_first_directory", str(tmp_path))
    monkeypatch.chdir(tmp_path / "sub")
    here, path = str(tmp_path), str(tmp_path / "train.py")
    assert find(monkeypatch, ["/x/package/main.py", "-a"], "package.main") == (["-m", "package.main", "-a"], here)
    assert find(monkeypatch, ["app.zip", "-a"], "__main__") == ([str(tmp_path / "app.zip"), "-a"], here)
    monkeypatch.setattr(script, "_first_directory", str(tmp_path / "sub"))  # changed before the import
    assert find(monkeypatch, ["train.py", "-a"], file=tmp_path / "train.py") == ([path, "-a"], f"{here}/")


def test_programs_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (["-"], ["-c", "1"], [""]):
        assert find(monkeypatch, argv) is None


@pytest.mark.parametrize(
    ("spec", "launcher"),
    [
        ("submitit.core._submit", "submitit"),
        ("joblib.externals.loky.backend.popen_loky_posix", "joblib"),
        ("package.main", None),
        (None, None),
    ],
)
def test_launcher_of_a_job(spec: str | None, launcher: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, ["job"], spec)
    assert script.find_job_launcher() == launcher
