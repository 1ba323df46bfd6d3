"""Launcher for programs that cannot be started again, such as notebooks: every rank is a fork of the current process.

The original process waits for the ranks. It then adopts the results of rank 0: weights, metrics, counters, attributes
of callbacks and loggers, and the return value of the Trainer's method.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_pipes.engine.watch.error_output import is_failure_remote, to_one_line
from lightning_pipes.engine.watch.heartbeat import stop_heartbeat
from lightning_pipes.engine.watch.launcher import LAUNCHER_GRACE_SECONDS, exit_with_parent, how_it_ended
from lightning_pipes.engine.watch.trust import secret_for_children
from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.trainer import private_lightning as private

_log = logging.getLogger(__name__)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_LIGHTNING_MODULE_ATTRIBUTES = frozenset(vars(pl.LightningModule()))
_STRATEGY_ATTRIBUTES = ("_reported", "_decision", "schedule")
"""The attributes of the strategy from which reports of a run are made."""


class RankTraceback(Exception):  # noqa: N818 - like the remote traceback of concurrent.futures
    """The traceback of an exception on a rank, which is raised again in the process that waits for the ranks."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ForkLauncher(private.BaseLauncher):
    """Runs each call of a Trainer method in processes that are forked from this one, one for each device.

    Attributes:
        is_failing: whether the ranks of the last call have failed. They have saved their checkpoints themselves.
    """

    def __init__(self, strategy: Any, environment: ClusterEnvironment, num_processes: int, why: str) -> None:
        self._strategy, self._environment, self._size, self._why = strategy, environment, num_processes, why
        self._processes: list[Any] = []
        self.is_failing = False

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Run `function` on all ranks, and return its result on rank 0.

        Raises:
            PlanError: processes that are forked from this one cannot train.
            PipelineError: a rank has ended without an exception.
        """
        assert trainer is not None, "Lightning's Trainer is the caller"
        self.is_failing = False
        self._check()
        secret_for_children()
        self._environment.main_port  # noqa: B018 - reading it selects a free port, the same for all ranks
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(self._size):
                process = multiprocessing.get_context("fork").Process(
                    target=self._run_rank,
                    args=(rank, Path(folder), os.getpid(), trainer, function, args, kwargs),
                    name=f"rank {rank}",
                )
                process.start()
                self._processes.append(process)
            try:
                self._wait_for_ranks()
                return self._take_results(Path(folder), trainer)
            except BaseException:
                self.is_failing = True
                raise
            finally:
                self._end_ranks()

    def kill(self, signum: Any) -> None:
        for process in self._processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)

    def _check(self) -> None:
        if not hasattr(os, "fork"):
            raise PlanError(
                f"PipelineStrategy forks its ranks here, because {self._why}, and this system can't fork processes. "
                "Write the program to a file, and run it with `python file.py`"
            )
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise PlanError(
                f"PipelineStrategy forks its ranks here, because {self._why}. This process has already used CUDA, to "
                "create a tensor or in a call such as torch.cuda.synchronize(), and forked processes can't use CUDA "
                "after that. Restart the notebook or program and do not use a GPU before trainer.fit, or write the "
                "program to a file and run it with `python file.py`"
            )

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks have ended. After the first failure, wait only a few seconds for the other ranks."""
        left, until = {process.sentinel: process for process in self._processes}, float("inf")
        while left and time.monotonic() < until:
            for sentinel in wait([*left], timeout=None if until == float("inf") else until - time.monotonic()):
                process = left.pop(sentinel)
                process.join()
                if process.exitcode:
                    until = min(until, time.monotonic() + 2 * LAUNCHER_GRACE_SECONDS)

    def _end_ranks(self) -> None:
        """End the remaining ranks, which no longer save anything. After Ctrl-C, they have some seconds to end."""
        self.kill(signal.SIGINT)
        until = time.monotonic() + LAUNCHER_GRACE_SECONDS
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
        self.kill(signal.SIGKILL)
        for process in self._processes:
            process.join()
        self._processes = []

    def _take_results(self, folder: Path, trainer: pl.Trainer) -> Any:
        paths = [folder / f"error{rank}" for rank in range(self._size)]
        failures = [pickle.loads(path.read_bytes()) for path in paths if path.exists()]
        failures.sort(key=lambda failure: bool(failure["is_remote"]))
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes) if process.exitcode}
        if failures and not (failures[0]["is_remote"] and any(code < 0 for code in codes.values())):
            raise failures[0]["error"] from RankTraceback(failures[0]["text"])
        if codes:
            rank, code = min(codes.items(), key=lambda item: item[1])
            raise PipelineError(f"rank {rank} {how_it_ended(code)}, so that the other ranks have ended, too")
        with open(folder / "result", "rb") as file:
            result = torch.load(file, weights_only=False)
        self._restore(trainer, result)
        return result["value"]

    def _run_rank(
        self,
        rank: int,
        folder: Path,
        parent: int,
        trainer: pl.Trainer,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Run one rank in its process, and end the process."""
        os.environ["LOCAL_RANK"] = str(rank)
        # The threads of OpenMP do not exist after a fork, and a computation with several threads would wait for them.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
        exit_with_parent(parent)
        self._strategy.begin_forked_rank()
        status = 0
        try:
            value = private.call_and_handle_interrupt(trainer, function, *args, **kwargs)
            if rank == 0:
                result = {"value": value, **self._collect(trainer)}
                with open(folder / "result", "wb") as file:
                    torch.save(result, file)
        except BaseException as error:
            status = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
            failure = {
                "error": _as_picklable(error),
                "text": "".join(traceback.format_exception(error)),
                "is_remote": is_failure_remote(),
            }
            (folder / f"error{rank}").write_bytes(pickle.dumps(failure))
        with suppress(Exception):
            stop_heartbeat()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)

    def _collect(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Return the results of rank 0 that the waiting process adopts."""
        module = trainer.lightning_module
        fitting = trainer.state.fn == TrainerFn.FITTING
        return {
            "weights": {k: v for k, v in module.state_dict().items() if not v.is_meta} if fitting else {},
            "missing": [k for k, v in module.state_dict().items() if v.is_meta] if fitting else [],
            "attributes": {name: dict(_attributes(part, _skipped(part))) for name, part in module.named_modules()},
            "callbacks": [dict(_attributes(callback)) for callback in private.callbacks(trainer)],
            "loggers": [dict(_attributes(logger, {"_experiment"})) for logger in trainer.loggers],
            "strategy": dict(_attributes(self._strategy, set(vars(self._strategy)) - set(_STRATEGY_ATTRIBUTES))),
            "trainer": private.trainer_results(trainer),
        }

    def _restore(self, trainer: pl.Trainer, result: Mapping[str, Any]) -> None:
        """Apply the results of rank 0 to the Trainer and the module of the waiting process."""
        module = trainer.lightning_module
        module.load_state_dict(result["weights"], strict=False)
        if result["missing"]:
            _log.warning(
                "This process has no trained weights of %s and %d others: they stay on their ranks, which have ended. "
                "Save a checkpoint during training, or give PipelineStrategy gather='rank0'",
                result["missing"][0],
                len(result["missing"]) - 1,
            )
        for name, part in module.named_modules():
            vars(part).update(result["attributes"].get(name, {}))
        for owner, attributes in [
            *zip(private.callbacks(trainer), result["callbacks"], strict=False),
            *zip(trainer.loggers, result["loggers"], strict=False),
            (self._strategy, result["strategy"]),
        ]:
            vars(owner).update(attributes)
        private.restore_trainer_results(trainer, result["trainer"])


def _skipped(part: nn.Module) -> frozenset[str]:
    return _LIGHTNING_MODULE_ATTRIBUTES if isinstance(part, pl.LightningModule) else _MODULE_ATTRIBUTES


def _attributes(owner: object, skip: frozenset[str] | set[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object that can be sent to another process, such as numbers and lists of numbers."""
    for name, value in vars(owner).items():
        if name in skip or isinstance(value, (nn.Module, pl.Trainer)) or callable(value):
            continue
        with suppress(Exception):  # the value may not support pickling, such as an open file
            pickle.dumps(value)
            yield name, value


def _as_picklable(error: BaseException) -> BaseException:
    with suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return PipelineError(f"{type(error).__name__}: {to_one_line(str(error))}")
