"""Functions that run the examples in separate processes or on ranks."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from lightning_pipes.testing.ranks import RUN_VARIABLE, rank_environment, run_ranks, scale_timeout

ROOT = Path(__file__).parents[2]
STARTUP = ROOT / "tests" / "startup"
"""A folder for PYTHONPATH that makes interpreters start faster."""
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
    """Return additional environment variables for a run.

    Each process has one thread, so that sums do not depend on the launcher.
    """
    path = f"{STARTUP}{os.pathsep}{ROOT}"
    return {RUN_VARIABLE: token, "PYTHONPATH": path, "RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}


def run_main(rank: int, script: str, cwd: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run an example as the main program of this process, and return its exit status and output."""
    os.chdir(cwd)
    if os.environ["WORLD_SIZE"] == "1":  # as if started without a launcher
        for name in rank_environment(0, 1, "", 0):
            del os.environ[name]
    path = ROOT / "examples" / script
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(bool(end.code))
            print(end.code, file=sys.stderr)
    return subprocess.CompletedProcess(sys.argv, status, out.getvalue(), err.getvalue())


def run_in_ranks(script: str, cwd: Path, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run an example on ranks that have already imported its packages, and return the result of rank 0."""
    found, *_ = run_ranks(run_main, ranks, script, cwd, arguments, timeout=120)
    return found  # type: ignore[no-any-return]


def wait_until(ready: Callable[[], object], agents: list[subprocess.Popen[str]]) -> None:
    """Wait until `ready()` returns a true value. Fail if it takes too long or an agent ends."""
    deadline = time.monotonic() + scale_timeout(90)
    while not ready():
        assert time.monotonic() < deadline
        assert all(agent.poll() is None for agent in agents), "".join(agent.communicate()[0] for agent in agents)
        time.sleep(0.01)
