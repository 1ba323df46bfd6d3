"""The example as a process of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from lightning_pipes.testing.ranks import TOKEN, scale_timeout

ROOT = Path(__file__).parents[2]
STARTUP = ROOT / "tests" / "startup"
"""What makes interpreters start sooner, for PYTHONPATH."""
SCRIPT = str(ROOT / "examples" / "train.py")
EPOCHS = 12
SETTINGS = [
    "model.width=16",
    "model.blocks=2",
    "data.context=16",
    "data.windows=24",
    "data.batch_size=8",
    "pipeline.microbatches=4",
    f"trainer.max_epochs={EPOCHS}",
    "trainer.val_check_interval=1.0",
    "trainer.log_every_n_steps=1",
    "trainer.enable_progress_bar=false",
]


def environment(token: str) -> dict[str, str]:
    """What to add to the environment; one thread a process, so that sums are the same whatever starts it."""
    path = f"{STARTUP}{os.pathsep}{ROOT}"
    return {TOKEN: token, "PYTHONPATH": path, "RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}


def wait_until(ready: Callable[[], object], agents: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + scale_timeout(90)
    while not ready():
        assert time.monotonic() < deadline
        assert all(agent.poll() is None for agent in agents), "".join(agent.communicate()[0] for agent in agents)
        time.sleep(0.01)
