"""A pipeline in virtual time on devices with neighbours: the observations of a run, and the seconds of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import Cluster, CostModel, Deployment, Device, LayerProfile, Link, ModelProfile
from lightning_pipes.ir import Kind, Plan, Program, Schedule, Span
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.planning.replanning import Observation, replay_of, sends_of

Array = npt.NDArray[np.float64]
Slowdown = Callable[[int, int, int], Array]
"""A function that returns the factors by which the operations of a rank take longer.

Its arguments are the rank, the first batch, and the number of batches. Axis 0 of the result is batches, and axis 1 is
the operations of a batch. Axis 1 may be longer than the number of operations. An axis of length 1 is broadcast.
"""

BESIDE = (1.1, 1.8, 3.2)
"""The slowdown of a device next to one, two and three networks in the paper (table I)."""
FAST = Link(bandwidth=1e9)


def layered_model(
    seconds: Sequence[float], edge: float = 1e3, weights: int = 10**6, backward: float = 2.0
) -> ModelProfile:
    """Return a model with given forward seconds of each layer for a sample.

    Args:
        seconds: the forward seconds of each layer.
        edge: bytes of the output of each layer for a sample.
        weights: bytes of the weights of each layer. Optimizer states are twice as large.
        backward: the time of a backward, relative to a forward.
    """
    layers = tuple(
        LayerProfile(
            f"layer {n}",
            ((0, 0.0), (1, t)),
            ((0, 0.0), (1, backward * t)),
            weight_bytes=weights,
            gradient_bytes=weights,
            optimizer_bytes=2 * weights,
            saved=((1, edge),),
            output=((1, edge),),
        )
        for n, t in enumerate(seconds)
    )
    return ModelProfile(layers)


@dataclass(frozen=True)
class Neighbourhood:
    """A model on the ranks of a schedule, whose devices have neighbours.

    Attributes:
        slowdown: the slowdown of operations by neighbours.
        link: the link between ranks.
    """

    profile: ModelProfile
    schedule: Schedule
    ranks: int
    rows: int
    microbatches: int
    slowdown: Slowdown
    link: Link = FAST
    memory: int | None = None

    @property
    def deployment(self) -> Deployment:
        """The devices and links."""
        return Deployment(Cluster((Device(self.memory),) * self.ranks, inside=self.link))

    def make_problem(self, layers: Sequence[Span] = ()) -> Problem:
        """Return the problem of a batch; by default layers are cut evenly by their seconds."""
        stages = len(self.schedule.place_stages(self.ranks))
        columns = self.profile.layer_arrays
        both = (columns.seconds_at(Kind.F, 1) + columns.seconds_at(Kind.B, 1))[1:-1].tolist()
        cut = tuple(layers) or even_partition(both, stages)
        return Problem(
            self.schedule, self.ranks, self.rows, self.microbatches, False, cut, self.profile, self.deployment
        )

    def plan(self, layers: Sequence[Span] = ()) -> Plan:
        return solve_plan(self.make_problem(layers))

    def operation_seconds(self, plan: Plan, first: int, batches: int) -> dict[tuple[Kind, int], Array]:
        """Return the seconds of all operations in `batches` batches, in the form of `Replay`, for one case."""
        costs = self.profile.stage_costs(plan.layers)
        found: dict[tuple[Kind, int], Array] = {}
        for stage, rank in enumerate(plan.ranks):
            operations = _operations(plan, stage)
            factor = self.slowdown(rank, first, batches)[:, :operations]
            factor = np.broadcast_to(factor, (batches, operations))
            at = 0
            for kind in plan.compute_kinds:
                spans = plan.spans(kind, stage)
                alone = np.array([costs.seconds_at(kind, stage, span.rows) for span in spans])
                found[kind, stage] = (alone * factor[:, at : at + len(spans)])[None]
                at += len(spans)
        return found | self.message_seconds(plan)

    def message_seconds(self, plan: Plan) -> dict[tuple[Kind, int], Array]:
        found = {}
        for kind, stage in sends_of(plan):
            edge = plan.layers[stage if kind is Kind.SF else stage - 1].stop
            size = np.array([self.profile.edge_bytes(edge) * span.rows for span in plan.spans(kind, stage)])
            found[kind, stage] = (size / self.link.bandwidth + self.link.latency)[None, None]
        return found

    def observe_window(self, plan: Plan, first: int, batches: int, free: tuple[int | None, ...] = ()) -> Observation:
        """Return the observation of a window of `batches` batches."""
        found = self.operation_seconds(plan, first, batches)
        seconds = {}
        for (kind, stage), table in found.items():
            sizes = [span.rows for span in plan.spans(kind, stage)]
            mean = table[0].mean(axis=0)
            seconds[kind, stage] = tuple(
                (n, float(np.mean([t for t, rows in zip(mean, sizes, strict=True) if rows == n])))
                for n in sorted({*sizes})
            )
        operations = {key: table[0] for key, table in found.items() if key[0] in plan.compute_kinds}
        return Observation(CostModel(seconds), operations, ({},) * len(free), free)

    def order(self, plan: Plan) -> Program:
        return self.schedule.program(plan)

    def steps(self, plan: Plan, first: int, batches: int) -> Array:
        """Return the seconds of each step, or their mean for each step if the schedule does not flush."""
        replay = replay_of(self.order(plan), plan, batches)
        found: Array = np.broadcast_to(replay.step_seconds(self.operation_seconds(plan, first, batches))[0], (batches,))
        return found


def _operations(plan: Plan, stage: int) -> int:
    return sum(len(plan.spans(kind, stage)) for kind in plan.compute_kinds)


def constant_slowdown(factors: Sequence[float], since: int = 0) -> Slowdown:
    """Return a slowdown with a constant factor for each rank, which begins with batch `since`."""

    def slowdown_of(rank: int, first: int, batches: int) -> Array:
        now = np.arange(first, first + batches) >= since
        return np.where(now, factors[rank], 1.0)[:, None]

    return slowdown_of


@lru_cache
def visiting_slowdown(ranks: int, load: float, stay: float, seed: int) -> Slowdown:
    """Return a slowdown by neighbours with random arrivals and durations.

    Each neighbour slows down the device by a random factor from BESIDE. The slowdowns of several neighbours add up.

    Args:
        ranks: the number of ranks.
        load: the mean number of neighbours of a rank.
        stay: the mean number of batches for which a neighbour stays.
        seed: the seed of the random numbers.
    """
    chance, until = np.random.default_rng(seed), 100 * stay
    found = []
    for _ in range(ranks):
        count = int(chance.poisson(load * (until + 10 * stay) / stay))
        arrivals = chance.uniform(-10 * stay, until, count)
        found.append((arrivals, arrivals + chance.exponential(stay, count), chance.choice(BESIDE, count) - 1.0))

    def slowdown_of(rank: int, first: int, batches: int) -> Array:
        arrivals, departures, more = found[rank]
        now = np.arange(first, first + batches)[:, None]
        return np.asarray(1.0 + (((arrivals <= now) & (now < departures)) * more).sum(axis=1, keepdims=True))

    return slowdown_of


def rare_slowdown(rank: int, factor: float, share: float, seed: int, operations: int = 64) -> Slowdown:
    """Slow randomly chosen operations of one rank by `factor`."""

    def slowdown_of(of_rank: int, first: int, batches: int) -> Array:
        if of_rank != rank:
            return np.ones((1, 1))
        draws = np.stack([np.random.default_rng((seed, n)).random(operations) for n in range(first, first + batches)])
        return np.where(draws < share, factor, 1.0)

    return slowdown_of
