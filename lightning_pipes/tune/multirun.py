"""Runs the jobs of a Hydra multirun as the siblings of a job array, on every rank.

Each sibling has its own copy of the state that Hydra keeps per process, which is HydraConfig and the log handlers.
"""

from __future__ import annotations

import logging
import logging.config
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hydra import version
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, env_override, filter_overrides, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_pipes.arrays.array import JobArray
from lightning_pipes.arrays.memory_swap import AUTO, MemorySwap
from lightning_pipes.arrays.siblings.sibling import ArrayCancelledError, current_sibling
from lightning_pipes.engine.watch.trust import SECRET_VARIABLE
from lightning_pipes.ir import InputError, PipelineError, check_count
from lightning_pipes.tune.private_hydra import hydra_singletons
from lightning_pipes.tune.studies.leader_store import LeaderStore

_config: ContextVar[Any] = ContextVar("lightning_pipes_hydra_config")
_handlers: ContextVar[list[logging.Handler]] = ContextVar("lightning_pipes_log_handlers")


class _OwnConfig(HydraConfig):
    """A HydraConfig that is different in each sibling.

    `HydraConfig.get()` and `${hydra:...}` return the configuration of the calling sibling.
    """

    def __init__(self, outside: Any) -> None:
        self._outside = outside

    @property
    def cfg(self) -> Any:
        return _config.get(self._outside)

    @cfg.setter
    def cfg(self, value: Any) -> None:
        if current_sibling() is None:
            self._outside = value
        else:
            _config.set(value)


class _Router(logging.Handler):
    """Pass each log record to the handlers of the calling sibling, or to the original handlers outside of siblings."""

    def __init__(self, outside: list[logging.Handler]) -> None:
        super().__init__(logging.NOTSET)
        self._outside = outside

    def emit(self, record: logging.LogRecord) -> None:
        for handler in _handlers.get(self._outside):
            if record.levelno >= handler.level:
                handler.handle(record)


class _HandlersOnly(logging.config.DictConfigurator):
    """Create the handlers that a logging configuration specifies for the root logger, without changing any logger."""

    def make_handlers(self) -> list[logging.Handler]:
        makers = (
            ("formatters", self.configure_formatter),
            ("filters", self.configure_filter),
            ("handlers", self.configure_handler),
        )
        for kind, make in makers:
            made = self.config.get(kind) or {}
            for name in sorted(made):
                made[name] = make(made[name])
        root = self.config.get("root") or {}
        return [self.config["handlers"][name] for name in root.get("handlers") or ()]


@contextmanager
def own_hydra() -> Iterator[None]:
    """Give each sibling its own HydraConfig and its own log handlers inside the block."""
    instances = hydra_singletons()
    config, root = HydraConfig.instance(), logging.getLogger()
    handlers = root.handlers[:]
    instances[HydraConfig] = _OwnConfig(config.cfg)
    root.handlers[:] = [_Router(handlers)]
    try:
        yield
    finally:
        instances[HydraConfig] = config
        root.handlers[:] = handlers


@contextmanager
def own_logging(config: DictConfig | None, suffix: str) -> Iterator[None]:
    """Send the logs of this sibling to the handlers that `hydra.job_logging` specifies, inside the block.

    Args:
        config: the logging configuration. With None, or without a root logger, nothing changes.
        suffix: inserted before the extension of log files, so that each rank has its own files. With a suffix, other
            handlers such as the console handle only warnings and errors, because rank 0 already logs to them.
    """
    settings: Any = None if config is None else OmegaConf.to_container(config, resolve=True)
    if not settings or not settings.get("root"):
        yield
        return
    for handler in (settings.get("handlers") or {}).values():
        if suffix and "filename" in handler:
            path = Path(handler["filename"])
            handler["filename"] = str(path.with_name(f"{path.stem}{suffix}{path.suffix}"))
    handlers = _HandlersOnly(settings).make_handlers()
    level = settings["root"].get("level")
    for handler in handlers:
        if level is not None and handler.level == logging.NOTSET:
            handler.setLevel(level)
        if suffix and not isinstance(handler, logging.FileHandler):
            handler.setLevel(max(handler.level, logging.WARNING))
    _handlers.set(handlers)
    try:
        yield
    finally:
        for handler in handlers:
            handler.close()


_DIGITS_PATTERN = re.compile("[0-9]+")
_log = logging.getLogger(__name__)


class Multirun:
    """The implementation of `hydra/launcher=job_array`. Every rank creates one and runs all jobs.

    Rank 0 writes to the directory of the sweep. Other ranks only add a log file to the directory of a job, if they log
    anything.

    Args:
        hydra_context: the context of Hydra.
        task_function: the function that Hydra runs for each job.
        config: the configuration of the whole multirun. On ranks other than 0, its sweep directory is replaced by a
            temporary one.
        array_size: number of jobs at a time, or "auto".
        memory: arguments of `MemorySwap`. By default, all states stay on the devices.

    Attributes:
        errors: the errors of failed jobs, by job number.
        ends: error types that end a job but are not logged as failures.
        leader_store: the store in which rank 0 publishes values.

    Raises:
        InputError: the configuration requires a separate process for each job, or the settings of the array are
            invalid.
    """

    def __init__(
        self,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        array_size: int | Literal["auto"],
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        if array_size != AUTO:
            check_count("hydra.launcher.array_size", array_size, "; or auto, with hydra.launcher.memory")
        self._array_size, self._memory = array_size, dict(memory or {})
        self.make_array()
        self.config = config
        self.errors: dict[int, BaseException] = {}
        self.ends: tuple[type[BaseException], ...] = (ArrayCancelledError,)
        self._context = hydra_context
        self._task = task_function
        setup_globals()
        _check_process(config, config)
        self.leader_store = store = LeaderStore()
        own = str(Path(config.hydra.sweep.dir).resolve()), str(config.hydra.job.name)
        if store.is_leader:
            store.put("sweep", own)
        self._folder, self._name = store.get("sweep")
        if not store.is_signed:
            check_names((self._folder, self._name), own)
        if not store.is_leader:
            self._temporary_folder = tempfile.TemporaryDirectory(prefix="lightning_pipes_")
            with read_write(config), open_dict(config):
                config.hydra.sweep.dir = self._temporary_folder.name

    def make_array(self) -> JobArray[Any]:
        """Return a new array of jobs.

        Raises:
            InputError: `MemorySwap` does not accept the settings, or `array_size` is "auto" and no settings are given.
        """
        try:
            memory = MemorySwap(**self._memory) if self._memory else None
        except TypeError as error:
            raise InputError(
                f"hydra.launcher.memory={self._memory} has an argument that MemorySwap does not accept: {error}"
            ) from error
        return JobArray(self._array_size, memory=memory)

    def launch_jobs(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Run all jobs and return their results in order. Failures are logged.

        Args:
            job_overrides: the overrides of each job.
            initial_job_idx: the number of the first job.
        """
        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        jobs = [
            partial(self.run_sibling_job, n, overrides) for n, overrides in zip(numbers, job_overrides, strict=True)
        ]
        returns: dict[int, JobReturn] = {}
        with self.sibling_environment():
            size = "as many as memory has room for" if self._array_size == AUTO else self._array_size
            self._log_info("%d jobs share a pipeline, %s at a time", len(jobs), size)
            array: JobArray[JobReturn] = self.make_array()
            for outcome in array.run(jobs):
                number = numbers[outcome.index]
                returns[number] = outcome.value or _failed(
                    self.record_error(number, outcome.error), job_overrides[outcome.index]
                )
        failed = [n for n in numbers if n in self.errors]
        if failed:
            lines = [f"#{n} {' '.join(job_overrides[n - initial_job_idx])}: {_text(self.errors[n])}" for n in failed]
            self._log_info("%d of %d jobs failed:\n\t%s", len(failed), len(jobs), "\n\t".join(lines))
        return [returns[n] for n in numbers]

    @contextmanager
    def sibling_environment(self) -> Iterator[None]:
        """Set up logging and the environment variables for an array of jobs inside the block."""
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        if self.leader_store.is_leader:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
        with env_override(dict(self.config.hydra.job.env_set)), own_hydra():
            yield

    def run_sibling_job(self, number: int, overrides: Sequence[str]) -> JobReturn:
        """Run a job on the thread of its sibling.

        If the job raises an error, the error is recorded in `errors` and raised again.
        """
        try:
            return self._job(number, overrides)
        except BaseException as error:
            self.record_error(number, error)
            raise

    def record_error(self, number: int, error: BaseException | None) -> BaseException:
        """Record the first error of a job, and return it."""
        assert error is not None
        return self.errors.setdefault(number, error)

    def _job(self, number: int, overrides: Sequence[str]) -> JobReturn:
        config = self._context.config_loader.load_sweep_config(self.config, list(overrides))
        _check_process(config, self.config)
        with read_write(config), open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
            config.hydra.job.name = self._name
            config.hydra.job.env_set = {}
            config.hydra.sweep.dir = self._folder
            config.hydra.runtime.output_dir = str(Path(self._folder) / str(config.hydra.sweep.subdir))
            if not self.leader_store.is_leader:
                config.hydra.output_subdir = None
        self._log_info("\t#%d : %s", number, " ".join(filter_overrides(list(overrides))))
        Path(config.hydra.runtime.output_dir).mkdir(parents=True, exist_ok=True)
        with own_logging(
            config.hydra.job_logging, "" if self.leader_store.is_leader else f".rank{self.leader_store.rank}"
        ):
            return run_job(
                hydra_context=self._context,
                task_function=partial(self._run, number),
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
                configure_logging=False,
            )

    def _log_info(self, text: str, *values: object) -> None:
        if self.leader_store.is_leader:
            _log.info(text, *values)

    def _run(self, number: int, config: DictConfig) -> Any:
        try:
            return self._task(config)
        except BaseException as error:
            self._log_failure(number, error)
            raise

    def _log_failure(self, number: int, error: BaseException) -> None:
        """Log a failure to the log of its job immediately, because the array may run for hours."""
        self.record_error(number, error)
        if not isinstance(error, self.ends):
            level = logging.ERROR if self.leader_store.is_leader else logging.INFO  # other ranks: files only
            explains_itself = isinstance(error, PipelineError | SystemExit)
            _log.log(level, "#%d failed: %s", number, _text(error), exc_info=None if explains_itself else error)


def check_names(received: tuple[str, str], own: tuple[str, str]) -> None:
    """Check the sweep directory and the job name that rank 0 sent, because any process can write to an unsigned store.

    The names on different ranks may differ in digits only, for example in a time.

    Args:
        received: the directory and the job name of rank 0.
        own: the directory and the job name of this rank.

    Raises:
        InputError: the names differ in more than digits.
    """
    for what, theirs, ours in zip(("hydra.sweep.dir", "hydra.job.name"), received, own, strict=True):
        if _DIGITS_PATTERN.sub("0", theirs) != _DIGITS_PATTERN.sub("0", ours):
            raise InputError(
                f"{what} is {theirs!r} on rank 0, and {ours!r} on this rank. The hosts of this run share no secret, so "
                f"another user may have sent it. Set {SECRET_VARIABLE} to the same long random text on all hosts, or "
                f"{what} to a value that differs between ranks by a time at most"
            )


def _check_process(config: DictConfig, outside: DictConfig) -> None:
    """Raise InputError if a job would change a setting that a process can have only once."""
    chdir = config.hydra.job.chdir
    if chdir or (chdir is None and not version.base_at_least("1.2")):
        raise InputError(
            "hydra/launcher=job_array runs jobs side by side in one process, which has one working directory: set "
            "hydra.job.chdir=false, and use ${hydra:runtime.output_dir} for paths"
        )
    own, first = (OmegaConf.to_container(c.hydra.job.env_set, resolve=True) for c in (config, outside))
    if own != first:
        raise InputError(
            "hydra/launcher=job_array runs jobs side by side in one process, which has one environment. "
            f"hydra.job.env_set must be the same for all: one has {own}, the multirun {first}"
        )


def _failed(error: BaseException, overrides: Sequence[str]) -> JobReturn:
    """Return the result of a failed job.

    Hydra does not store errors such as SystemExit, so a RuntimeError replaces them.
    """
    kept = error if isinstance(error, Exception) else RuntimeError(_text(error))
    result = JobReturn(overrides=list(overrides), status=JobStatus.FAILED)
    result.return_value = kept
    return result


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
