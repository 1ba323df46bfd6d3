"""Check that programs which do not use the package run even if the package is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BREAK = """
import sys
from importlib.abc import MetaPathFinder


class Breaks(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in BROKEN:
            raise ERROR("nobody thought of this")


sys.meta_path.insert(0, Breaks())
"""


def output_of(code: str, broken: str, error: str = "AttributeError") -> str:
    """Return the errors that a program prints if importing one of our modules raises an error."""
    code = BREAK.replace("BROKEN", repr((broken,))).replace("ERROR", error) + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    return done.stderr


@pytest.mark.parametrize(
    ("first", "error"),
    [pytest.param("lightning_pipes", "AttributeError", marks=pytest.mark.slow), ("lightning.pytorch", "SyntaxError")],
)
def test_lightning_can_be_imported(first, error):
    second = {"lightning_pipes": "lightning.pytorch", "lightning.pytorch": "lightning_pipes"}[first]
    code = f"import {first}; import {second}; import lightning.pytorch as pl; pl.Trainer; print('done')"
    said = output_of(code, "lightning_pipes.trainer", error)
    assert said.count("strategies 'pipeline_...' of lightning_pipes can't be used") == 1
    assert f"{error}: nobody thought of this" in said


@pytest.mark.slow
def test_a_loader_that_can_t_be_changed():
    """Check an environment with its own import mechanism."""
    code = """
import importlib.machinery as machinery
machinery.SourceFileLoader.__getattribute__, get = None, object.__getattribute__
def attribute(self, name):
    if name == "__dict__":
        raise TypeError("no attributes here")
    return get(self, name)
machinery.SourceFileLoader.__getattribute__ = attribute
import lightning_pipes, lightning.pytorch as pl; pl.Trainer; print('done')
"""
    said = output_of(code, "nothing")
    assert "TypeError: no attributes here" in said or "__dict__" in said


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ("lightning_pipes.tune.schema", "the configuration schemas"),
        ("lightning_pipes.tune.messages", "hydra/sweeper=optuna"),
        ("lightning_pipes.tune.sweep_settings", "hydra/launcher=job_array"),
    ],
)
def test_hydra_apps_start(broken, what):
    code = "from hydra.core.plugins import Plugins; Plugins.instance(); print('done')"
    said = output_of(code, broken)
    assert f"{what} of lightning_pipes can't be used: AttributeError: nobody thought of this" in said
