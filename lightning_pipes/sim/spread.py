"""How much a makespan scatters where operations do: drawn by chance, from a seed.

Medians are no fair picture of a pipeline: each rank waits for whoever is slow this time, so rare slow operations cost
more than their share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from lightning_pipes.cost import CostModel
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import InputError, Instruction, Plan, Policy, Program, check_count, check_number
from lightning_pipes.sim.loops.dispatch import run_policy
from lightning_pipes.sim.loops.memory import Bytes
from lightning_pipes.sim.loops.operations import Prices
from lightning_pipes.sim.loops.queues import open_queues
from lightning_pipes.sim.loops.static import compile_program, ends_under, run
from lightning_pipes.sim.loops.tables import Array
from lightning_pipes.sim.simulator import check_order

SLOW = 0.95
"""Of this share of draws none took longer than what is called slow."""


@dataclass(frozen=True)
class Spread:
    """The makespans of one order under many draws.

    Attributes:
        nanoseconds: of every draw, ascending.
        steady: nanoseconds where each operation takes what the cost model says, without scatter.
    """

    nanoseconds: tuple[int, ...]
    steady: int

    @property
    def mean(self) -> float:
        """Nanoseconds on average: what an epoch of many such steps takes of each."""
        return fmean(self.nanoseconds)

    def quantile(self, share: float) -> int:
        """Nanoseconds that this share of draws, 0 to 1, did not exceed."""
        check_number("share", share, "from 0 to 1", lambda x: 0 <= x <= 1)
        return self.nanoseconds[max(0, math.ceil(share * len(self.nanoseconds)) - 1)]

    def __str__(self) -> str:
        mean, slow, steady = map(seconds_text, (self.mean, self.quantile(SLOW), self.steady))
        draws = f"{SLOW:.0%} of {len(self.nanoseconds)} draws"
        return f"{mean} on average and at most {slow} in {draws}; {steady} without scatter"


def draw_spread(order: Program | Policy, plan: Plan, costs: CostModel, *, draws: int = 200, seed: int = 0) -> Spread:
    """Draw makespans of a finite program or a policy with operations that vary by `costs.scatter`.

    The time of every operation is multiplied by one of the ratios of its kind and stage, each as likely. The draws are
    the same for the same seed.

    Raises:
        InputError: the costs have no scatter, or do not know some stage.
        DeadlockError, ProgramError, TypeError: see `makespan`.
    """
    check_order("spread", order, plan)
    check_count("draws", draws)
    if not costs.scatter:
        raise InputError(
            "the cost model has no scatter to draw from; CostModel.from_timelines(timelines) takes it from what ran, "
            "or give "
            "scatter={(Kind.F, 0): (1.0, 1.0, 1.4), ...}, multiples of seconds"
        )
    if isinstance(order, Program):
        fixed = compile_program(order, plan).per_operation
        prices = fixed.price_operations(costs)
        times = _drawn(fixed.instructions, prices, costs, draws, seed)
        return Spread(tuple(sorted(ends_under(fixed, prices, times).tolist())), run(fixed, prices).makespan)
    queues = open_queues(plan, plan.batches).per_operation
    prices, memory = queues.price_operations(costs), Bytes.untracked(queues)
    times = _drawn(queues.instructions, prices, costs, draws, seed)
    cases = (prices, *prices.with_times(times))
    steady, *ends = [run_policy(order, queues, case, memory).timed.makespan for case in cases]
    return Spread(tuple(sorted(ends)), steady)


def _drawn(instructions: tuple[Instruction, ...], prices: Prices, costs: CostModel, draws: int, seed: int) -> Array:
    """Nanoseconds: a row for each draw, a column for each operation."""
    chance = np.random.default_rng(seed)
    times = np.tile(np.array(prices.busy, float), (draws, 1))
    columns: dict[object, list[int]] = {}
    for n, i in enumerate(instructions):
        columns.setdefault((i.kind, i.stage), []).append(n)
    for key, ratios in sorted(costs.scatter.items()):
        if key in columns and ratios:
            times[:, columns[key]] *= chance.choice(np.array(ratios), (draws, len(columns[key])))
    found: Array = np.rint(times).astype(np.int64)
    return found
