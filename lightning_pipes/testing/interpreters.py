"""Runs with separate interpreters as processes, found by a token in their environment.

They end as a user's do, which forked ones that leave by `os._exit` do not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

TOKEN = "LIGHTNING_PIPES_RUN"
"""The environment variable that all processes of a run inherit."""
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PET_", "LIGHTNING_PIPES_")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
_CLONE_NEWNS = 0x20000


def run_environment(token: str, temporary: Path) -> dict[str, str]:
    """Return the whole environment of a run's first process, without variables of another launcher.

    One thread a process, so that sums are the same whatever starts it.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    return own | {
        TOKEN: token,
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(temporary.parent),  # made by the import of torch
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


def find_processes(token: str) -> dict[int, dict[str, str]]:
    """Return the environment of each living process that was started with this token."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if token.encode() in text:
            env = dict(pair.split("=", 1) for pair in text.decode(errors="replace").split("\0") if "=" in pair)
            if env.get(TOKEN) == token:
                found[int(path.parent.name)] = env
    return found


def rank_of(env: Mapping[str, str]) -> int:
    """Return the rank of the process with that environment, on one host."""
    return int(env.get("RANK", env.get("LOCAL_RANK", "0")))


def wait_until(ready: Callable[[], object], seconds: float) -> bool:
    """Return whether `ready()` became true within `seconds`."""
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def end_all(token: str) -> None:
    """End all remaining processes of a run. Processes with `faulthandler` enabled print their stacks."""
    for number, seconds in ((signal.SIGABRT, 3.0), (signal.SIGKILL, 30.0)):
        for pid in find_processes(token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, number)
        if wait_until(lambda: not find_processes(token), seconds):
            return


def isolate_shared_memory() -> bool:
    """Give this process and its children an empty /dev/shm of their own. Return whether that succeeded: it needs root
    on Linux."""
    libc = ctypes.CDLL(None)
    if os.geteuid() != 0 or not hasattr(libc, "unshare") or libc.unshare(_CLONE_NEWNS):
        return False
    commands = (("--make-rprivate", "/"), ("-t", "tmpfs", "tmpfs", "/dev/shm"))
    return all(subprocess.run(["mount", *each], check=False).returncode == 0 for each in commands)


def list_entries(*folders: Path) -> set[str]:
    """Return the names of all entries of some folders."""
    return {str(path) for folder in folders for path in folder.iterdir()}
