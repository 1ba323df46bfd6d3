"""How many jobs fit on a pipeline, and whether their states can be switched without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipes.cost import Costs
from lightning_pipes.ir import InputError, Instruction, Kind, Plan, check_count
from lightning_pipes.planning.switching import Switching


@dataclass(frozen=True)
class Footprint:
    """Bytes of one job on one stage.

    Attributes:
        state: weights, gradients and optimizer, which are switched.
        kept: what a batch in flight keeps from forward to backward, which stays.
        working: needed while one block runs, however many jobs there are.
    """

    state: int
    kept: int
    working: int = 0


def array_size(stages: Sequence[Footprint], device: int, host: int | None = None, slots: int = 2) -> int:
    """The most jobs that may be resident; 0 where not even one fits (S V-B1).

    With a host's memory a device holds `slots` states, the running one and those that come, and the host holds all of
    them for all stages; without it (None) a device holds every job's state.

    Args:
        stages: of equal jobs, one stage a device.
        device, host: bytes of each device, and of the host of all of them.

    Raises:
        InputError: fewer than two slots where states are switched.
    """
    if host is not None and check_count("slots", slots) < 2:
        raise InputError(f"switching needs a slot for the running state and one for the next, got {slots}")
    sizes = []
    for stage in stages:
        free = device - stage.working
        if host is None:
            sizes.append(free // (stage.state + stage.kept))
            continue
        few = free // (stage.state + stage.kept)  # fewer jobs than slots keep their states on the device
        many = (free - slots * stage.state) // stage.kept if stage.kept else free
        sizes.append(max(min(few, slots), many if many >= slots else 0))
    if host is not None:
        sizes.append(host // max(1, sum(stage.state for stage in stages)))
    return max(0, min(sizes))


def switching(
    plan: Plan, costs: Costs, states: Sequence[Sequence[int]], hosts: Sequence[Sequence[int]], bandwidth: float
) -> list[Switching]:
    """Of each host, whether states are there in time (E2).

    The minimum is over all blocks that may run meanwhile, backwards too, as it should be in the paper; and over the
    blocks of the host's own stages, for others hide nothing.

    Args:
        states: bytes by job, then by stage.
        hosts: the stages on each.
        bandwidth: bytes per second from a host to all its devices together.

    Raises:
        InputError: states are not given for all jobs and stages, or no bandwidth.
    """
    if len(states) != len(plan.jobs) or any(len(row) != plan.n_stages for row in states) or not bandwidth > 0:
        raise InputError(
            f"switching needs a bandwidth > 0 and states of {len(plan.jobs)} jobs on {plan.n_stages} stages; got "
            f"{bandwidth} and {[len(row) for row in states]}"
        )
    found = []
    for stages in hosts:
        largest = sum(max(row[s] for row in states) for s in stages)
        shortest = min(_alone(plan, costs, job, s) for job in range(len(plan.jobs)) for s in stages)
        found.append(Switching(tuple(stages), largest / bandwidth, max(shortest, 1) / 1e9))
    return found


def _alone(plan: Plan, costs: Costs, job: int, stage: int) -> int:
    """Nanoseconds of the job's shortest block on the stage, less its message."""
    times = []
    for kind, send, last in ((Kind.F, Kind.SF, plan.n_stages - 1), (Kind.B, Kind.SB, 0)):
        for span in plan.spans(kind, stage, job):
            time = costs.duration_ns(Instruction(kind, stage, job, 0, span), plan)
            if stage != last:
                time -= sum(costs.transfer_ns(Instruction(send, stage, job, 0, span), plan))
            times.append(time)
    return min(times)
