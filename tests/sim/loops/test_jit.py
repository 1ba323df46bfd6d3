"""Check when numba is used, and where its compiled code is cached."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_pipes
from lightning_pipes.sim import load_kernel
from lightning_pipes.sim.loops import jit, kernel
from lightning_pipes.sim.loops.kernel import SIMULATION_KERNELS

SIMULATE = """
from lightning_pipes.sim import load_kernel, makespan
from lightning_pipes.sim.loops.kernel import SIMULATION_KERNELS
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.testing.generators import uniform
import numba
before = numba.config.CACHE_DIR
plan, costs = uniform(2, 3, f=1, b=2)
print(load_kernel(), makespan(GPipe().program(plan), plan, costs), numba.config.CACHE_DIR == before)
stats = SIMULATION_KERNELS.numba.run.run_fixed_order.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


@pytest.fixture
def fresh(monkeypatch):
    """Return an unused kernel, as in a process that has not simulated yet."""
    unused = jit.JitKernel(*SIMULATION_KERNELS._functions, patience=SIMULATION_KERNELS.patience)
    monkeypatch.setattr(kernel, "SIMULATION_KERNELS", unused)
    return unused


def simulate_apart(**environment):
    """Return the lines that a separate process prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    run = [sys.executable, "-c", SIMULATE]
    found = subprocess.run(run, capture_output=True, text=True, env={**kept, **environment}, check=True)
    assert not found.stderr
    return found.stdout.splitlines()


def files(folder):
    return {path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_python_until_numba_pays(fresh):
    pytest.importorskip("numba")
    fresh.patience = 100
    assert [fresh.select(40).name for _ in range(4)] == ["python", "python", "numba", "numba"]


def test_who_knows_better_loads_it_at_once(fresh):
    pytest.importorskip("numba")
    assert fresh.select(1).name == "python"
    assert load_kernel() == "numba"
    assert fresh.select(1).name == "numba"


def test_without_numba_python_does_it_all(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert load_kernel() == "python"


def test_a_numba_that_does_not_load_is_mentioned(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(jit, "find_spec", lambda name: object())
    with pytest.warns(UserWarning, match="numba is installed, but can't be imported"):
        assert load_kernel() == "python"


def test_machine_code_is_kept_in_the_users_cache_and_nowhere_else(tmp_path):
    pytest.importorskip("numba")
    source = Path(lightning_pipes.__file__).parent
    before = files(source)
    assert simulate_apart(XDG_CACHE_HOME=str(tmp_path)) == ["numba 12 True", "0 1"]
    assert files(source) == before
    kept = files(tmp_path)
    assert kept
    assert {path.relative_to(tmp_path).parts[:2] for path in kept} == {("lightning_pipes", "numba")}
    assert simulate_apart(XDG_CACHE_HOME=str(tmp_path)) == ["numba 12 True", "1 0"]
    assert files(tmp_path) == kept


def test_machine_code_of_other_sources_is_not_loaded(tmp_path, monkeypatch):
    """The folder of compiled code changes with each module beside the function, for example if one is removed."""
    pytest.importorskip("numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_loop.py").write_text("def add_one(n):\n    return n + 1\n")
    add_one = importlib.import_module("one_loop").add_one
    for number in (1, 2, 2):
        assert jit.compile_functions(add_one)["add_one"](2) == 3
        assert len([*(tmp_path / "cache").iterdir()]) == number
        (tmp_path / "neighbor.py").touch()


def test_folder_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "here"))
    assert jit.cache_folder() == tmp_path / "here"


def test_without_a_writable_folder_it_is_compiled_each_time(tmp_path):
    pytest.importorskip("numba")
    (tmp_path / "a file").touch()
    before = files(Path(lightning_pipes.__file__).parent)
    assert simulate_apart(XDG_CACHE_HOME=str(tmp_path / "a file")) == ["numba 12 True", "0 1"]
    assert files(Path(lightning_pipes.__file__).parent) == before
