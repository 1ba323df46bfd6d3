"""Lightning's own tests, run with a pipeline and compared with one process.

    python benchmarks/lightning_suite.py --tests FOLDER [--folder NAME ...] [--only TEXT] [--save] [--json]

FOLDER is the folder `tests` of a checkout of Lightning, in the version that is installed. The installed package does
not contain the tests:

    git clone --depth 1 --branch VERSION https://github.com/Lightning-AI/pytorch-lightning

The folders callbacks, checkpointing, loops, tuner, loggers, trainer and core of `tests_pytorch` are run if they exist.

Each test runs three times, in separate processes: unchanged, with one stage, and with two stages. A Trainer that a test
creates without a strategy, for the CPU and one device, gets a `PipelineStrategy`. All ranks run the whole test, like
the ranks of a script, and share its temporary folder.

A test passes if it passes on global rank 0, where Lightning logs, warns and saves. The number of tests that pass on all
ranks is also printed. The share is relative to the tests that pass unchanged. benchmarks/RESULTS.md explains why tests
fail.

This module is also the pytest plugin that it uses.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from _pytest.runner import runtestprotocol
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only

from benchmarks.harness.report import make_parser
from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import die_with_parent, rank_environment, scale_timeout

FOLDERS = ("callbacks", "checkpointing", "loops", "tuner", "loggers", "trainer", "core")
SAVED = Path(__file__).with_suffix(".json")
"""The file with the shares and the date of the last saved run."""
STAGES, RESULTS, FOLDER = "LIGHTNING_SUITE_STAGES", "LIGHTNING_SUITE_RESULTS", "LIGHTNING_SUITE_FOLDER"
"""Environment variables of the plugin.

They contain the number of stages, or 0 for none; the file that gets a line for each test; and the temporary folder of a
test.
"""
LEFT_SET = {"GLOO_SOCKET_IFNAME": "lo"}
"""Variables that a run with several ranks on one host leaves set, see docs/security.md.

Some tests fail if a variable is left set.
"""
SECONDS = 90.0
"""The time limit of a test, on a machine without other load."""

# ---- the plugin


class RankEnvironment(LightningEnvironment):
    """The cluster environment of the processes of one test.

    It does not depend on the environment variables, because a test may change them.
    """

    def __init__(self, rank: int, size: int, port: int) -> None:
        super().__init__()
        self._rank, self._size, self._port = rank, size, port

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_port(self) -> int:
        return self._port

    def world_size(self) -> int:
        return self._size

    def global_rank(self) -> int:
        return self._rank

    def local_rank(self) -> int:
        return self._rank

    def set_world_size(self, size: int) -> None:
        pass

    def set_global_rank(self, rank: int) -> None:
        pass


def is_plain(settings: dict[str, Any]) -> bool:
    """Return whether a Trainer with these settings would train in one process on the CPU."""
    return (
        settings.get("strategy", "auto") == "auto"
        and settings.get("accelerator", "auto") in ("auto", "cpu")
        and settings.get("devices", "auto") in ("auto", 1, "1")
        and settings.get("num_nodes", 1) == 1
    )


def give_strategy(make: Callable[[], PipelineStrategy], size: int) -> None:
    """Make each Trainer that would train in one process use a strategy.

    Args:
        make: returns a new strategy.
        size: the number of processes.
    """
    whole = pl.Trainer.__init__

    @functools.wraps(whole)
    def init(self: pl.Trainer, *args: Any, **settings: Any) -> None:
        if is_plain(settings):
            settings |= {"strategy": make(), "accelerator": "cpu", "devices": size}
        whole(self, *args, **settings)

    pl.Trainer.__init__ = init  # type: ignore[method-assign]


def hide_threads() -> None:
    """Hide the threads of this package from tests that only accept Lightning's own threads.

    They live as long as the process.
    """
    enumerate_all = threading.enumerate
    threading.enumerate = lambda: [t for t in enumerate_all() if not t.name.startswith("lightning_pipes")]


@pytest.fixture
def tmp_path() -> Path:
    """Return the folder that all ranks of a test share."""
    return Path(os.environ[FOLDER])


def run_rank(item: pytest.Item, rank: int, stages: int, port: int, pipe: Connection) -> None:
    """Run a test as one of several ranks, and send its outcome through `pipe`."""
    size = max(stages, 1)
    die_with_parent()
    torch.set_num_threads(1)
    if stages:
        if stages > 1:
            os.environ.update(rank_environment(rank, size, "127.0.0.1", port) | LEFT_SET)
        rank_zero_only.rank = rank  # type: ignore[attr-defined]
        hide_threads()
        give_strategy(lambda: PipelineStrategy(cluster_environment=RankEnvironment(rank, size, port)), size)
    outcome, said = "passed", ""
    try:
        for report in runtestprotocol(item, log=False, nextitem=None):
            if report.failed and outcome != "failed":
                outcome, said = "failed", report.longreprtext
            elif report.skipped and outcome == "passed":
                outcome = "skipped"
    except BaseException:
        outcome, said = "failed", traceback.format_exc()
    pipe.send((outcome, said))
    os._exit(0)


def run_ranks(item: pytest.Item, stages: int) -> list[tuple[str, str]]:
    """Run a test on all ranks.

    Returns:
        For each rank, the outcome ("passed", "failed" or "skipped") and the error.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(max(stages, 1)):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=run_rank, args=(item, rank, stages, port, writer))
        process.start()
        writer.close()
        ranks.append((process, reader))
    ends, deadline = [], time.monotonic() + scale_timeout(SECONDS)
    for process, reader in ranks:
        try:
            if not wait([reader], max(0.0, deadline - time.monotonic())):
                process.kill()
                ends.append(("failed", "no end in time"))
            else:
                ends.append(reader.recv())
        except EOFError:
            process.join()
            ends.append(("failed", f"the process ended with exit code {process.exitcode}"))
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()
    return ends


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    """Run a test in separate processes, and append its outcome to the results."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        ends = run_ranks(item, int(os.environ[STAGES]))
    with open(os.environ[RESULTS], "a") as file:
        file.write(json.dumps({"test": item.nodeid, "ranks": ends}) + "\n")
    return True


# ---- the command


def run_tests(tests: Path, folders: Sequence[str], only: str, stages: int) -> dict[str, list[tuple[str, str]]]:
    """Run the tests with a number of stages.

    Args:
        tests: the folder `tests` of a checkout of Lightning.
        folders: names of folders in `tests_pytorch`.
        only: an expression for pytest's `-k`.
        stages: the number of stages, or 0 for unchanged tests.

    Returns:
        For each test, the outcome ("passed", "failed" or "skipped") and the error on each rank.
    """
    with tempfile.TemporaryDirectory() as made:
        results = Path(made, "results")
        results.touch()
        python_path = [str(Path(__file__).parents[1]), str(tests), os.environ.get("PYTHONPATH", "")]
        own = {STAGES: str(stages), RESULTS: str(results), "PYTHONPATH": os.pathsep.join(filter(None, python_path))}
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.lightning_suite", "-p", "no:cacheprovider"),
            *("-c", os.devnull, "--rootdir", str(tests), "--capture=sys", "-W", "ignore", "-k", only),
            *(f"tests_pytorch/{folder}" for folder in folders),
        ]
        quiet = {"LIGHTNING_PIPES_PROFILES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        subprocess.run(command, cwd=tests, env=os.environ | quiet | own, stdout=subprocess.DEVNULL, check=False)
        ended = [json.loads(line) for line in results.read_text().splitlines()]
    return {test["test"]: test["ranks"] for test in ended}


def has_passed(ranks: Sequence[Sequence[str]]) -> bool:
    """Return whether a test passed on global rank 0."""
    return ranks[0][0] == "passed"


def describe_failure(ranks: Sequence[Sequence[str]]) -> str:
    """Return the first rank on which a test did not pass and the beginning of the error."""
    rank, said = next((n, text) for n, (outcome, text) in enumerate(ranks) if outcome != "passed")
    lines = [line[2:].strip() for line in said.splitlines() if line.startswith("E ")] or said.strip().splitlines()[-1:]
    return f"rank {rank}: {' '.join(lines)[:160]}"


def main(arguments: list[str]) -> None:
    """Run the tests three times, and print the shares and the failures."""
    parser = make_parser(__doc__, "callbacks alone")
    parser.add_argument("--tests", type=Path, required=True, help="the folder `tests` of a checkout of Lightning")
    parser.add_argument("--folder", nargs="*", choices=FOLDERS, help="folders of tests_pytorch, by default all")
    parser.add_argument("--only", default="", help="only tests whose names match, as with pytest -k")
    parser.add_argument("--save", action="store_true", help="save the shares for benchmarks/any_model.py")
    given = parser.parse_args(arguments)
    tests = given.tests.resolve()
    if not (tests / "tests_pytorch").is_dir():
        parser.error(f"{tests} has no folder tests_pytorch: it must be the folder `tests` of a checkout of Lightning")
    folders = given.folder or (FOLDERS[:1] if given.quick else FOLDERS)
    folders = [folder for folder in folders if (tests / "tests_pytorch" / folder).is_dir()]
    plain = run_tests(tests, folders, given.only, 0)
    passing = [test for test, ranks in plain.items() if has_passed(ranks)]
    keys: dict[str, Any] = {"lightning_suite_total": len(passing)}
    for stages, name in ((1, "one_stage"), (2, "two_stages")):
        ended = run_tests(tests, folders, given.only, stages)
        found = {test: ended.get(test, [("failed", "it did not run")]) for test in passing}
        good = [test for test, ranks in found.items() if has_passed(ranks)]
        everywhere = sum(all(outcome == "passed" for outcome, _ in ranks) for ranks in found.values())
        keys[f"lightning_suite_{name}"] = len(good) / max(len(passing), 1)
        print(f"{name}: {len(good)} of {len(passing)} pass, {everywhere} of them on all ranks")
        for folder in folders:
            counts = [sum(is_in(test, folder) for test in some) for some in (good, passing)]
            print(f"  {folder:14s} {counts[0]:4d} of {counts[1]:4d}")
        for test, ranks in found.items():
            if any(outcome != "passed" for outcome, _ in ranks):
                print(f"  {test.removeprefix('tests_pytorch/')}: {describe_failure(ranks)}", flush=True)
    keys["lightning_suite_share"] = min(keys["lightning_suite_one_stage"], keys["lightning_suite_two_stages"])
    if given.save:
        SAVED.write_text(json.dumps({**keys, "lightning_suite_date": f"{datetime.now(UTC):%Y-%m-%d}"}, indent=1) + "\n")
    if given.json:
        print(json.dumps(keys))


def is_in(test: str, folder: str) -> bool:
    """Return whether a test is in a folder."""
    return test.startswith(f"tests_pytorch/{folder}/")


if __name__ == "__main__":
    main(sys.argv[1:])
