"""The example as a plain script, whose other processes Lightning starts: one is killed, and none is left behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time

import pytest

from lightning_pipes.testing.patience import patience
from tests.launch.example import SCRIPT, SETTINGS, environment, processes, wait_until


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_nobody_survives(victim, tmp_path):
    """Lightning kills the first process, too, up to five seconds after one that it has started, and says so where that
    comes before our own word."""
    token = secrets.token_hex(8)
    with open(tmp_path / "said", "w") as said:
        command = [sys.executable, SCRIPT, *SETTINGS, "trainer.max_epochs=10000"]
        script = subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, **environment(token)}, stdout=said, stderr=said, text=True
        )
        wait_until(lambda: [*tmp_path.rglob("last.ckpt")], [script])
        pids = {int(env.get("LOCAL_RANK", "0")): pid for pid, env in processes(token)}
        assert pids.keys() == {0, 1}
        os.kill(pids[victim], signal.SIGKILL)
        assert script.wait(timeout=patience(30)) != 0
        until = time.monotonic() + patience(30)  # the interpreter takes its time on a busy machine
        while [*processes(token)] and time.monotonic() < until:
            time.sleep(0.02)
        assert not [*processes(token)]
    text = (tmp_path / "said").read_text()
    named = (
        f"rank {victim} (stage {1 - victim}) has ended",
        f"rank {victim}, which hosts the store",
        "[rank: 1] Child process",
    )
    assert any(name in text for name in named)
