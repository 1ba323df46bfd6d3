"""The settings of PipelineStrategy, which are checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from inspect import Parameter, signature
from itertools import pairwise
from typing import Any, Literal, NamedTuple, ParamSpec

import torch.distributed as dist
from typing_extensions import TypeIs

from lightning_pipes.engine.messages.transport import TRANSPORT_KINDS
from lightning_pipes.engine.watch.heartbeat import BEAT_SECONDS
from lightning_pipes.ir import (
    MAX_MICROBATCHES,
    MAX_STAGES,
    InputError,
    Policy,
    Schedule,
    check_count,
    check_number,
    check_type,
    short_repr,
)
from lightning_pipes.ir.checks import lookup_name
from lightning_pipes.ir.registry import installed_schedules, make_schedule, schedule_factory
from lightning_pipes.planning.planner import BLOCKING, Planner, Relocation, planner_of
from lightning_pipes.trainer.data.shared_data import Data
from lightning_pipes.trainer.data.token_cut import TOKENS, MicrobatchesBy

_P = ParamSpec("_P")
AUTO = "auto"
"""The name of the schedule, and of the partition, that is chosen when training starts."""
PARAMETERS = "parameters"
"""The partition that balances the stages by their number of parameters."""
Gather = Literal["auto", "all", "rank0", "trained", "none"]
"""The ranks that have the whole module at the end of a run."""
BATCH = "batch"
"""The value of `loss` for a loss that is computed once for a whole batch."""
REPLANNING_SCHEDULE = "dynpipe"
"""The schedule whose planner moves layers in a run with another schedule."""
FALLBACK_SCHEDULE = "1f1b"
"""The schedule that runs if none can be chosen."""


def chosen_later(name: str) -> str:
    """Return the name. conf/schedule/auto.yaml uses this function as its target."""
    return name


def find_schedule(schedule: str | Schedule | Policy, settings: Mapping[str, Any]) -> Schedule | Policy:
    """Return the named schedule with its settings, or the given schedule object.

    Raises:
        InputError: the schedule does not exist, or does not accept these settings.
    """
    check_type("schedule_args", settings, Mapping[str, Any])
    if isinstance(schedule, str) and schedule == AUTO:
        if settings:
            raise InputError(
                f"schedule_args={short_repr(dict(settings))} belong to one schedule, but schedule='auto' selects the "
                "schedule and its settings. Name a schedule, or remove schedule_args"
            )
        return make_schedule(FALLBACK_SCHEDULE)
    if isinstance(schedule, str):
        return make_schedule(schedule, **settings)
    if isinstance(schedule, type) or not isinstance(schedule, (Schedule, Policy)):
        raise InputError(
            f"schedule must be the name of a schedule, or an object such as KFKB(k=2), got {short_repr(schedule)}"
        )
    if settings:
        raise InputError(f"schedule_args={settings} belong to a schedule's name; {schedule!r} has its settings already")
    return schedule


def find_replanner(replan: bool | Mapping[str, Any], schedule: Schedule | Policy) -> Planner | None:
    """Return the planner of `REPLANNING_SCHEDULE` with these settings, which moves layers, or None if layers must not
    move.

    Raises:
        InputError: the planner does not accept these settings, or the schedule already has a planner that revises
            plans, or it decides its order at run time.
    """
    check_type("replan", replan, bool | Mapping[str, Any])
    if replan is False:
        return None
    if not isinstance(schedule, Schedule):
        raise InputError(
            "replan needs a schedule with a fixed order, because it simulates the effect of each move, but schedule "
            f"{schedule.name!r} decides its order at run time. Leave replan out, or use a schedule with a fixed order, "
            "such as '1f1b' or 'kfkb'"
        )
    if planner_of(schedule).every:
        raise InputError(
            f"schedule {schedule.name!r} already revises its plan during the run, so replan can't be used with it. "
            "Leave replan out, and give settings in schedule_args"
        )
    return planner_of(make_schedule(REPLANNING_SCHEDULE, **({} if replan is True else replan)))


def with_checked_names(init: Callable[_P, None]) -> Callable[_P, None]:
    """Return a constructor of a strategy that also checks the names of its arguments.

    An unknown name raises an error that suggests the right spelling. Inspection finds the signature of `init`.
    """

    @wraps(init)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        check_names(init, args[1:], kwargs)
        init(*args, **kwargs)

    return checked


def check_names(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the names of the arguments with which a user creates a strategy.

    Raises:
        InputError: an argument has an unknown name, or an argument that is keyword-only is given by position.
    """
    known = dict([*signature(function).parameters.items()][1:])
    by_position = [name for name, p in known.items() if p.kind is not Parameter.KEYWORD_ONLY]
    if len(args) > len(by_position):
        raise InputError(
            f"PipelineStrategy takes only {' and '.join(by_position)} by position, and got {len(args)} values, the "
            f"last of which is {short_repr(args[-1])}",
            "Name the others, as in PipelineStrategy('1f1b', 8, data_parallel=2)",
        )
    for name in kwargs:
        if name not in known:
            _explain_schedule_setting(name, args[0] if args else kwargs.get("schedule"))
            lookup_name(known, name, "argument of PipelineStrategy")


def _explain_schedule_setting(name: str, schedule: object) -> None:
    """Raise an error that names `schedule_args` if an unknown argument is a setting of the named schedule."""
    if not isinstance(schedule, str) or schedule not in installed_schedules():
        return
    if name in signature(schedule_factory(schedule)).parameters:
        raise InputError(
            f"PipelineStrategy has no argument {name!r}, which is a setting of schedule {schedule!r}. Set it by "
            f"PipelineStrategy({schedule!r}, schedule_args={{{name!r}: ...}})"
        )


def describe_changes(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """Return the first of these arguments and all others that differ from their defaults, formatted as in a call."""
    defaults = signature(function).parameters
    first, *others = given
    changed = [name for name in others if not _is_equal(given[name], defaults[name].default)]
    return ", ".join([short_repr(given[first]), *(f"{name}={short_repr(given[name])}" for name in changed)])


def _is_equal(value: object, default: object) -> bool:
    """Return whether an argument equals its default.

    The result is False for arrays, whose comparison has no single truth value.
    """
    try:
        return bool(value == default)
    except Exception:  # the user may pass any object, which is not checked yet
        return False


def check_parts(**given: tuple[object, type]) -> None:
    """Check that each object of Lightning is None or has the expected type."""
    for name, (part, kind) in given.items():
        check_type(name, part, kind | None)


def check_microbatches(microbatches: int | None) -> int | None:
    """Return the number of micro-batches of a batch after checking it. None stands for the default."""
    if microbatches is None:
        return None
    return check_count(
        "microbatches", microbatches, "; each holds one sample of a batch or more", most=MAX_MICROBATCHES
    )


def names_modules(partition: str | list[int] | list[str]) -> TypeIs[list[str]]:
    """Return whether a partition lists the modules at which stages begin, so that the module is cut by units."""
    if isinstance(partition, str) or not isinstance(partition, Sequence):
        return False
    return bool(partition) and all(isinstance(place, str) for place in partition)


def check_partition(partition: str | list[int] | list[str], schedule: object) -> str | list[int] | list[str]:
    """Return the partition after checking it.

    Raises:
        InputError: the partition is invalid, or it cannot be combined with the schedule.
    """
    listed = isinstance(partition, Sequence) and not isinstance(partition, str)
    if not listed and not (isinstance(partition, str) and partition in (AUTO, PARAMETERS)):
        raise InputError(
            "partition must be 'auto', 'parameters' or a list of the layers at which stages after the first begin, as "
            f"numbers or paths of modules, got {short_repr(partition)}"
        )
    if names_modules(partition):
        if "" in partition or len(set(partition)) < len(partition):
            raise InputError(
                f"partition must name a module for each stage after the first, each once, got {short_repr(partition)}"
            )
    elif not isinstance(partition, str):
        check_type("partition", partition, Sequence[int])
        if any(a > b for a, b in pairwise([0, *partition])):
            raise InputError(
                f"partition must list the layers at which the stages 1, 2, ... begin, ascending from 0, got "
                f"{short_repr(partition)}"
            )
    if isinstance(schedule, str) and schedule == AUTO and partition != AUTO:
        raise InputError(
            f"schedule='auto' chooses the number of stages and their first layers, so partition={partition!r} can't be "
            "used with it. Leave partition out, or name a schedule"
        )
    return partition


def _check_heartbeat_timeout(name: str, seconds: float) -> float:
    return check_number(
        name,
        seconds,
        f"at least {2 * BEAT_SECONDS:g} seconds",
        lambda x: x >= 2 * BEAT_SECONDS,
        f"; signs of life are given every {BEAT_SECONDS:g} s",
    )


def _check_timeout(name: str, timeout: timedelta) -> timedelta:
    if not isinstance(timeout, timedelta) or timeout <= timedelta():
        raise InputError(f"{name} must be a timedelta above 0, as in timedelta(minutes=30), got {short_repr(timeout)}")
    return timeout


def _check_seed(name: str, seed: int) -> int:
    check_type(name, seed, int)
    if not -(2**63) <= seed < 2**63:
        raise InputError(f"{name} must be a whole number of 64 bits, got {short_repr(seed)}")
    return int(seed)


def _check_backend(name: str, backend: str | None) -> str | None:
    check_type(name, backend, str | None)
    for each in (backend or "").split(",") if backend is not None else ():  # such as "cpu:gloo,cuda:nccl"
        if not dist.is_backend_available(each.rpartition(":")[2] or "none"):
            raise InputError(f"{name}: torch.distributed has no {short_repr(backend)} here; say 'gloo' or 'nccl'")
    return backend


def _check_transport(name: str, transport: str) -> str:
    if not isinstance(transport, str) or transport not in TRANSPORT_KINDS:
        *others, last = map(repr, TRANSPORT_KINDS)
        raise InputError(
            f"{name}: no transport is called {short_repr(transport)}; choose {', '.join(others)} or {last}"
        )
    return transport


class Verify(NamedTuple):
    """The number of batches that one plain process also trains, and whether a difference only causes a warning."""

    batches: int
    warns: bool = False

    def __str__(self) -> str:
        return repr(WARN) if self.warns else str(self.batches)


WARN = "warn"
VERIFY_VARIABLE = "LIGHTNING_PIPES_VERIFY"
"""The environment variable that is used if the strategy has no `verify`."""
PLAN_VARIABLE = "LIGHTNING_PIPES_PLAN"
"""The environment variable that names the file to which the cut is written. Training ends once the cut is decided."""
WARNED_BATCHES = 2
"""The number of batches that verify="warn" compares."""


def parse_verify(verify: int | str) -> Verify:
    """Return the number of batches to compare with one process, as the strategy or the environment specifies it.

    Raises:
        InputError: the value is not a number of batches.
    """
    name, given = "verify", verify
    if not verify and os.environ.get(VERIFY_VARIABLE):
        name, given = VERIFY_VARIABLE, os.environ[VERIFY_VARIABLE]
        given = int(given) if given.isdigit() else given
    if given == WARN:
        return Verify(WARNED_BATCHES, True)
    if isinstance(given, str | bool) or int(check_type(name, given, int)) < 0:
        raise InputError(
            f"{name} must be the number of batches to compare with one process, such as 2 (0 compares none), or "
            f"{WARN!r}, got {short_repr(given)}"
        )
    return Verify(int(given))


def _check_degrees(name: str, degrees: int | Sequence[int]) -> int | tuple[int, ...]:
    if isinstance(degrees, list | tuple):
        if not degrees:
            raise InputError(f"{name} must give each stage its number of processes, as in [2, 1], got {degrees}")
        return tuple(check_count(f"{name} of stage {n}", each, most=MAX_STAGES) for n, each in enumerate(degrees))
    return check_count(name, degrees)


def _of_type(hint: Any) -> Callable[[str, Any], Any]:
    return lambda name, value: check_type(name, value, hint)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "data_parallel": _check_degrees,
    "tensor_parallel": check_count,
    "shard_optimizer": _of_type(bool),
    "module": _of_type(str | None),
    "microbatches_by": _of_type(MicrobatchesBy),
    "seed": _check_seed,
    "transport": _check_transport,
    "checkpoint": _of_type(Literal["full", "sharded"]),
    "gather": _of_type(Gather),
    "data": _of_type(Data),
    "check_loss": _of_type(bool),
    "loss": _of_type(Literal["auto", "microbatch", "batch"]),
    "timeout": _check_timeout,
    "heartbeat_timeout": _check_heartbeat_timeout,
    "relocation": _of_type(Relocation),
    "process_group_backend": _check_backend,
}
"""The check of each field of `Settings`. It takes the name and the value, and returns the value to store."""


@dataclass(frozen=True)
class Settings:
    """The checked settings of a strategy, which `PipelineStrategy` explains.

    Raises:
        InputError: a setting is invalid.
    """

    data_parallel: int | Sequence[int]
    tensor_parallel: int
    shard_optimizer: bool
    module: str | None
    microbatches_by: str
    seed: int
    transport: str
    checkpoint: str
    gather: Gather
    data: Data
    check_loss: bool
    loss: str
    timeout: timedelta
    heartbeat_timeout: float
    relocation: str
    process_group_backend: str | None
    verify: Verify

    @property
    def replicas(self) -> int:
        """The number of replicas of the whole pipeline."""
        return 1 if self.degrees else int(self.data_parallel)  # type: ignore[arg-type]

    @property
    def degrees(self) -> tuple[int, ...]:
        """The number of ranks of each stage if `data_parallel` specifies them, and otherwise an empty tuple."""
        return self.data_parallel if isinstance(self.data_parallel, tuple) else ()

    @property
    def sorting_obstacle(self) -> str:
        """The reason why sequences can't be sorted into micro-batches by length, or an empty text."""
        if self.degrees:
            shares = list(self.degrees)
            return f"data_parallel={shares} divides the samples of each micro-batch among the ranks of a stage"
        return "loss='batch' joins the outputs of micro-batches before the loss" if self.loss == BATCH else ""

    def __post_init__(self) -> None:
        if self.verify.batches and self.data_parallel != 1:
            raise InputError(
                "verify compares with one process that trains the same batches, and "
                f"data_parallel={self.data_parallel} gives each replica samples of its own; verify the module with "
                "data_parallel=1, or leave verify out"
            )
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.data == "one" and self.tensor_parallel > 1:
            raise InputError(
                f"data='one' can't be combined with tensor_parallel={self.tensor_parallel}: one rank would load the "
                "batches of one pipeline, and each shard forms a pipeline of its own. Leave data out, and seed the "
                "data so that all shards load the same batches"
            )
        if self.microbatches_by == TOKENS and self.sorting_obstacle:
            raise InputError(
                f"{self.sorting_obstacle}, and microbatches_by='tokens' pads each micro-batch to its own length. Leave "
                "one of them out, or set microbatches_by='auto'"
            )
        if self.loss == BATCH and self.module:
            raise InputError(
                f"loss='batch' cuts the module by units, and module={self.module!r} names one container to cut; leave "
                "one of them out"
            )
        if self.shard_optimizer and self.degrees:
            raise InputError(
                f"shard_optimizer=True shards optimizer states over replicas of whole pipelines, but "
                f"data_parallel={list(self.degrees)} gives each stage its own number of ranks. Set data_parallel to a "
                "number, or leave shard_optimizer out"
            )
        if self.degrees and self.tensor_parallel > 1:
            raise InputError(
                f"data_parallel={list(self.degrees)} gives each stage its own number of ranks, but "
                f"tensor_parallel={self.tensor_parallel} gives all stages the same number. Leave one of them out"
            )
        if self.degrees and self.relocation != BLOCKING:
            raise InputError(
                f"relocation={self.relocation!r} moves layers while batches are in flight, but layers of stages with "
                f"several ranks, data_parallel={list(self.degrees)}, can't move. Leave one of them out"
            )
        if self.shard_optimizer and self.data_parallel == 1:
            raise InputError(
                "shard_optimizer=True shards optimizer states over the replicas of a stage, and data_parallel=1 has "
                "one; set data_parallel to 2 or more, or leave shard_optimizer out"
            )
        if self.shard_optimizer and self.relocation != BLOCKING:
            raise InputError(
                f"relocation={self.relocation!r} makes ranks step layers that are in transit, which is not possible "
                f"with shard_optimizer=True. Use relocation={BLOCKING!r}, or leave shard_optimizer out"
            )
