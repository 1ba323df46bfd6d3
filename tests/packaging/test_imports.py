"""Check which packages training with a built-in schedule does not import."""

from __future__ import annotations

import subprocess
import sys

LATER = [
    *("matplotlib", "numba", "ortools", "sklearn", "optuna", "hydra", "ray", "torch.distributed.checkpoint"),
    *(f"lightning_pipes.{name}" for name in ("arrays", "cost.zoo", "sim.page", "supernets", "tune", "ray")),
]
PROGRAM = """
import sys
import lightning
before = set(sys.modules)
from lightning_pipes import PipelineStrategy
PipelineStrategy("1f1b")
print(*sorted(set(sys.modules) - before))
"""


def test_unneeded_modules_are_imported_later() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=600)
    found = done.stdout.split()
    assert "lightning_pipes.trainer.strategy" in found
    assert [name for name in found if any(name == each or name.startswith(f"{each}.") for each in LATER)] == []
