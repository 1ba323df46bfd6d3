"""Check that `make demo` ends balanced and with the predicted speed.

The file `benchmarks/demo.py` measures ten whole runs. The other benchmarks print their numbers.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]


NEEDS = {
    "__init__.py": "is no script",
    "netlab.py": "is a command",
    "gpu.py": "" if torch.cuda.is_available() else "needs a GPU",
    "lightning_suite.py": "needs Lightning's own tests",
}
QUICK = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if not NEEDS.get(path.name))
"""Benchmarks that print headline numbers within two minutes on an idle machine."""


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_quick_numbers(name: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / name), "--quick", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found
    assert not [key for key, value in found.items() if isinstance(value, float) and not math.isfinite(value)]


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_the_demo", ROOT / "benchmarks" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def busy() -> bool:
    """Return whether other programs use the cores now, so that the time of a step varies."""
    return psutil.cpu_percent(interval=1.0) > 25


@pytest.mark.slow
def test_the_demo_is_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the final cut of the demo, also on a busy machine.

    With a cut one layer away, one stage takes three times as long as the other. The predicted speed is only checked on
    an idle machine, in the test below.
    """
    monkeypatch.delenv("PYTHONPATH", raising=False)  # as on users' machines
    demo = benchmark()
    runs = (demo.demo("trainer.limit_train_batches=14", "trainer.limit_val_batches=1") for _ in range(3))
    assert demo.BALANCED in (run.cut for run in runs)


@pytest.mark.alone
@pytest.mark.slow
def test_ten_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    if busy():
        pytest.skip("other programs keep the cores busy")
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert benchmark().main() == 0
