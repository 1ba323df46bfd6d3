"""An Optuna study that runs in several job arrays on a Ray cluster.

Each array has one placement group, and one actor of Ray for each of its ranks. An actor of a separate process, the
`_TrialCounter`, counts the trials of all arrays. If a rank dies, the other ranks of its array end, the trials of the
array are queued again, and the array starts again in the same placement group. The ranks of an array find each other as
under torchrun: they have the same environment variables, and rank 0 hosts the store that torchrun would host.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import ray
from optuna import Study
from optuna.storages import InMemoryStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_pipes.arrays.array import JobArray
from lightning_pipes.engine.watch.failure import GRACE_SECONDS, PeerFailure
from lightning_pipes.engine.watch.shared_store import LOOPBACK, store_on_loopback
from lightning_pipes.engine.watch.trust import SECRET_VARIABLE
from lightning_pipes.ir import InputError, PipelineError, check_count, check_type
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.tune.studies.leader_store import LeaderStore, RankZeroEndedError
from lightning_pipes.tune.studies.private_optuna import is_stop_requested, storage_of, untouched_generators
from lightning_pipes.tune.studies.shared_study import RETRY_ATTRIBUTE, ask_trial, fail_dead_trials, fail_trials
from lightning_pipes.tune.studies.study import (
    Callback,
    Objective,
    StudyFailedError,
    check_study_arguments,
    run_leader_or_follower,
)

_log = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(minutes=30)


def run_arrays(
    study: Callable[[], Study],
    objective: Objective,
    n_trials: int | None,
    array_size: int | Callable[[], JobArray[Any]],
    *,
    arrays: int,
    ranks: int,
    resources_per_rank: Mapping[str, float] | None = None,
    timeout: float | None = None,
    catch: type[Exception] | tuple[type[Exception], ...] = (),
    callbacks: Sequence[Callback] = (),
    max_failures: int = 3,
    start_timeout: float = 60.0,
) -> Study:
    """Run one study on a Ray cluster, in several job arrays at a time.

    This function is called once, by a script that is connected to the cluster or that runs on it. Each array calls
    `optimize_array` on all of its ranks. The objective is the same as there. It creates its Trainer with
    `RayPipelineStrategy`, or with a PipelineStrategy as under torchrun.

    If a rank dies, its array starts again, and the trials that were running in this array are repeated with the same
    parameters. Trials of other arrays are not affected.

    Args:
        study: a function that opens the study. Every array calls it, so the storage must be one that all machines of
            the cluster can write to, and the study must be opened with `load_if_exists=True`. A sampler with a seed
            gets a different seed in each array.
        objective: the objective of the study.
        n_trials: number of trials to start in all arrays together, in addition to the repetitions of trials whose array
            has died. With None, only `timeout` and `study.stop()` limit the number.
        array_size: number of concurrent trials of each array, or a function that returns a new `JobArray`.
        arrays: number of arrays.
        ranks: number of ranks of each array.
        resources_per_rank: the resources of Ray for each rank, such as `{"GPU": 1}`. The default is one CPU. Ranks with
            a GPU can use only this GPU.
        timeout: seconds after which no further trial starts.
        catch: exceptions of the objective after which the study continues.
        callbacks: functions that rank 0 of each array calls with the study and each finished trial of this array.
        max_failures: number of times that each array may start again after a rank has died.
        start_timeout: seconds to wait until the cluster has free resources for all arrays.

    Returns:
        The study.

    Raises:
        InputError: an argument is invalid, the storage belongs to one process, or the cluster has too few resources.
        RankLostError: a rank of one array has died too often. The other arrays have finished their running trials.
        Exception: the objective raised an exception that is not in `catch`.
    """
    check_type("study", study, Callable)
    check_study_arguments(objective, n_trials, timeout, catch, callbacks)
    if not callable(array_size):
        check_count("array_size", array_size, "; or give a function that returns a JobArray")
    check_count("arrays", arrays)
    check_count("ranks", ranks)
    resources = dict(resources_per_rank or {"CPU": 1})
    if not ray.is_initialized():
        ray.init()
    _check_cluster(arrays, ranks, resources)
    opened: Study = check_type("study()", study(), Study)
    if isinstance(storage_of(opened), InMemoryStorage):
        raise InputError(
            f"the study {opened.study_name!r} is in the memory of this process, but the arrays run in other processes. "
            "Let `study` open a study with a storage that all of them can reach, as in "
            "optuna.create_study(storage='postgresql://...', study_name='mine', load_if_exists=True)"
        )
    with _reserve(arrays, ranks, resources, start_timeout) as groups:
        counter = ray.remote(_TrialCounter).options(num_cpus=0).remote(study, n_trials, timeout)
        job = _Job(study, objective, array_size, catch, tuple(callbacks), counter, secrets.token_hex(32), os.getcwd())
        each = [_Array(number, group, job) for number, group in enumerate(groups)]
        try:
            ray.get(counter.__ray_ready__.remote())
            _run_until_ended(each, max_failures)
        finally:
            for array in each:
                array.kill()
            ray.kill(counter)
    return opened


def _check_cluster(arrays: int, ranks: int, resources: Mapping[str, float]) -> None:
    """Check that the machines of the cluster have the resources for all ranks, used or not.

    Raises:
        InputError: they have too few resources.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(name, 0) / needed + 1e-9) for name, needed in resources.items()) for node in nodes)
    if room < arrays * ranks:
        total = Counter[str]()
        for node in nodes:
            total.update({name: node[name] for name in resources if name in node})
        raise InputError(
            f"the Ray cluster is too small: {_describe_need(arrays, ranks, resources)}. Its {len(nodes)} node(s) have "
            f"{_describe(dict.fromkeys(resources, 0) | dict(total))}, which is room for {room} rank(s). Use fewer "
            "arrays or ranks, or a smaller resources_per_rank, or add nodes to the cluster first"
        )


def _describe_need(arrays: int, ranks: int, resources: Mapping[str, float]) -> str:
    total = {name: arrays * ranks * needed for name, needed in resources.items()}
    return f"{arrays} array(s) of {ranks} rank(s) with {_describe(resources)} each need {_describe(total)}"


def _describe(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


@contextmanager
def _reserve(arrays: int, ranks: int, resources: Mapping[str, float], timeout: float) -> Iterator[list[Any]]:
    """Reserve the resources of all arrays inside the block, in one placement group for each array.

    Raises:
        InputError: other work on the cluster uses the resources for longer than `timeout` seconds.
    """
    groups = [placement_group([dict(resources)] * ranks, strategy="PACK") for _ in range(arrays)]
    try:
        try:
            ray.get([group.ready() for group in groups], timeout=timeout)
        except GetTimeoutError as error:
            free = ray.available_resources()
            raise InputError(
                f"the Ray cluster had no room for all arrays within {timeout:g} s: "
                f"{_describe_need(arrays, ranks, resources)}. Apart from arrays that have got their resources, "
                f"{_describe({name: free.get(name, 0) for name in resources})} are free. Wait for the other work on "
                "the cluster, use fewer arrays, or increase start_timeout"
            ) from error
        yield groups
    finally:
        for group in groups:
            remove_placement_group(group)


def _run_until_ended(arrays: Sequence[_Array], max_failures: int) -> None:
    """Run all arrays until each has ended. Start an array again if a rank has died.

    After the first error, no array starts further trials, and the error is raised when all arrays have ended.
    """
    errors: list[Exception] = []
    running = {ref: array for array in arrays for ref in array.start()}
    while running:
        (ref, *_), _ = ray.wait([*running])
        array = running.pop(ref)
        reason = _failure(ref)
        if reason is None:
            continue
        others = [other for other, owner in running.items() if owner is array]
        for other in others:
            del running[other]
        reason = array.end(reason, others)
        if isinstance(reason, RankLostError) and array.failures <= max_failures:
            _log.warning("%s The array starts again, and repeats its unfinished trials", reason)
            running |= dict.fromkeys(array.start(), array)
            continue
        if isinstance(reason, RankLostError):
            reason = RankLostError(
                f"{reason} With max_failures={max_failures}, the array does not start again. Its unfinished trials are "
                "queued, and run first when the study continues. Find out from the logs of Ray why the process died"
            )
        errors.append(reason)
        array.stop_study()
    if errors:
        raise errors[0]


def _failure(ref: Any) -> Exception | None:
    """Return the reason why a rank has failed, or None if it has ended in order."""
    try:
        lost = ray.get(ref)
    except RayActorError as error:
        return RankLostError(str(error).strip().partition("\n")[0])
    except Exception as error:
        return error
    return None if lost is None else RankLostError(lost)


class RankLostError(PipelineError):
    """A rank of an array has died more often than `max_failures` allows. The trials of the array are queued again."""


class _Array:
    """One array of the study, with its placement group and its ranks.

    Args:
        number: the number of the array.
        group: its placement group, with a bundle of resources for each rank.
        job: what all arrays have in common.

    Attributes:
        failures: the number of times that a rank has died.
    """

    def __init__(self, number: int, group: Any, job: _Job) -> None:
        self.failures = 0
        self._number, self._group, self._job = number, group, job
        self._actors: list[Any] = []

    def start(self) -> list[Any]:
        """Start the ranks, and return a reference to the end of each."""
        rank_class = ray.remote(_Rank)
        self._actors = [
            rank_class.options(
                **_actor_options(resources),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            ).remote(self._job)
            for bundle, resources in enumerate(self._group.bundle_specs)
        ]
        places = [actor.locate.remote() for actor in self._actors]
        address = self._actors[0].host_store.remote(*places)
        return [actor.run.remote(self._number, n, address, *places) for n, actor in enumerate(self._actors)]

    def end(self, reason: Exception, others: Sequence[Any]) -> Exception:
        """End all ranks after one of them has failed, and queue their unfinished trials again.

        The other ranks have some seconds to finish what they write to the storage.

        Args:
            reason: the reason for which the rank has failed.
            others: references to the ends of ranks that may still run.

        Returns:
            The reason of the array: the death of a rank if a rank has died, and the first other failure otherwise.
        """
        ended: list[Any] = []
        if others:
            ended, _ = ray.wait([*others], num_returns=len(others), timeout=GRACE_SECONDS)
        self.kill()
        if others:
            ray.wait([*others], num_returns=len(others))
        ray.get(self._job.counter.fail_trials.remote(self._number))
        reasons = [reason, *filter(None, map(_failure, ended))]
        lost = next((one for one in reasons if isinstance(one, RankLostError)), None)
        if lost is None:
            return reason
        self.failures += 1
        return RankLostError(f"array {self._number} has lost a rank, for the {self.failures}. time: {lost}")

    def stop_study(self) -> None:
        """Let no array start further trials."""
        ray.get(self._job.counter.stop.remote())

    def kill(self) -> None:
        """End all ranks."""
        for actor in self._actors:
            ray.kill(actor)


def _actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of an actor that uses these resources."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    others = {name: amount for name, amount in resources.items() if name not in named}
    return {"num_cpus": 0, **{named[name]: n for name, n in resources.items() if name in named}, "resources": others}


class _Job(NamedTuple):
    """The settings that the ranks of all arrays share.

    Attributes:
        study: opens the study.
        objective: the objective of the study.
        array_size: number of concurrent trials of each array, or a function that returns a new array.
        catch: exceptions of the objective after which the study continues.
        callbacks: functions that rank 0 calls after each trial.
        counter: the actor that counts trials.
        secret: authenticates the ranks of one array on several machines.
        folder: the working directory of the script.
    """

    study: Callable[[], Study]
    objective: Objective
    array_size: int | Callable[[], JobArray[Any]]
    catch: type[Exception] | tuple[type[Exception], ...]
    callbacks: tuple[Callback, ...]
    counter: Any
    secret: str
    folder: str


class _Rank:
    """One rank of an array, which is an actor in a process of its own."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._store: TCPStore | None = None

    def locate(self) -> tuple[str, str]:
        """Return the node on which this rank runs, and its address."""
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def host_store(self, *places: tuple[str, str]) -> tuple[str, int]:
        """Host the store in which the ranks meet, and return its address.

        Args:
            places: the results of `locate` of all ranks.
        """
        if len({node for node, _ in places}) == 1:
            self._store = store_on_loopback(0, _STORE_TIMEOUT)
            return LOOPBACK, self._store.port
        address = places[0][1]
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
        return address, self._store.port

    def run(self, array: int, number: int, address: tuple[str, int], *places: tuple[str, str]) -> str | None:
        """Run the trials of the study that the array gets.

        Args:
            array: the number of the array.
            number: the number of this actor in its placement group. The ranks of a node have consecutive numbers, so
                the rank may differ.
            address: the address of the store.
            places: the results of `locate` of all actors.

        Returns:
            None, or how another rank was lost.
        """
        job = self._job
        os.environ |= _rank_environment(number, address, [node for node, _ in places])
        if len({node for node, _ in places}) > 1:
            os.environ.setdefault(SECRET_VARIABLE, job.secret)
        with suppress(OSError):  # another machine may not have the folder
            os.chdir(job.folder)
        leader_store = LeaderStore()
        try:
            run_leader_or_follower(
                leader_store,
                job.study,
                job.objective,
                lambda study: _counted_trials(study, job.counter, array),
                job.array_size() if callable(job.array_size) else job.array_size,
                None,
                job.catch,
                [*job.callbacks, lambda study, _: _stop_all(study, job.counter)],
            )
        except StudyFailedError:  # rank 0 raises the error
            return None
        except (PeerFailure, RankZeroEndedError) as error:
            return f"{type(error).__name__}: {error}"
        return None


def _rank_environment(number: int, address: tuple[str, int], nodes: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a rank.

    Args:
        number: the number of the rank's actor.
        address: the address of the store, which the launcher hosts under torchrun.
        nodes: the node of each actor.
    """
    order = sorted(range(len(nodes)), key=lambda n: nodes.index(nodes[n]))
    own = [n for n in order if nodes[n] == nodes[number]]
    return {
        "RANK": str(order.index(number)),
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_RANK": str(own.index(number)),
        "LOCAL_WORLD_SIZE": str(len(own)),
        "GROUP_RANK": str([*dict.fromkeys(nodes)].index(nodes[number])),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
        "TORCHELASTIC_RUN_ID": "lightning_pipes.ray",
        "TORCHELASTIC_USE_AGENT_STORE": str(True),
    }


def _counted_trials(study: Study, counter: Any, array: int) -> Iterator[Trial]:
    """Yield new trials of the study as long as the counter grants trials to the array."""
    for generator in untouched_generators(study.sampler):
        generator.seed([generator.randint(2**31), array])
    while ray.get(counter.grant.remote(array)):
        trial = ask_trial(study)
        ray.get(counter.record.remote(array, trial.number))
        yield trial


def _stop_all(study: Study, counter: Any) -> None:
    """Let no array start further trials if the user has stopped the study in one of them."""
    if is_stop_requested(study):
        ray.get(counter.stop.remote())


class _TrialCounter:
    """Counts the trials of all arrays of a study.

    Args:
        study: opens the study.
        n_trials: the number of trials to grant, in addition to repetitions. None for no limit.
        timeout: seconds after which no trial is granted.
    """

    def __init__(self, study: Callable[[], Study], n_trials: int | None, timeout: float | None) -> None:
        self._study = study()
        fail_dead_trials(self._study)
        self._n_trials, self._before = n_trials, self._count()
        self._until = None if timeout is None else read_seconds() + timeout
        self._granted: set[int] = set()
        """The arrays that have been granted a trial and have not recorded it yet."""
        self._recorded: defaultdict[int, list[int]] = defaultdict(list)
        """The numbers of the trials of each array."""
        self._stopped = False

    def grant(self, array: int) -> bool:
        """Return whether an array may start a trial."""
        self._granted.discard(array)  # from a process that has died
        if self._stopped or (self._until is not None and read_seconds() >= self._until):
            return False
        used = self._count() - self._before + len(self._granted)
        if self._n_trials is not None and used >= self._n_trials:
            return False
        self._granted.add(array)
        return True

    def record(self, array: int, number: int) -> None:
        """Record the number of a trial that an array has started."""
        self._granted.discard(array)
        self._recorded[array].append(number)

    def fail_trials(self, array: int) -> None:
        """Fail the running trials of an array after its ranks have ended, and queue their parameters again."""
        trials = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        fail_trials(self._study, [trial for trial in trials if trial.number in self._recorded[array]])
        fail_dead_trials(self._study)

    def stop(self) -> None:
        """Grant no further trials."""
        self._stopped = True

    def _count(self) -> int:
        """Return the number of trials that were started, without trials that are repeated or will be repeated."""
        trials: list[FrozenTrial] = self._study.get_trials(deepcopy=False)
        started = sum(trial.state != TrialState.WAITING for trial in trials)
        return started - sum(RETRY_ATTRIBUTE in trial.user_attrs for trial in trials)
