"""Run a function on several ranks, each in a separate process, with a deadline.

The processes are forked from a server that has already imported torch and Lightning, because these imports take
seconds. Ranks get the same environment as with torchrun. The caller hosts their store, so that no port has to be
guessed.

Processes with separate interpreters are identified by a token in their environment. They end like the processes of
users, unlike forked processes, which exit with `os._exit`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_pipes.engine.compute.rng import seed_all
from lightning_pipes.engine.watch import heartbeat


def scale_timeout(seconds: float, least: float = 4.0) -> float:
    """Return a time limit for slow and busy machines, given the `seconds` that are enough on a quiet machine.

    The factor is twice the number of runnable processes per core, now or in the last minutes, but at least `least` and
    at most 20.
    """
    waiting = max(os.getloadavg()) / (os.cpu_count() or 1)
    return seconds * min(max(least, 2 * waiting), 20.0)


# A store looks up the name of every client that connects, and does not answer requests during this time. With a name
# server that loses one query in fifty, one test in ten would take five seconds longer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

PRELOADED_MODULES = [
    "torch",
    "torch.distributed",
    "lightning.pytorch",
    "lightning_pipes.testing.ranks",
    "lightning_pipes.arrays.array",
    "lightning_pipes.supernets.stream",
    "omegaconf",
    "pytest",
]
"""The modules that the server imports for the ranks. Modules that are not installed are skipped."""


@dataclass(frozen=True)
class RankResult:
    """The result of one rank.

    Attributes:
        rank: the rank.
        value: the return value of the function, or None if it did not return.
        error: the traceback of the exception, or a description of how the process ended. It is empty if the function
            returned.
        exitcode: the exit code of the process, or None if it was killed at the deadline.
        seconds: the seconds from the start of all ranks to the end of this rank.
    """

    rank: int
    value: Any
    error: str
    exitcode: int | None
    seconds: float


class RanksFailedError(AssertionError):
    """A rank raised an exception, died, or missed the deadline. The message contains every traceback."""


SEED_VARIABLES = "PL_GLOBAL_SEED", "PL_SEED_WORKERS"
"""The environment variables by which Lightning passes the seed of `seed_everything` to samplers and workers."""


def run_ranks(
    fn: Callable[..., Any], n: int, *args: Any, timeout: float = 60.0, env: dict[str, str] | None = None
) -> list[Any]:
    """Run `fn(rank, *args)` in `n` processes and return the results by rank.

    Args:
        fn: the function. Processes find it by its module and name.
        n: the number of processes.
        args: further arguments. Arguments and return values are pickled.
        timeout: the time limit in seconds. It is longer on a busy machine, see `scale_timeout`.
        env: additional environment variables of all ranks.

    Raises:
        RanksFailedError: if a rank did not return within the time limit.
    """
    return returned_values(watch_ranks(fn, n, *args, timeout=timeout, env=env))


def returned_values(results: Sequence[RankResult]) -> list[Any]:
    """Return the values that the ranks returned.

    Raises:
        RanksFailedError: if a rank did not return.
    """
    if any(o.error for o in results):
        raise RanksFailedError(
            "\n".join(f"--- rank {o.rank} after {o.seconds:.1f} s\n{o.error}" for o in results if o.error)
        )
    return [o.value for o in results]


def watch_ranks(
    fn: Callable[..., Any], n: int, *args: Any, timeout: float = 60.0, env: dict[str, str] | None = None
) -> list[RankResult]:
    """Run `fn(rank, *args)` in `n` processes and return the result of each process.

    Failures of ranks do not raise an exception, and no process survives. The arguments are the same as for `run_ranks`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(n)]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank_main,
                args=(
                    fn,
                    rank,
                    n,
                    args,
                    store.port,
                    pipes[rank][1],
                    env or {},
                    os.path.join(folder, str(rank)),
                    timeout,
                ),
                name=f"rank {rank}",
            )
            for rank in range(n)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        results = _collect(processes, [reader for reader, _ in pipes], started, timeout, folder)
    for process in processes:
        process.close()
    return results


def _collect(
    processes: Sequence[Any], readers: Sequence[Connection], started: float, timeout: float, folder: str
) -> list[RankResult]:
    results: dict[int, RankResult] = {}
    replies: dict[int, tuple[Any, str]] = {}
    open_readers = {reader: rank for rank, reader in enumerate(readers)}
    sentinels = {process.sentinel: rank for rank, process in enumerate(processes)}
    while sentinels:
        left = started + scale_timeout(timeout) - time.monotonic()
        ready = wait([*open_readers, *sentinels], timeout=max(left, 0))
        seconds = time.monotonic() - started
        for thing in ready:
            if thing in open_readers:
                rank = open_readers.pop(thing)
                try:
                    replies[rank] = pickle.loads(thing.recv_bytes())
                except EOFError:
                    continue
        for thing in ready:
            if thing in sentinels:
                rank = sentinels.pop(thing)
                processes[rank].join()
                code = processes[rank].exitcode
                value, error = replies.get(rank, (None, f"the process ended with exit code {code} without a result"))
                results[rank] = RankResult(rank, value, error, code, seconds)
        if not ready:  # the deadline
            for rank in sentinels.values():
                processes[rank].kill()
            for rank in sentinels.values():
                processes[rank].join()
                where = _stacks(os.path.join(folder, str(rank)))
                error = (
                    f"the process did not end within {time.monotonic() - started:.0f} s. "
                    f"Its stacks after {timeout} s:\n{where}"
                )
                results[rank] = RankResult(rank, None, error, None, time.monotonic() - started)
            break
    return [results[rank] for rank in sorted(results)]


def _stacks(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return "unknown"


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    n: int,
    args: tuple[Any, ...],
    port: int,
    pipe: Connection,
    env: dict[str, str],
    stacks: str,
    timeout: float,
) -> None:
    die_with_parent()
    threading.Thread(target=_die_with_starter, name="owner", daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # With other start methods, locks (for example of progress bars) leave files behind if a process is killed.
    multiprocessing.set_start_method("fork", force=True)
    launched = {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    for name in SEED_VARIABLES:  # the fork server has them if seed_everything ran in the test before which it started
        os.environ.pop(name, None)
    os.environ.update(rank_environment(rank, n, "127.0.0.1", port) | launched | env)
    torch.set_num_threads(1)
    # Forked ranks share the seed that the server has drawn. Processes that a launcher starts have different seeds.
    seed_all(rank, torch.device("cpu"), everything=True)
    gc.freeze()  # loaded modules are not garbage, and scanning them at exit takes a second
    with open(stacks, "w") as file:
        faulthandler.dump_traceback_later(max(timeout - 3.0, timeout / 2), file=file)
        value, error, status = None, "", 0
        try:
            value = fn(rank, *args)
        except BaseException as raised:
            error, status = traceback.format_exc(), _status(raised)
        try:
            pipe.send_bytes(pickle.dumps((value, error)))  # `send` would use shared memory for tensors
        except Exception:
            pipe.send_bytes(pickle.dumps((None, f"the result can't be sent: {traceback.format_exc()}")))
        faulthandler.cancel_dump_traceback_later()
    if dist.is_initialized() and not error:
        dist.destroy_process_group()
    if not error:
        heartbeat.stop_heartbeat()
    sys.stdout.flush()
    sys.stderr.flush()
    if error:  # exit like a separate interpreter, without waiting for dead peers
        ctypes.pythonapi.Py_Exit(status)
    os._exit(0)


def _status(raised: BaseException) -> int:
    """Return the exit status of an interpreter that ends with this exception."""
    return raised.code if isinstance(raised, SystemExit) and isinstance(raised.code, int) else 1


def _die_with_starter() -> None:
    """Kill this process when the process that started the ranks ends.

    `die_with_parent` is not sufficient, because the parent is the fork server, which lives as long as any rank.
    """
    starter = multiprocessing.parent_process()
    assert starter is not None
    wait([starter.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def rank_environment(rank: int, n: int, address: str, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for one of `n` ranks.

    Args:
        rank: the rank.
        n: the number of ranks.
        address: the address of the store, which is on the first rank.
        port: the port of the store.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "ranks",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def die_with_parent() -> None:
    """Request that Linux kills this process when its parent ends. Do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


RUN_VARIABLE = "LIGHTNING_PIPES_RUN"
"""The name of an environment variable that all processes of a run inherit."""
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PET_", "LIGHTNING_PIPES_")
_LAUNCHER_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
_CLONE_NEWNS = 0x20000


def run_environment(token: str, temporary: Path) -> dict[str, str]:
    """Return the complete environment of the first process of a run, without the variables of other launchers.

    Each process uses one thread, so that sums do not depend on the launcher.
    """
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    return own | {
        RUN_VARIABLE: token,
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(temporary.parent),  # created when torch is imported
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }


def find_processes(token: str) -> dict[int, dict[str, str]]:
    """Return the environment of each living process that was started with this token, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if token.encode() in text:
            env = dict(pair.split("=", 1) for pair in text.decode(errors="replace").split("\0") if "=" in pair)
            if env.get(RUN_VARIABLE) == token:
                found[int(path.parent.name)] = env
    return found


def rank_of(env: Mapping[str, str]) -> int:
    """Return the rank of the process with the given environment, for runs on one host."""
    return int(env.get("RANK", env.get("LOCAL_RANK", "0")))


def wait_until(ready: Callable[[], object], seconds: float, every: float = 0.1) -> bool:
    """Wait until `ready()` returns a true value, and return whether this happened in time.

    Args:
        ready: the condition.
        seconds: the time limit.
        every: the seconds between two calls of `ready`.
    """
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True


def end_all(token: str) -> None:
    """End all remaining processes of a run. Processes that have enabled `faulthandler` print their stacks."""
    for number, seconds in ((signal.SIGABRT, 3.0), (signal.SIGKILL, 30.0)):
        for pid in find_processes(token):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, number)
        if wait_until(lambda: not find_processes(token), seconds):
            return


def isolate_shared_memory() -> bool:
    """Give this process and its children a separate, empty /dev/shm, and return whether this succeeded.

    It requires root on Linux.
    """
    libc = ctypes.CDLL(None)
    if os.geteuid() != 0 or not hasattr(libc, "unshare") or libc.unshare(_CLONE_NEWNS):
        return False
    commands = (("--make-rprivate", "/"), ("-t", "tmpfs", "tmpfs", "/dev/shm"))
    return all(subprocess.run(["mount", *each], check=False).returncode == 0 for each in commands)


def list_entries(*folders: Path) -> set[str]:
    """Return the paths of all entries of the given folders."""
    return {str(path) for folder in folders for path in folder.iterdir()}
