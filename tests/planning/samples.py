"""Samples of steps on simulated timelines."""

from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.ir import Kind, adapt_plan
from lightning_pipes.planning.measured import StepSample
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.testing.generators import uniform

MS = 1_000_000


def step(schedule=KFKB(1), m=6, at=0, shift=None, **times):  # noqa: B008 - frozen
    """Return the samples of three ranks, the plan and the costs.

    As in an engine, the samples of a rank have its computations and the transfers that it received. The clock of a rank
    is ahead by `shift[rank]` when it stamps its messages.
    """
    given = {"f": 20 * MS, "b": 40 * MS, "link": 10 * MS, **times}
    plan, costs = uniform(3, m, **given)
    plan = adapt_plan(plan, schedule)
    timeline = simulate(schedule.program(plan), plan, costs)
    by_rank = [[], [], []]
    for e in timeline.events:
        receiver = timeline.target_rank(e) if e.instruction.kind in (Kind.SF, Kind.SB) else e.rank
        start = e.start + at
        if receiver != e.rank and shift:
            start = min(start + shift.get(e.rank, 0), e.end + at)  # as in the engine
        by_rank[receiver].append(e._replace(start=start, end=e.end + at))
    return [StepSample.from_events(events, plan, since=at) for events in by_rank], plan, costs


def equal_layers(count: int) -> ModelProfile:
    tables = {"forward": ((1, 1e-3), (16, 16e-3)), "backward": ((1, 2e-3), (16, 32e-3))}
    layer = LayerProfile("", **tables, saved=((1, 1e6),), weight_bytes=10**6, output=((1, 1e4),))
    return ModelProfile((layer,) * count)
