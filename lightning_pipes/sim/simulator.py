"""Simulation of a program or a policy in virtual time, with given costs or with costs drawn from a seed.

`draw_spread` returns the variation of the makespan if the durations of operations vary. Medians underestimate the
duration of a step: each rank waits for the rank that happens to be slow, so rare slow operations cost more than their
share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import fmean

import numpy as np

from lightning_pipes.cost import CostModel, Costs
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import (
    InputError,
    Instruction,
    LayerUse,
    Plan,
    Policy,
    Program,
    Schedule,
    check_count,
    check_number,
    check_policy,
    check_stream,
    short_repr,
    unroll_stream,
)
from lightning_pipes.sim.loops.dispatch import run_policy
from lightning_pipes.sim.loops.operations import Bytes, Limit, OperationLog, Operations, Prices, priced_by, rank_peaks
from lightning_pipes.sim.loops.queues import open_queues
from lightning_pipes.sim.loops.static import compile_program, ends_under, run
from lightning_pipes.sim.loops.tables import Array
from lightning_pipes.sim.timeline import Event, Timeline


def simulate(
    order: Program | Policy,
    plan: Plan,
    costs: Costs,
    *,
    batches: int | Sequence[LayerUse] | None = None,
    memory_limit: Limit = None,
) -> Timeline:
    """Simulate an order with `costs` and return the timeline, in integer nanoseconds that are equal on every machine.

    A rank runs one computation at a time. In each direction, a link moves one message at a time, in the order in which
    messages were sent, and its latency does not occupy it; `cost.Link` describes further properties of links. Sends
    overlap with computations, and the two directions of a link are independent, unless the costs specify another
    `cost.Regime`. Receives take no time.

    Args:
        order: a program, which runs in exactly its order and is lowered first if it has no transfers; or a policy,
            which picks instructions in virtual time within the limits of the plan.
        plan: the plan that is ordered.
        costs: the durations and bytes of operations.
        batches: the number of batches of each job. The default is the number in the plan for a policy that flushes; for
            an endless program, it is three more than its head contains, and for an endless policy three more than its
            depth. For an endless policy, it may also be a sequence with the layers that each batch uses; otherwise, all
            batches use all layers. A finite program has its own number of batches.
        memory_limit: the bytes that every rank may hold, or one value for each rank. Computations that do not fit wait.

    Raises:
        DeadlockError: ranks wait for each other, for memory, or for a policy that picks no instruction. The message
            names the rank and the reason.
        InputError: the costs lack a stage; or `batches` is a sequence and the order is not an endless policy.
        PlanError: a policy can't order the plan, or the weights alone exceed the memory limit.
        ProgramError: the program belongs to another plan.
        TypeError: `order` is neither a program nor a policy.
    """
    check_order("simulate", order, plan)
    if isinstance(order, Policy) and order.is_endless:
        check_stream(order, plan)
        asked = order.depth + 3 if batches is None else batches
        uses = [LayerUse.from_plan(plan)] * asked if isinstance(asked, int) else list(asked)
        plan = unroll_stream(plan, uses, order.depth)
        return _by_policy(order, plan, plan.batches, costs, memory_limit, uses)
    if not (batches is None or isinstance(batches, int)):
        raise InputError(
            "the layers of each batch can be specified only for an endless policy. Pass the number of batches for "
            "other orders"
        )
    if isinstance(order, Program):
        program = order.unroll(order.head_batches + 3 if batches is None else batches) if order.is_endless else order
        fixed, prices = priced_by(costs, compile_program(program, plan))
        return _build_timeline(fixed, prices, run(fixed, prices), rank_peaks(fixed, plan, costs, memory_limit))
    return _by_policy(order, plan, batches or plan.batches, costs, memory_limit)


def makespan(order: Program | Policy, plan: Plan, costs: Costs) -> int:
    """Return the makespan of a finite program or a policy in nanoseconds.

    The result equals `simulate(...).makespan`, but no timeline is created, which makes searches faster. Pass the same
    objects again if possible: everything that depends on the order and the plan is prepared once for each pair, and the
    last costs are cached. If numba is installed and there is much to simulate, machine code is used; see
    `sim.loops.jit`. A caller that cycles through many orders should keep a `CompiledSimulation` of each.

    Raises:
        DeadlockError: ranks wait for each other, or for a policy that picks no instruction.
        InputError: the costs lack a stage.
        ProgramError: the program belongs to another plan.
        TypeError: `order` is neither a program nor a policy.
    """
    return CompiledSimulation(order, plan).makespan(costs)


class CompiledSimulation:
    """A finite program or a policy that is prepared to be simulated repeatedly with different costs.

    Args:
        order: the program or policy.
        plan: the plan that is ordered.

    Raises:
        ProgramError: the program belongs to another plan.
        DeadlockError: ranks wait for each other.
        TypeError: `order` is neither a program nor a policy.
    """

    def __init__(self, order: Program | Policy, plan: Plan) -> None:
        check_order("makespan", order, plan)
        self._policy = None if isinstance(order, Program) else order
        self._fixed = compile_program(order, plan) if isinstance(order, Program) else None
        self._open = open_queues(plan, plan.batches) if self._fixed is None else None

    def makespan(self, costs: Costs) -> int:
        """Return the makespan in nanoseconds; see the function `makespan`."""
        if self._fixed is not None:
            return run(*priced_by(costs, self._fixed)).makespan
        assert self._open is not None
        assert self._policy is not None
        queues, prices = priced_by(costs, self._open)
        return run_policy(self._policy, queues, prices, Bytes.create_untracked(queues)).timed.makespan


def makespans(program: Program, plan: Plan, costs: Costs, times: Array, *, apart: bool = False) -> Array:
    """Return the makespan of the finite `program` in nanoseconds for each of many costs.

    Args:
        program: the program.
        plan: the plan that is ordered.
        costs: the properties that all cases share: the overhead, and all properties of links except the durations of
            messages.
        times: integer nanoseconds, with one row for each case and one column for each instruction in
            `cost_representatives(program, plan)`.
        apart: whether there is one column for each operation instead.

    Raises:
        DeadlockError: ranks wait for each other.
        InputError: the costs lack a stage, or `times` has another shape or type.
        ProgramError: the program belongs to another plan.
    """
    check_order("makespans", program, plan, Program)
    fixed = compile_program(program, plan)
    fixed = fixed.per_operation if apart else fixed
    if times.ndim != 2 or times.shape[1] != len(fixed.like) or times.dtype != np.int64:
        raise InputError(
            f"times needs int64 nanoseconds in {len(fixed.like)} columns, one for each of "
            "cost_representatives(program, plan); "
            f"got {times.dtype} in shape {times.shape}"
        )
    return ends_under(fixed, fixed.price_operations(costs), times)


def cost_representatives(program: Program, plan: Plan, *, apart: bool = False) -> tuple[Instruction, ...]:
    """Return one instruction for each group of instructions with equal cost: equal kind, stage, job, batch and rows.

    With `apart`, all instructions are returned, because operations of the same size may also differ.
    """
    check_order("priced", program, plan, Program)
    return compile_program(program, plan).instructions if apart else compile_program(program, plan).like


def _by_policy(
    policy: Policy, plan: Plan, batches: int, costs: Costs, memory_limit: Limit, uses: Sequence[LayerUse] = ()
) -> Timeline:
    queues, prices = priced_by(costs, open_queues(plan, batches))
    memory = Bytes.from_costs(queues, plan, costs, memory_limit)
    ran = run_policy(policy, queues, prices, memory, uses)
    return _build_timeline(queues, prices, ran.timed, tuple(map(int, ran.held.peak)), policy.name)


def _build_timeline(
    operations: Operations, prices: Prices, timed: OperationLog, peak: tuple[int, ...], name: str = ""
) -> Timeline:
    starts, ends, turn = timed.to_lists
    rows = sorted(zip(starts, ends, operations.ranks, turn, operations.instructions, strict=True))
    made = map(tuple.__new__, repeat(Event), [(rank, i, start, end) for start, end, rank, _, i in rows])
    return Timeline(tuple(made), operations.plan, peak, name, regimes=prices.regimes)


Kinds = type[Program] | type[Policy]


def check_order(function: str, order: object, plan: object, *kinds: Kinds) -> None:
    """Raise an error if the arguments are not an order and its plan. A schedule creates programs but is not an order.

    Args:
        function: the name of the calling function.
        order: the argument to check.
        plan: the second argument to check.
        kinds: the types of orders that the function accepts; by default programs and policies.

    Raises:
        PlanError: the order is a policy, and recomputations of the plan are instructions of their own.
        TypeError: an argument has another type.
    """
    if not isinstance(order, kinds or (Program, Policy)):
        wanted = " or ".join(f"a {kind.__name__}" for kind in kinds or (Program, Policy))
        way_out = (
            f"use schedule.program(plan) for the program of {order.name!r}"
            if isinstance(order, Schedule)
            else ("use schedule.program(plan) for the program of a schedule")
        )
        raise TypeError(f"{function} takes {wanted}, got {short_repr(order)}; {way_out}")
    if not isinstance(plan, Plan):
        raise TypeError(f"the second argument of {function} must be the plan of the order, got {short_repr(plan)}")
    if isinstance(order, Policy):
        check_policy(order, plan)


SLOW_QUANTILE = 0.95
"""The share of draws that take at most the time that is reported as slow."""


@dataclass(frozen=True)
class Spread:
    """The makespans of one order for many draws of operation times.

    Attributes:
        nanoseconds: the makespans of all draws in ascending order.
        steady: the makespan in nanoseconds without scatter, with the times in the cost model.
    """

    nanoseconds: tuple[int, ...]
    steady: int

    @property
    def mean(self) -> float:
        """The mean makespan in nanoseconds. An epoch of many such steps takes this time per step."""
        return fmean(self.nanoseconds)

    def quantile(self, share: float) -> int:
        """Return the nanoseconds that a share of the draws, from 0 to 1, does not exceed."""
        check_number("share", share, "from 0 to 1", lambda x: 0 <= x <= 1)
        return self.nanoseconds[max(0, math.ceil(share * len(self.nanoseconds)) - 1)]

    def __str__(self) -> str:
        mean, slow, steady = map(seconds_text, (self.mean, self.quantile(SLOW_QUANTILE), self.steady))
        draws = f"{SLOW_QUANTILE:.0%} of {len(self.nanoseconds)} draws"
        return f"{mean} on average and at most {slow} in {draws}; {steady} without scatter"


def draw_spread(order: Program | Policy, plan: Plan, costs: CostModel, *, draws: int = 200, seed: int = 0) -> Spread:
    """Draw makespans of a finite program or a policy with operation times that vary according to `costs.scatter`.

    The time of every operation is multiplied by one of the ratios for its kind and stage, which are equally likely. The
    same seed gives the same draws.

    Args:
        order: the program or policy.
        plan: the plan that is ordered.
        costs: the durations of operations and their scatter.
        draws: the number of draws.
        seed: the seed of the random numbers.

    Raises:
        InputError: the costs have no scatter, or lack a stage.
        DeadlockError, ProgramError, TypeError: see `makespan`.
    """
    check_order("spread", order, plan)
    check_count("draws", draws)
    if not costs.scatter:
        raise InputError(
            "the cost model has no scatter to draw from. Use CostModel.from_timelines(timelines), which computes the "
            "scatter of recorded runs, or set scatter={(Kind.F, 0): (1.0, 1.0, 1.4), ...}, the factors by which the "
            "seconds are multiplied"
        )
    if isinstance(order, Program):
        fixed = compile_program(order, plan).per_operation
        prices = fixed.price_operations(costs)
        times = _draw_times(fixed.instructions, prices, costs, draws, seed)
        return Spread(tuple(sorted(ends_under(fixed, prices, times).tolist())), run(fixed, prices).makespan)
    queues = open_queues(plan, plan.batches).per_operation
    prices, memory = queues.price_operations(costs), Bytes.create_untracked(queues)
    times = _draw_times(queues.instructions, prices, costs, draws, seed)
    cases = (prices, *prices.with_times(times))
    steady, *ends = [run_policy(order, queues, case, memory).timed.makespan for case in cases]
    return Spread(tuple(sorted(ends)), steady)


def _draw_times(
    instructions: tuple[Instruction, ...], prices: Prices, costs: CostModel, draws: int, seed: int
) -> Array:
    """Return the drawn times in nanoseconds, with one row for each draw and one column for each operation."""
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
