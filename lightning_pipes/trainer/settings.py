"""What PipelineStrategy is told, looked at before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_pipes.engine.heartbeat import BEAT_SECONDS
from lightning_pipes.engine.transport import KINDS
from lightning_pipes.ir import PlanError, Policy, Schedule
from lightning_pipes.ir.registry import make_schedule

AUTO = "auto"
"""The name of the schedule, and of the partition, that are chosen when training starts."""
PARAMETERS = "parameters"
"""The partition that balances the stages by the number of their parameters."""
UNCHOSEN = "1f1b"
"""The schedule where there is nothing to choose by."""


def chosen_later(name: str) -> str:
    """What conf/schedule/auto.yaml stands for: the name itself."""
    return name


def known_schedule(schedule: str | Schedule | Policy, settings: Mapping[str, Any]) -> Schedule | Policy:
    """The schedule of that name with its settings, or the one given.

    Raises:
        PlanError: there is none, or it does not take these settings.
    """
    if schedule == AUTO:
        if settings:
            raise PlanError(f"schedule_args={dict(settings)} belong to one schedule, and schedule='auto' chooses it")
        return make_schedule(UNCHOSEN)
    if isinstance(schedule, str):
        return make_schedule(schedule, **settings)
    if isinstance(schedule, type) or not isinstance(schedule, (Schedule, Policy)):
        raise PlanError(f"schedule must be the name of one, or an object as in KFKB(k=2), got {schedule!r}")
    if settings:
        raise PlanError(f"schedule_args={settings} belong to a schedule's name; {schedule!r} has its settings already")
    return schedule


def long_enough(heartbeat_timeout: float) -> float:
    """The seconds after which a silent process is given up; PlanError if signs of life are not that frequent."""
    if not heartbeat_timeout >= 2 * BEAT_SECONDS:
        raise PlanError(
            f"heartbeat_timeout must be at least {2 * BEAT_SECONDS:g} seconds, got {heartbeat_timeout}; signs of life "
            f"are given every {BEAT_SECONDS:g} s"
        )
    return heartbeat_timeout


def known_transport(transport: str) -> str:
    """PlanError unless there is a transport of that name."""
    if transport not in KINDS:
        *others, last = map(repr, KINDS)
        raise PlanError(f"no transport is called {transport!r}; choose {', '.join(others)} or {last}")
    return transport


def known_form(checkpoint: str) -> str:
    """PlanError unless checkpoints have such a form."""
    if checkpoint not in ("full", "sharded"):
        raise PlanError(f"checkpoint must be 'full' or 'sharded', got {checkpoint!r}")
    return checkpoint


def known_partition(partition: str | list[int], schedule: object) -> str | list[int]:
    """How layers are cut into stages.

    Raises:
        PlanError: there is no such way, or it can't be had with the schedule.
    """
    if isinstance(partition, str) and partition not in (AUTO, PARAMETERS):
        raise PlanError(f"partition must be 'auto', 'parameters' or a list of layer numbers, got {partition!r}")
    if schedule == AUTO and partition != AUTO:
        raise PlanError(
            f"schedule='auto' chooses the number of stages and where they begin, so partition={partition!r} can't be "
            "kept to; leave it out, or name a schedule"
        )
    return partition
