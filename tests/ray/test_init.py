"""Check what users see if Ray is not installed."""

from __future__ import annotations

import subprocess
import sys


def test_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['ray'] = None; import lightning_pipes.ray"  # as if Ray were not installed
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "lightning_pipes.ray needs Ray" in found.stderr
    assert "pip install lightning-pipes[ray]" in found.stderr.splitlines()[-1]
