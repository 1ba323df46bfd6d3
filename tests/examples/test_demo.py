"""`make demo` ends balanced, and as fast as was predicted; `benchmarks/demo.py` looks at ten whole runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

ROOT = Path(__file__).parents[2]


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


def test_the_demo_is_balanced(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too: one layer further a stage takes three times as long as the other. Whether a step is as
    predicted shows where nothing else runs, below."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # as users have it
    demo = benchmark()
    run = demo.demo("trainer.limit_train_batches=14", "trainer.limit_val_batches=1")
    assert run.cut == demo.BALANCED, run


@pytest.mark.alone
@pytest.mark.slow
def test_ten_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    if busy():
        pytest.skip("other programs keep the cores busy")
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert benchmark().main() == 0
