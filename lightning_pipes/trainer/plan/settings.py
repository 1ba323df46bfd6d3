"""The settings of PipelineStrategy, looked at before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from lightning_pipes.engine.messages.transport import KINDS
from lightning_pipes.engine.watch.heartbeat import BEAT_SECONDS
from lightning_pipes.ir import (
    MAX_MICROBATCHES,
    InputError,
    Policy,
    Schedule,
    check_count,
    check_number,
    check_type,
    short_repr,
)
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.planner import Planner, Way, planner_of

AUTO = "auto"
"""The name of the schedule, and of the partition, that are chosen when training starts."""
PARAMETERS = "parameters"
"""The partition that balances the stages by the number of their parameters."""
Gather = Literal["auto", "all", "rank0", "none"]
"""The ranks that have the whole module when a run has ended."""
REPLANS = "dynpipe"
"""The schedule whose planner has layers move in a run of another one."""
UNCHOSEN = "1f1b"
"""The schedule where there is nothing to choose by."""


def chosen_later(name: str) -> str:
    """The name itself, for which conf/schedule/auto.yaml stands."""
    return name


def known_schedule(schedule: str | Schedule | Policy, settings: Mapping[str, Any]) -> Schedule | Policy:
    """The schedule of that name with its settings, or the one given.

    Raises:
        InputError: there is none, or it does not take these settings.
    """
    check_type("schedule_args", settings, Mapping[str, Any])
    if isinstance(schedule, str) and schedule == AUTO:
        if settings:
            raise InputError(f"schedule_args={dict(settings)} belong to one schedule, and schedule='auto' chooses it")
        return make_schedule(UNCHOSEN)
    if isinstance(schedule, str):
        return make_schedule(schedule, **settings)
    if isinstance(schedule, type) or not isinstance(schedule, (Schedule, Policy)):
        raise InputError(f"schedule must be the name of one, or an object as in KFKB(k=2), got {short_repr(schedule)}")
    if settings:
        raise InputError(f"schedule_args={settings} belong to a schedule's name; {schedule!r} has its settings already")
    return schedule


def known_replanner(replan: bool | Mapping[str, Any], schedule: Schedule | Policy) -> Planner | None:
    """The planner of `REPLANS` with these settings, which has layers move; None where nobody wants that.

    Raises:
        InputError: it does not take these settings; or the schedule has a planner that goes on planning, or orders
            while it runs.
    """
    check_type("replan", replan, bool | Mapping[str, Any])
    if replan is False:
        return None
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"replan has layers move by simulating what comes of it, and schedule {schedule.name!r} decides its order "
            "while it runs; leave replan out, or take a schedule with a fixed order, such as '1f1b' or 'kfkb'"
        )
    if planner_of(schedule).every:
        raise InputError(
            f"schedule {schedule.name!r} goes on planning by itself; leave replan out, and give settings in "
            "schedule_args"
        )
    return planner_of(make_schedule(REPLANS, **({} if replan is True else replan)))


def long_enough(heartbeat_timeout: float) -> float:
    """The seconds after which a silent process is given up; InputError if signs of life are not that frequent."""
    return check_number(
        "heartbeat_timeout",
        heartbeat_timeout,
        f"at least {2 * BEAT_SECONDS:g} seconds",
        lambda x: x >= 2 * BEAT_SECONDS,
        f"; signs of life are given every {BEAT_SECONDS:g} s",
    )


def possible_timeout(timeout: timedelta) -> timedelta:
    """How long ranks wait for each other; InputError if it is no time."""
    if not isinstance(timeout, timedelta) or timeout <= timedelta():
        raise InputError(f"timeout must be a timedelta above 0, as in timedelta(minutes=30), got {short_repr(timeout)}")
    return timeout


def known_seed(seed: int) -> int:
    """The seed of random numbers; InputError if it is no number of 64 bits."""
    check_type("seed", seed, int)
    if not -(2**63) <= seed < 2**63:
        raise InputError(f"seed must be a whole number of 64 bits, got {short_repr(seed)}")
    return int(seed)


def known_backend(backend: str | None) -> str | None:
    """The backend of the default process group; InputError if torch has none of that name."""
    check_type("process_group_backend", backend, str | None)
    for each in (backend or "").split(",") if backend is not None else ():  # as in "cpu:gloo,cuda:nccl"
        if not dist.is_backend_available(each.rpartition(":")[2] or "none"):
            raise InputError(
                f"process_group_backend: torch.distributed has no {short_repr(backend)} here; say 'gloo' or 'nccl'"
            )
    return backend


def check_parts(**given: tuple[object, type]) -> None:
    """InputError unless each part of Lightning's is None or of its kind."""
    for name, (part, kind) in given.items():
        check_type(name, part, kind | None)


def possible_microbatches(microbatches: int | None) -> int | None:
    """The pieces of a batch; InputError if no batch has so many."""
    if microbatches is None:
        return None
    return check_count(
        "microbatches", microbatches, "; each holds one sample of a batch or more", most=MAX_MICROBATCHES
    )


def known_transport(transport: str) -> str:
    """InputError unless there is a transport of that name."""
    if not isinstance(transport, str) or transport not in KINDS:
        *others, last = map(repr, KINDS)
        raise InputError(
            f"transport: no transport is called {short_repr(transport)}; choose {', '.join(others)} or {last}"
        )
    return transport


def known_form(checkpoint: str) -> str:
    """InputError unless checkpoints have such a form."""
    return str(check_type("checkpoint", checkpoint, Literal["full", "sharded"]))


def known_way(moves: str) -> str:
    """InputError unless layers can move in such a way."""
    return str(check_type("moves", moves, Way))


def known_partition(partition: str | list[int], schedule: object) -> str | list[int]:
    """How layers are cut into stages.

    Raises:
        InputError: there is no such way, or it can't be had with the schedule.
    """
    if isinstance(partition, str) and partition not in (AUTO, PARAMETERS):
        raise InputError(f"partition must be 'auto', 'parameters' or a list of layer numbers, got {partition!r}")
    if not isinstance(partition, str):
        check_type("partition", partition, Sequence[int])
        if any(a > b for a, b in pairwise([0, *partition])):
            raise InputError(
                f"partition must list the layers at which the stages 1, 2, ... begin, ascending from 0, got "
                f"{short_repr(partition)}"
            )
    if isinstance(schedule, str) and schedule == AUTO and partition != AUTO:
        raise InputError(
            f"schedule='auto' chooses the number of stages and where they begin, so partition={partition!r} can't be "
            "kept to; leave it out, or name a schedule"
        )
    return partition


class Verify(NamedTuple):
    """The batches that one plain process trains, too, and whether a difference is a warning only."""

    batches: int
    warns: bool = False

    def __str__(self) -> str:
        return repr(WARN) if self.warns else str(self.batches)


WARN = "warn"
VERIFY_VARIABLE = "LIGHTNING_PIPES_VERIFY"
"""The environment variable that stands for `verify` where the strategy leaves it out."""
WARNED_BATCHES = 2
"""Batches that verify="warn" compares."""


def known_verify(verify: int | str) -> Verify:
    """How much of training is compared with one process, as the strategy or the environment says it; InputError if it
    is no number of batches."""
    name, given = "verify", verify
    if not verify and os.environ.get(VERIFY_VARIABLE):
        name, given = VERIFY_VARIABLE, os.environ[VERIFY_VARIABLE]
        given = int(given) if given.isdigit() else given
    if given == WARN:
        return Verify(WARNED_BATCHES, True)
    if isinstance(given, str) or int(check_type(name, given, int)) < 0:
        raise InputError(f"{name} must be a number of batches, 0 for none, or {WARN!r}, got {short_repr(given)}")
    return Verify(int(given))


@dataclass(frozen=True)
class Settings:
    """Settings of a strategy that were looked at and make sense; `PipelineStrategy` explains each."""

    data_parallel: int
    module: str | None
    seed: int
    transport: str
    sharded: bool
    gather: Gather
    check_loss: bool
    timeout: timedelta
    heartbeat_timeout: float
    moves: str
    backend: str | None
    verify: Verify

    @classmethod
    def of(
        cls,
        data_parallel: int,
        module: str | None,
        seed: int,
        transport: str,
        checkpoint: str,
        gather: str,
        check_loss: bool,
        timeout: timedelta,
        heartbeat_timeout: float,
        moves: str,
        backend: str | None,
        verify: int | str,
    ) -> Settings:
        """The settings that these arguments of `PipelineStrategy` say.

        Raises:
            InputError: one of them makes no sense.
        """
        if known_verify(verify).batches and data_parallel != 1:
            raise InputError(
                f"verify compares with one process that trains the same batches, and data_parallel={data_parallel} "
                "gives each replica batches of its own; verify the module with data_parallel=1, or leave verify out"
            )
        return cls(
            check_count("data_parallel", data_parallel),
            check_type("module", module, str | None),
            known_seed(seed),
            known_transport(transport),
            known_form(checkpoint) == "sharded",
            check_type("gather", gather, Gather),
            check_type("check_loss", check_loss, bool),
            possible_timeout(timeout),
            long_enough(heartbeat_timeout),
            known_way(moves),
            known_backend(backend),
            known_verify(verify),
        )
