"""One iteration of an array of jobs: what each block takes, and what an order of the blocks gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import Costs
from lightning_pipes.ir import STEP, B, DeadlockError, F, InputError, Instruction, Kind, Plan, Span
from lightning_pipes.sim.loops.jit import Kernel
from lightning_pipes.strategies.jap.solvers.kernel import SOLVERS
from lightning_pipes.strategies.jap.solvers.tables import Blocks, Path, Sequence, Sweep

Array = npt.NDArray[np.int64]

_TIMES = ("forward", "backward", "recompute", "update", "switch", "transfer", "transfer_back")


def _nothing() -> Array:
    return np.zeros((0, 0), np.int64)


@dataclass(frozen=True, eq=False)
class ArrayProblem:
    """Jobs that share a pipeline, one mini-batch each: F on all stages, then B back to stage 0 (ArrayPipe, S IV-A).

    All times are integer nanoseconds in arrays of shape (jobs, stages); what is left out is 0.

    - A stage runs one block at a time: F takes it for forward + switch, B for recompute + backward + update + switch.
      The switch is that to the next job: there is none after an F that its own B follows on the stage. The paper
      charges it after every block; where states are prefetched it is 0.
    - The next block of a job may start forward + transfer after an F started, and recompute + backward + transfer_back
      after a B: update and switch do not hold up the job. The last stage's B follows its F on the same device.
    - With `early_recompute` a B may begin with its recomputation before the gradient arrives, at the earliest when the
      B before it begins. The paper's formulas are read as without.
    - The iteration ends with the last block of stage 0 (E3 to E9, read so that F and B exclude each other too).

    Blocks are numbered stage by stage: F of job j on stage s is 2 J s + j, its B is J more.

    Raises:
        InputError: no jobs or stages, shapes that differ, a negative time, or a block that takes no time.
    """

    forward: Array
    backward: Array
    recompute: Array = field(default_factory=_nothing)
    update: Array = field(default_factory=_nothing)
    switch: Array = field(default_factory=_nothing)
    transfer: Array = field(default_factory=_nothing)
    transfer_back: Array = field(default_factory=_nothing)
    early_recompute: bool = False

    def __post_init__(self) -> None:
        shape = np.shape(self.forward)
        if len(shape) != 2 or 0 in shape:
            raise InputError(f"an array needs times of shape (jobs, stages), at least one of each; got {shape}")
        for name in _TIMES:
            given = np.asarray(getattr(self, name))
            times = np.zeros(shape, np.int64) if given.size == 0 else given
            if times.shape != shape or not np.issubdtype(times.dtype, np.integer) or times.min() < 0:
                raise InputError(
                    f"{name} needs whole nanoseconds >= 0 of shape {shape}, got {times.dtype} {times.shape}"
                )
            object.__setattr__(self, name, np.ascontiguousarray(times, np.int64))
        if min(self.forward.min(), self.backward.min()) < 1:
            raise InputError("every forward and backward needs at least a nanosecond")

    @property
    def jobs(self) -> int:
        """The number of jobs."""
        return int(self.forward.shape[0])

    @property
    def stages(self) -> int:
        """The number of stages."""
        return int(self.forward.shape[1])

    @property
    def blocks(self) -> int:
        """The number of blocks: a forward and a backward of each job on each stage."""
        return 2 * self.jobs * self.stages

    @cached_property
    def occupied_times(self) -> tuple[Array, Array]:
        """Nanoseconds for which each F and each B takes its stage, in shape (jobs, stages)."""
        return self.forward + self.switch, self.recompute + self.backward + self.update + self.switch

    @cached_property
    def stage_lags(self) -> tuple[Array, Array]:
        """Nanoseconds from the start of each F and each B to the earliest start of the job's next block.

        The B of stage 0 has no next block; its entry is what it takes.
        """
        there, back = self.forward + self.transfer, self.recompute + self.backward + self.transfer_back
        if self.early_recompute:
            back[:, 1:] = np.maximum(back[:, 1:] - self.recompute[:, :-1], 0)
        there[:, -1] = self.forward[:, -1]
        back[:, 0] = self.occupied_times[1][:, 0]
        return there, back

    @cached_property
    def busy_times(self) -> Array:
        """`occupied_times` by block number."""
        return self.by_block(*self.occupied_times)

    @cached_property
    def saved_times(self) -> Array:
        """Nanoseconds of `busy_times` that are saved where the job's own B follows on the stage, by block number."""
        return self.by_block(self.switch, np.zeros_like(self.switch))

    @cached_property
    def block_lags(self) -> Array:
        """`stage_lags` by block number."""
        return self.by_block(*self.stage_lags)

    @cached_property
    def earliest_starts(self) -> Array:
        """Earliest start of each block by number, with its job alone."""
        there, back = self.stage_lags
        head = np.cumsum(there, 1) - there
        return self.by_block(head, there.sum(1)[:, None] + back.sum(1)[:, None] - np.cumsum(back, 1))

    @cached_property
    def least_rests(self) -> Array:
        """Least time from the start of each block to the end of its job, by number."""
        there, back = self.stage_lags
        tail = back.sum(1)[:, None] + there[:, ::-1].cumsum(1)[:, ::-1]
        return self.by_block(tail, np.cumsum(back, 1))

    @cached_property
    def equal_jobs(self) -> Array:
        """First job with equal times, by job: such jobs may be exchanged."""
        _, first, which = np.unique(
            np.concatenate([*self.occupied_times, *self.stage_lags, self.switch], axis=1),
            axis=0,
            return_index=True,
            return_inverse=True,
        )
        return np.asarray(first[which.reshape(-1)], np.int64)

    def read(self, kernel: Kernel) -> Blocks:
        """Return the blocks as the kernel takes them; it does not write to them."""
        tables = self.busy_times, self.block_lags, self.least_rests, self.saved_times
        return Blocks(self.jobs, self.blocks, *map(kernel.copy, tables))

    def by_block(self, forward: Array, backward: Array) -> Array:
        """Return two arrays of shape (jobs, stages) in one, by block number."""
        return np.ascontiguousarray(np.stack([forward.T, backward.T], axis=1).reshape(-1), np.int64)

    def select_jobs(self, jobs: Array | list[int]) -> ArrayProblem:
        """Return the same for some of the jobs only."""
        return replace(self, **{name: getattr(self, name)[jobs] for name in _TIMES})

    def block_starts(self, order: Array) -> Array:
        """Return when each block starts, by its number, if every stage runs its blocks in `order` as early as it can.

        Args:
            order: block numbers of shape (stages, 2 jobs), as `order_of` gives them.

        Raises:
            DeadlockError: stages wait for each other.
            InputError: not every block stands once on its own stage.
        """
        numbers = np.arange(self.blocks).reshape(self.stages, -1)
        if np.shape(order) != numbers.shape or (np.sort(order, axis=1) != numbers).any():
            raise InputError(f"an order needs each of the blocks {numbers.tolist()} once on its stage; got {order}")
        found = time_order(self, np.asarray(order), SOLVERS.python)
        if found is None:
            raise DeadlockError("the stages wait for each other: some job's block stands before what it needs")
        return found

    def makespan(self, starts: Array) -> int:
        """Return nanoseconds until the last block of stage 0 has ended."""
        return int((starts + self.busy_times).reshape(self.stages, 2, self.jobs)[0, 1].max())

    def order_of(self, starts: Array) -> Array:
        """Return the order in which each stage runs its blocks, of shape (stages, 2 jobs)."""
        table = np.asarray(starts).reshape(self.stages, -1)
        return np.argsort(table, axis=1, kind="stable") + np.arange(self.stages)[:, None] * 2 * self.jobs

    def check(self, starts: Array) -> None:
        """Refuse starts that break a constraint of the paper.

        Raises:
            InputError: names the block and what it collides with.
        """
        forward, backward = starts.reshape(self.stages, 2, self.jobs).transpose(1, 2, 0)
        there, back = self.stage_lags
        chain = np.concatenate([forward, backward[:, ::-1]], axis=1)
        lags = np.concatenate([there, back[:, ::-1]], axis=1)
        early = np.argwhere(chain[:, 1:] < (chain + lags)[:, :-1])
        if early.size or starts.min() < 0:
            raise InputError(f"(job, step) {early.tolist()} start before the step before has arrived")
        ends = (starts + self.busy_times).reshape(self.stages, -1)
        table = starts.reshape(self.stages, -1)
        saved = self.saved_times.reshape(self.stages, -1)
        for stage, row in enumerate(np.argsort(table, axis=1, kind="stable")):
            own = row[1:] == row[:-1] + self.jobs
            if (table[stage, row][1:] < ends[stage, row][:-1] - own * saved[stage, row][:-1]).any():
                raise InputError(f"stage {stage} runs two blocks at once")


def problem_from_plan(plan: Plan, costs: Costs, switch: float = 0.0) -> ArrayProblem:
    """One mini-batch of each job of `plan`, whole, one stage a rank, as `costs` has it.

    A stage that recomputes does so in its backward. The overhead of a computation is part of its block. Messages do not
    wait for each other.

    Args:
        switch: seconds that the change to another job takes a stage.
    """
    jobs, stages = range(len(plan.jobs)), range(plan.n_stages)
    whole = [Span(0, cut.rows) for cut in plan.jobs]

    def stage_table(time: Callable[[int, int], int]) -> Array:
        return np.array([[time(j, s) for s in stages] for j in jobs], np.int64)

    def transfer_time(kind: Kind, j: int, s: int) -> int:
        return sum(costs.transfer_ns(Instruction(kind, s, j, 0, whole[j]), plan))

    return ArrayProblem(
        costs.overhead_ns + stage_table(lambda j, s: costs.duration_ns(F(s, whole[j], j), plan)),
        costs.overhead_ns + stage_table(lambda j, s: costs.duration_ns(B(s, whole[j], j), plan)),
        update=stage_table(lambda j, s: costs.duration_ns(STEP(s, j), plan)),
        switch=np.full((len(jobs), len(stages)), round(switch * 1e9), np.int64),
        transfer=stage_table(lambda j, s: transfer_time(Kind.SF, j, s) if s + 1 < len(stages) else 0),
        transfer_back=stage_table(lambda j, s: transfer_time(Kind.SB, j, s) if s else 0),
    )


def time_order(problem: ArrayProblem, order: Array, kernel: Kernel) -> Array | None:
    """`ArrayProblem.block_starts` without its checks; None where stages wait for each other."""
    n = problem.blocks
    sequence = Sequence(kernel.copy(order.reshape(-1)), kernel.copy(np.argsort(order.reshape(-1))))
    path = Path(kernel.fill(n), kernel.fill(n))
    span = kernel.run.time_sequence(problem.read(kernel), sequence, path, Sweep(kernel.fill(n), kernel.fill(n)))
    return None if span < 0 else np.array(path.starts, np.int64)


@dataclass(frozen=True, eq=False)
class ArraySolution:
    """An order of an array's blocks.

    Attributes:
        starts: nanoseconds by block number.
        makespan: nanoseconds of the iteration.
        bound: nanoseconds that no order can beat.
        method: what found it.
        tried: how many orders were timed, or nodes expanded.
    """

    problem: ArrayProblem
    starts: Array
    makespan: int
    bound: int
    method: str
    tried: int = 1

    @property
    def gap(self) -> float:
        """How much longer it may be than the best: 0.02 is 2 %, and 0 means that nothing is better."""
        return self.makespan / self.bound - 1

    @property
    def order(self) -> Array:
        """Block numbers in the order in which each stage runs them, of shape (stages, 2 jobs)."""
        return self.problem.order_of(self.starts)
