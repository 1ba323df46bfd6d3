"""Watches the process that started this one, and the processes that this one started as ranks of the same job.

If the launcher of a rank has ended, no process can restart or stop the rank any longer, so the rank ends itself,
regardless of what it is doing. A launcher that is a rank itself ends when one of the ranks that it started fails, and
waits for these ranks when it exits.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from lightning_pipes.engine.watch import failure, process_exit
from lightning_pipes.engine.watch.heartbeat import StallTimer
from lightning_pipes.engine.watch.identity import has_ended, is_stopped
from lightning_pipes.ir import PipelineError

_log = logging.getLogger(__name__)

LAUNCHER_VARIABLE = "LIGHTNING_PIPES_LAUNCHER"
"""The environment variable that contains the process ID of the launcher."""
TERMINATED_STATUS = 128 + 15
"""Exit status of a process that exits in order after SIGTERM."""
LAUNCHER_GRACE_SECONDS = failure.GRACE_SECONDS - 1.0
"""How long a process continues after its launcher has ended, or a rank that it has started has failed, in seconds. In
this time, the process may end with a more specific error. It is shorter than the time after which the watchdog of
`failure` ends the process, because the watchdog does not end the ranks that the process has started."""
_RANK_REASON_SECONDS = 1.0
"""How long to wait for a failure of the run that explains the end of a started rank, before that end is logged, in
seconds."""
_EXIT_WAIT_SECONDS = 4.0
"""How long a failed process waits for the ranks that it has started when it exits, in seconds."""
_LAUNCHER_POLL_SECONDS = 0.3
_CHECK_SECONDS = 1.0
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
_first_pids = os.getpid(), os.getppid()
"""The process IDs of this process and its parent at import. They differ from the current ones in a forked process."""


class LauncherEndedError(PipelineError):
    """The process that started this one has ended."""


class RankStoppedError(PipelineError):
    """A rank of the same job on this host is stopped."""


class _Launcher:
    """Watches the launcher, if `start_watching` has found one."""

    def __init__(self) -> None:
        self.pid = 0
        self.gone = False
        self.stop_timeout = failure.HEARTBEAT_TIMEOUT

    def start_watching(self) -> None:
        if not self.pid and (pid := _launcher()):
            self.watch_parent(pid)

    def watch_parent(self, pid: int) -> None:
        self.pid, self.gone = pid, False
        if not self._look():
            threading.Thread(target=self._watch, name="lightning_pipes launcher", daemon=True).start()

    def _look(self) -> bool:
        self.gone = self.gone or os.getppid() != self.pid
        return self.gone

    def _watch(self) -> None:
        while not self._look():
            time.sleep(_LAUNCHER_POLL_SECONDS)
        time.sleep(LAUNCHER_GRACE_SECONDS)
        _end_process(f"process {self.pid}, which has started this one, has ended; so does this one")


class _Launched:
    """Watches the processes that this one has started as ranks."""

    def __init__(self) -> None:
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        """The processes by rank."""
        self._should_watch = True

    def start_watching(self, processes: dict[int, subprocess.Popen[bytes]]) -> None:
        self.processes = processes
        self._should_watch = True
        threading.Thread(target=self._watch, name="lightning_pipes launched", daemon=True).start()
        atexit.register(self._wait_at_exit)

    def send_signal(self, signum: int) -> None:
        for process in self.processes.values():
            process.send_signal(signum)  # has no effect on processes that have ended

    def stop_watching(self) -> None:
        self._should_watch = False

    def exited_ranks(self) -> dict[int, str]:
        """Return how ranks have ended, by rank."""
        return {
            rank: how_it_ended(process.returncode)
            for rank, process in self.processes.items()
            if process.poll() is not None
        }

    def _watch(self) -> None:
        """End this process and all processes that it has started if one of them has failed."""
        while True:
            codes = {rank: process.poll() for rank, process in self.processes.items()}
            if not self._should_watch:
                return
            for rank, code in codes.items():
                if code not in (None, 0, TERMINATED_STATUS):
                    time.sleep(_RANK_REASON_SECONDS)
                    if not process_exit.has_given_up():  # otherwise, the cause is already known and logged
                        _log.error("rank %d, process %d, %s", rank, self.processes[rank].pid, how_it_ended(code))
                    time.sleep(LAUNCHER_GRACE_SECONDS - _RANK_REASON_SECONDS)
                    self._kill()
                    _end_process(f"rank {rank}, which this process has started, {how_it_ended(code)}; so does this one")
            if None not in codes.values():
                return
            time.sleep(_LAUNCHER_POLL_SECONDS)

    def _wait_at_exit(self) -> None:
        """Wait for the started processes, because they are ranks of the job that ends with this process."""
        until = time.monotonic() + _EXIT_WAIT_SECONDS
        while any(process.poll() is None for process in self.processes.values()):
            if process_exit.has_given_up() and time.monotonic() > until:
                self._kill()
                return
            time.sleep(0.02)

    def _kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()


_launcher_watch, _launched_ranks = _Launcher(), _Launched()


def exit_with_launcher(stop_timeout: float) -> None:
    """End this process when its launcher ends, if the launcher is Lightning or torchrun.

    Args:
        stop_timeout: how long other processes of this host may be stopped until `StartupWatch` reports it, in seconds.
    """
    _launcher_watch.stop_timeout = stop_timeout
    _launcher_watch.start_watching()


def exit_with_parent(pid: int) -> None:
    """End this process when process `pid`, which has forked it, ends."""
    _launcher_watch.watch_parent(pid)


@contextmanager
def environment_for_children(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started within the `with` block.

    Args:
        variables: the values of the variables, which are reset at the end of the block.
    """
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def watch_launched(first_rank: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Watch processes that this one has started as ranks.

    Args:
        first_rank: the rank of the first process. The others have consecutive ranks.
        processes: the started processes.
    """
    _launched_ranks.start_watching(dict(enumerate(processes, first_rank)))


def stop_watching_launched() -> None:
    """Stop reporting the end of started ranks, because this process is about to end them."""
    _launched_ranks.stop_watching()


def signal_launched(signum: int) -> None:
    """Send a signal to the ranks that this process has started."""
    _launched_ranks.send_signal(signum)


def exited_ranks() -> dict[int, str]:
    """Return the ranks started by this process that have ended, with a description of how they ended."""
    return _launched_ranks.exited_ranks()


def check_launcher() -> None:
    """Check that the launcher is alive.

    Raises:
        LauncherEndedError: the launcher has ended.
    """
    if _launcher_watch.gone:
        raise LauncherEndedError(f"process {_launcher_watch.pid}, which has started this one, has ended")


class StartupWatch:
    """Watches the processes of this host until the ranks are connected and have heartbeats.

    In this phase, a process may legitimately be busy for a long time, for example because it loads data, but a stopped
    process can be detected. `exit_with_launcher` sets the timeout for stopped processes. Creating this object also
    starts watching the launcher.
    """

    def __init__(self) -> None:
        _launcher_watch.start_watching()
        self._stall_timers: defaultdict[int, StallTimer] = defaultdict(partial(StallTimer, 2 * _CHECK_SECONDS))
        self._moves = itertools.count(1)
        self._next = 0.0

    def check(self) -> None:
        """Check the launcher and, at most once a second, the other processes.

        This method may be called at any frequency.

        Raises:
            LauncherEndedError: the launcher has ended.
            RankStoppedError: another rank of this host has been stopped for longer than the timeout.
        """
        check_launcher()
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _CHECK_SECONDS
        for name, pid in _host_processes():
            moved = 0 if is_stopped(pid) else next(self._moves)
            seconds = self._stall_timers[pid].stalled_seconds(moved, now)
            if seconds > _launcher_watch.stop_timeout:
                raise RankStoppedError(
                    f"{name}, process {pid}, has been stopped for {seconds:.0f} s, and others wait for "
                    f"it. Continue it (kill -CONT {pid}) and start again; heartbeat_timeout sets how long ranks wait"
                )


def _host_processes() -> Iterator[tuple[str, int]]:
    """Yield the names and process IDs of the other ranks on this host.

    These are the ranks that this process has started, the ranks that its launcher has started, and the launcher if it
    is a rank.
    """
    for rank, process in _launched_ranks.processes.items():
        yield f"rank {rank}", process.pid
    if not _launcher_watch.pid or _launcher_watch.gone:
        return
    if os.environ.get(LAUNCHER_VARIABLE) == str(_launcher_watch.pid):
        yield "local rank 0", _launcher_watch.pid
    with suppress(psutil.Error):
        for child in psutil.Process(_launcher_watch.pid).children():
            local, among_all = (_in_environment(child.pid, name) for name in ("LOCAL_RANK", "RANK"))
            if child.pid != os.getpid() and local:
                yield f"rank {among_all}" if among_all else f"local rank {local}", child.pid


def how_it_ended(code: int) -> str:
    """Return a description of an exit status."""
    return f"was ended by signal {-code}" if code < 0 else f"has ended with exit status {code}"


def _launcher() -> int:
    """Return the ID of the process that started this one as a rank.

    The result is 0 if there is no such process, for example if this process is not a rank but was started by a rank.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" and LAUNCHER_VARIABLE in os.environ:
        pid = int(os.environ[LAUNCHER_VARIABLE])
        return pid if os.getppid() == pid or has_ended(pid) else 0
    parent = _first_pids[1] if _first_pids[0] == os.getpid() else os.getppid()
    if _TORCHRUN_VARIABLE in os.environ and _in_environment(parent, _TORCHRUN_VARIABLE) is None:
        return parent
    return 0


def _in_environment(pid: int, name: str) -> str | None:
    """Return the value of an environment variable of a process, or None if it is not set or not readable."""
    with suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return next((pair.partition("=")[2] for pair in pairs if pair.startswith(f"{name}=")), None)
    return None


def _end_process(why: str) -> None:
    with suppress(Exception):
        print(f"[process {os.getpid()}] {why}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)
