"""Simulation of a program or a policy in virtual time, by given costs or by costs drawn from a seed.

`draw_spread` tells how much a makespan scatters where operations do. Medians are no fair picture of a pipeline: each
rank waits for the one that is slow this time, so rare slow operations cost more than their share.
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
    """When everything runs if `costs` are true: integer nanoseconds, the same on every machine.

    A rank computes one thing at a time. A link moves one message at a time in each direction, in the order in which
    they were sent; latency does not occupy it; see `cost.Link` for what else it may do. Sends and computations overlap,
    and directions do not disturb each other, unless the costs are of another `cost.Regime`. Receives take no time of
    their own.

    Args:
        order: a program, run in exactly its order and lowered first if it has no transfers yet; or a policy, asked in
            virtual time, and offered what the plan's limits allow.
        batches: batches per job; by default the plan's own for a policy that flushes, three more than are under way at
            once for an endless order. For an endless policy also what each of them uses; else they use all layers. A
            finite program has its own number.
        memory_limit: bytes of every rank, or of each. What would not fit waits.

    Raises:
        DeadlockError: ranks wait for each other, for memory, or for a policy that picks nothing; names the rank and the
            reason.
        InputError: the costs do not know some stage, or the weights alone exceed the limit; or this is neither a
            program nor a policy.
        PlanError: an endless policy can't order the plan.
        ProgramError: the program is one of another plan.
    """
    check_order("simulate", order, plan)
    if isinstance(order, Policy) and order.is_endless:
        check_stream(order, plan)
        asked = order.depth + 3 if batches is None else batches
        uses = [LayerUse.from_plan(plan)] * asked if isinstance(asked, int) else list(asked)
        plan = unroll_stream(plan, uses, order.depth)
        return _by_policy(order, plan, plan.batches, costs, memory_limit, uses)
    if not (batches is None or isinstance(batches, int)):
        raise InputError("only batches of an endless policy say which layers they use; give their number")
    if isinstance(order, Program):
        program = order.unroll(order.head_batches + 3 if batches is None else batches) if order.is_endless else order
        fixed, prices = priced_by(costs, compile_program(program, plan))
        return _timeline(fixed, prices, run(fixed, prices), rank_peaks(fixed, plan, costs, memory_limit))
    return _by_policy(order, plan, batches or plan.batches, costs, memory_limit)


def makespan(order: Program | Policy, plan: Plan, costs: Costs) -> int:
    """Nanoseconds that a finite program or a policy takes: `simulate(...).makespan` without its timeline, for searches.

    Keep the objects: what depends on order and plan is set up once for each pair, and the costs used last are
    remembered. Where numba is installed and much is simulated, machine code does the rest; see `sim.loops.jit`. Who
    goes round many orders keeps a `CompiledSimulation` of each.

    Raises:
        DeadlockError: ranks wait for each other, or for a policy that picks nothing.
        InputError: the costs do not know some stage; or this is neither a program nor a policy.
        ProgramError: the program is one of another plan.
    """
    return CompiledSimulation(order, plan).makespan(costs)


class CompiledSimulation:
    """A finite program or a policy, set up to be simulated again and again under other costs.

    Raises:
        ProgramError: the program is one of another plan.
        DeadlockError: ranks wait for each other.
        InputError: this is neither a program nor a policy.
    """

    def __init__(self, order: Program | Policy, plan: Plan) -> None:
        check_order("makespan", order, plan)
        self._policy = None if isinstance(order, Program) else order
        self._fixed = compile_program(order, plan) if isinstance(order, Program) else None
        self._open = open_queues(plan, plan.batches) if self._fixed is None else None

    def makespan(self, costs: Costs) -> int:
        """See the function of this name."""
        if self._fixed is not None:
            return run(*priced_by(costs, self._fixed)).makespan
        assert self._open is not None
        assert self._policy is not None
        queues, prices = priced_by(costs, self._open)
        return run_policy(self._policy, queues, prices, Bytes.untracked(queues)).timed.makespan


def makespans(program: Program, plan: Plan, costs: Costs, times: Array, *, apart: bool = False) -> Array:
    """Nanoseconds that the finite `program` takes under each of many costs, in one go.

    Args:
        costs: what holds for all of them: overhead, and links except for the time that messages take.
        times: integer nanoseconds, a row for each case; a column for each of `cost_representatives(program, plan)`.
        apart: whether there is a column for each operation.

    Raises:
        DeadlockError: ranks wait for each other.
        InputError: the costs do not know some stage, or times of another shape or type.
        ProgramError: the program is one of another plan.
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
    """Return one instruction for each group of equal kind, stage, job, batch and rows, which cost the same.

    With `apart` it returns all of them, as operations of one size may differ too.
    """
    check_order("priced", program, plan, Program)
    return compile_program(program, plan).instructions if apart else compile_program(program, plan).like


def _by_policy(
    policy: Policy, plan: Plan, batches: int, costs: Costs, memory_limit: Limit, uses: Sequence[LayerUse] = ()
) -> Timeline:
    queues, prices = priced_by(costs, open_queues(plan, batches))
    memory = Bytes.from_costs(queues, plan, costs, memory_limit)
    ran = run_policy(policy, queues, prices, memory, uses)
    return _timeline(queues, prices, ran.timed, tuple(map(int, ran.held.peak)), policy.name)


def _timeline(
    operations: Operations, prices: Prices, timed: OperationLog, peak: tuple[int, ...], name: str = ""
) -> Timeline:
    starts, ends, turn = timed.to_lists
    rows = sorted(zip(starts, ends, operations.ranks, turn, operations.instructions, strict=True))
    made = map(tuple.__new__, repeat(Event), [(rank, i, start, end) for start, end, rank, _, i in rows])
    return Timeline(tuple(made), operations.plan, peak, name, regimes=prices.regimes)


Kinds = type[Program] | type[Policy]


def check_order(function: str, order: object, plan: object, *kinds: Kinds) -> None:
    """Refuse arguments that are no order or no plan; a schedule makes programs and is no order.

    Args:
        function: the function that was called.
        kinds: what it takes; by default programs and policies.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(order, kinds or (Program, Policy)):
        wanted = " or ".join(f"a {kind.__name__}" for kind in kinds or (Program, Policy))
        way_out = (
            f"the one of {order.name!r} is schedule.program(plan)"
            if isinstance(order, Schedule)
            else ("a schedule's program is schedule.program(plan)")
        )
        raise TypeError(f"{function} takes {wanted}, got {short_repr(order)}; {way_out}")
    if not isinstance(plan, Plan):
        raise TypeError(f"{function} needs the Plan that was ordered as second, got {short_repr(plan)}")


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
