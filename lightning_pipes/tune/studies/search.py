"""The implementation of `hydra/sweeper=optuna`, which turns trials into jobs.

With the launcher job_array, the next trial starts as soon as a slot is free. With other launchers, trials run in
batches.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.utils import JobReturn
from hydra.errors import InstantiationException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf
from optuna import Study
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import BaseTrial, FrozenTrial, Trial, TrialState

from lightning_pipes.ir import InputError, check_count
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.tune.multirun import Multirun
from lightning_pipes.tune.studies.private_optuna import inside_optimize_loop, is_stop_requested
from lightning_pipes.tune.studies.reporting import optuna_in_root_log, report_result
from lightning_pipes.tune.studies.shared_study import (
    StudyLease,
    ask_trial,
    ask_trials,
    fail_dead_trials,
    join_study,
    open_study,
)
from lightning_pipes.tune.studies.study import run_leader_or_follower
from lightning_pipes.tune.studies.trial import ArrayTrial, find_duplicate_trial, storage_errors


def distribution_from_override(override: Override) -> BaseDistribution | None:
    """Return the distribution that a sweep override describes, or None if the override is a single value.

    - `interval(1, 2)` is a range of floats.
    - `int(interval(1, 10))` is a range of integers that includes both ends.
    - `tag(log, ...)` around either of them makes the range logarithmic.
    - `range(1, 8, step=2)` excludes 8, as everywhere in Hydra.
    - `choice(a, b)` and `a,b` are categories.

    Raises:
        InputError: Optuna does not support this sweep, a tag is unknown, or a logarithmic range starts at 0 or below.
    """
    if not override.is_sweep_override():
        return None
    sweep, key = override.value(), override.get_key_element()
    tags = set(getattr(sweep, "tags", ()))
    if tags - {"log"}:
        raise InputError(f"{key}: unknown tag {', '.join(sorted(tags - {'log'}))}; there is log")
    if isinstance(sweep, IntervalSweep):
        return _interval(key, sweep, "log" in tags)
    if tags:
        raise InputError(f"{key}: tag(log, ...) goes with interval(...) only, as in tag(log,interval(1e-4,1e-1))")
    if isinstance(sweep, RangeSweep) and not sweep.shuffle:
        return _range(list(override.sweep_iterator()), sweep.step)
    if isinstance(sweep, RangeSweep | ChoiceSweep):
        # keep Hydra's spelling, because "null", "1e3" or "a,b" would be parsed to other values
        pairs = zip(override.sweep_iterator(), override.sweep_string_iterator(), strict=True)
        return CategoricalDistribution([v if isinstance(v, bool | int | float) else text for v, text in pairs])
    raise InputError(
        f"{key}: Optuna can't search {override.input_line!r}; there is interval, int(interval), range, choice"
    )


def _interval(key: str, sweep: Any, log: bool) -> BaseDistribution:
    low, high = sweep.start, sweep.end
    if log and low <= 0:
        raise InputError(f"{key}: a logarithmic interval starts above 0, not at {low}")
    if low > high:
        raise InputError(f"{key}: interval({low}, {high}) is empty; give the smaller number first")
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log)
    return FloatDistribution(float(low), float(high), log=log)


def _range(values: list[Any], step: Any) -> BaseDistribution:
    low, high = min(values), max(values)
    if all(isinstance(value, int) for value in values):
        return IntDistribution(low, high, step=abs(int(step)))
    return FloatDistribution(low, high, step=abs(float(step)))


def suggest(trial: BaseTrial | Trial, name: str, among: BaseDistribution) -> Any:
    """Return the value that the trial suggests for a parameter."""
    if isinstance(among, IntDistribution):
        return trial.suggest_int(name, among.low, among.high, step=among.step, log=among.log)
    if isinstance(among, FloatDistribution):
        return trial.suggest_float(name, among.low, among.high, step=among.step, log=among.log)
    assert isinstance(among, CategoricalDistribution)
    return trial.suggest_categorical(name, among.choices)


_log = logging.getLogger(__name__)

ENDED_STATES = (TrialState.COMPLETE, TrialState.PRUNED)


class OptunaSearch:
    """A study over overrides of a Hydra app.

    Args:
        settings: the fields of OptunaSettings.
        context: the context of Hydra.
        config: the configuration of the whole multirun.
        launcher: runs the jobs. The launcher job_array gets the next trial when a slot is free. Other launchers get
            batches of `n_jobs` trials.

    Raises:
        InputError: the settings contradict each other or do not fit the launcher.
    """

    def __init__(
        self, settings: Mapping[str, Any], context: HydraContext, config: DictConfig, launcher: Launcher
    ) -> None:
        self._settings = settings
        self._context = context
        self._config = config
        self._launcher = launcher
        self._multirun: Multirun | None = getattr(launcher, "multirun", None)
        self._directions = _directions(settings["direction"])
        self._errors: dict[int, BaseException] = {} if self._multirun is None else self._multirun.errors
        self._failures: list[BaseException] = []
        self._ended = 0
        if settings["n_trials"]:
            check_count("hydra.sweeper.n_trials", settings["n_trials"])
        if len(self._directions) > 1 and not settings["pruner"]["_target_"].endswith("NopPruner"):
            raise InputError("Optuna can't prune with several directions: set hydra/sweeper/pruner=none")
        if self._multirun is None and (int(os.environ.get("WORLD_SIZE", "1")) > 1 or "LOCAL_RANK" in os.environ):
            raise InputError(
                "with this launcher, each of several processes would run a separate sweep: choose "
                "hydra/launcher=job_array, which runs one sweep on all of them"
            )

    def run(self, arguments: list[str]) -> dict[str, Any]:
        """Run the study, and return its name and its best result.

        The result consists of the best parameters and value, or of all Pareto-optimal solutions if there are several
        directions. It is also written to optimization_results.yaml in the sweep's directory.

        Args:
            arguments: overrides of the command line.

        Raises:
            InputError: there is no parameter to search.
            Exception: the first failure of a job, if the share of failed jobs is larger than `max_failure_rate`.
        """
        self._read(arguments)
        array = self._multirun
        with optuna_in_root_log():
            study = self._in_batches() if array is None else self._in_array(array)
        if self._failures:
            lines = [f"{type(error).__name__}: {error}" for error in self._failures]
            _log.error("%d of %d trials failed:\n\t%s", len(lines), self._ended, "\n\t".join(lines))
        if self._too_many_failures():
            raise self._failures[0]
        result = _result(study)
        if array is None or array.leader_store.is_leader:
            OmegaConf.save(OmegaConf.create(result), self._folder() / "optimization_results.yaml")
            _log.info("%s", result)
        return result

    # ---- the space

    def _read(self, arguments: list[str]) -> None:
        """Read the search space from the configuration and the command line, which takes precedence."""
        params = [f"{key}={value}" for key, value in self._settings["params"].items()]
        self._space: dict[str, Any] = {}
        self._fixed: dict[str, str] = {}
        self._key: dict[str, str] = {}
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        for override in parser.parse_overrides([*params, *arguments]):
            key = override.get_key_element()
            name = key.lstrip("+~")
            self._space.pop(name, None)
            self._fixed.pop(name, None)
            among = None if override.is_delete() else distribution_from_override(override)
            if among is None:
                self._fixed[name] = str(override.input_line)
            else:
                self._space[name], self._key[name] = among, key
        self._more = self._settings["custom_search_space"] and get_method(self._settings["custom_search_space"])
        if not self._space and not self._more:
            raise InputError(
                "nothing to search: write a sweep on the command line or in hydra.sweeper.params, as in "
                "optimizer.lr=tag(log,interval(1e-4,1e-1))"
            )

    def _overrides(self, trial: BaseTrial) -> list[str]:
        values = {name: suggest(trial, name, among) for name, among in self._space.items()}
        fixed = [*self._fixed.values()]
        if self._more:
            self._more([f"{self._key[n]}={v}" for n, v in values.items()] + fixed, trial)
            values = trial.params
        return [f"{self._key.get(name, name)}={value}" for name, value in values.items()] + fixed

    # ---- the study

    def _study(self) -> Study:
        """Create or load the study on rank 0."""
        settings = self._settings
        storage = open_storage(settings["storage"])
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._config, folder / "multirun.yaml")
        study = optuna.create_study(
            study_name=settings["study_name"],
            storage=storage,
            pruner=_instantiate("pruner", settings),
            directions=self._directions,
            load_if_exists=True,
        )
        study.sampler = _instantiate("sampler", settings)
        return study

    def _budget(self, study: Study) -> int:
        ended = len(study.get_trials(deepcopy=False, states=ENDED_STATES))
        left = max(0, int(self._settings["n_trials"]) - ended)
        _log.info("study %s: %d trials have ended, %d to go", study.study_name, ended, left)
        return left

    def _folder(self) -> Path:
        return Path(str(self._config.hydra.sweep.dir))

    # ---- trials

    def _in_array(self, array: Multirun) -> Study:
        """Run trials with a launcher that starts the next trial as soon as a slot is free."""
        array.ends += (optuna.TrialPruned,)
        with array.sibling_environment():
            return run_leader_or_follower(
                array.leader_store,
                self._study,
                lambda trial: self._job(array, trial),
                lambda study: ask_trials(study, self._budget(study)),
                array.make_array(),
                self._settings["timeout"],
                Exception,
                [self._record_outcome],
                tracebacks=False,  # the logs of the jobs contain them
            )

    def _job(self, array: Multirun, trial: ArrayTrial) -> Any:
        overrides = self._overrides(trial)
        known = trial.find_duplicate() if self._settings["reuse"] else None
        if known is not None:
            return known.values
        returned = array.run_sibling_job(trial.number, overrides)
        if trial.number in self._errors:
            raise self._errors[trial.number]
        return returned.return_value

    def _record_outcome(self, study: Study, trial: FrozenTrial) -> None:
        self._ended += 1
        if trial.state == TrialState.FAIL:
            needed = "a number" if len(self._directions) == 1 else f"{len(self._directions)} numbers"
            no_number = ValueError(f"trial {trial.number} did not return {needed}")
            self._failures.append(self._errors.get(trial.number, no_number))
            if self._too_many_failures():
                study.stop()

    def _too_many_failures(self) -> bool:
        return len(self._failures) > float(self._settings["max_failure_rate"]) * self._ended

    def _in_batches(self) -> Study:
        """Run trials with a launcher that returns when all jobs of a batch have ended."""
        with ExitStack() as held:
            with storage_errors():
                study = open_study(self._study)
                lease = held.enter_context(join_study(study))
            source = self._trials(study, lease, self._budget(study))
            size = int(getattr(self._launcher, "n_jobs", None) or 1)
            held.enter_context(inside_optimize_loop(study))
            while batch := [*itertools.islice(source, max(1, size))]:
                self._launch(study, batch)
        return study

    def _trials(self, study: Study, lease: StudyLease, left: int) -> Iterator[tuple[optuna.Trial, list[str]]]:
        until = None if self._settings["timeout"] is None else read_seconds() + self._settings["timeout"]
        for _ in range(left):
            if is_stop_requested(study) or (until is not None and read_seconds() >= until):
                return
            with storage_errors():
                fail_dead_trials(study, lease)
                trial = ask_trial(study)
                overrides = self._overrides(trial)
                known = find_duplicate_trial(trial) if self._settings["reuse"] else None
            if known is None:
                yield trial, overrides
            else:
                self._record_outcome(study, report_result(study, trial, known.values, None))

    def _launch(self, study: Study, batch: list[tuple[optuna.Trial, list[str]]]) -> None:
        left = [trial for trial, _ in batch]
        try:
            jobs = [overrides for _, overrides in batch]
            for returned in self._launcher.launch(jobs, left[0].number):
                value, error = _outcome(returned)
                if error is not None:
                    self._errors[left[0].number] = error
                with storage_errors():
                    frozen = report_result(study, left[0], value, error)
                left.pop(0)
                self._record_outcome(study, frozen)
        finally:
            for trial in left:
                study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)


def _outcome(returned: JobReturn) -> tuple[Any, BaseException | None]:
    """Return the value that a job returned and the error that it raised; one of them is None."""
    try:
        return returned.return_value, None
    except Exception as error:
        return None, error


def _result(study: Study) -> dict[str, Any]:
    result: dict[str, Any] = {"name": "optuna", "study_name": study.study_name}
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(study.directions) > 1:
        return {**result, "solutions": [{"params": t.params, "values": t.values} for t in study.best_trials]}
    return {**result, "best_params": study.best_params, "best_value": study.best_value} if done else result


def _directions(given: Any) -> list[Any]:
    directions = [given] if isinstance(given, str) else [str(one) for one in given]
    if not directions or set(directions) - {"minimize", "maximize"}:
        raise InputError(f"hydra.sweeper.direction={given}: it must be minimize, maximize, or a list of these")
    return directions


def open_storage(given: str | None) -> str | BaseStorage | None:
    """Return the storage in a form that Optuna accepts. A URL is returned unchanged, and a journal file is opened.

    Raises:
        InputError: `given` is neither a URL nor the name of a journal file.
    """
    if given is None or "://" in given:
        return given
    if not given.endswith((".log", ".journal")):
        raise InputError(
            f"hydra.sweeper.storage={given}: give a URL, such as sqlite:///study.db, or a journal file that ends in "
            ".log"
        )
    Path(given).absolute().parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(JournalFileBackend(given))


def _instantiate(name: str, settings: Mapping[str, Any]) -> Any:
    """Return the sampler or the pruner that the settings describe.

    Raises:
        InputError: it needs a package that is not installed.
    """
    try:
        return instantiate(dict(settings[name]))
    except InstantiationException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ImportError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        message = " ".join(str(cause).split())
        raise InputError(
            f"hydra.sweeper.{name}: {settings[name]['_target_']} needs a package that is not installed. {message}"
        ) from error
