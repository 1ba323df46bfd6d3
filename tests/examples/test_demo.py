"""`make demo` ends balanced, and as fast as was predicted; `benchmarks/demo.py` looks at ten whole runs. The other
benchmarks print their numbers."""

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
"""What prints headline numbers in two minutes on a quiet machine."""


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
    """Whether other programs compete for the cores now, so that a step takes longer or shorter than a moment ago."""
    return psutil.cpu_percent(interval=1.0) > 25


@pytest.mark.slow
def test_the_demo_is_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too: one layer further a stage takes three times as long as the other. Whether a step is as
    predicted shows where nothing else runs, below."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # as users have it
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
