"""The problem of one iteration of an array of jobs: the times of its blocks, and the schedule that an order of them
gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import Costs
from lightning_pipes.ir import STEP, B, F, InputError, Instruction, Kind, Plan, Span
from lightning_pipes.sim.loops.jit import Kernel
from lightning_pipes.strategies.jap.solvers.tables import Blocks, Path, Sequence, Sweep

Array = npt.NDArray[np.int64]

BLOCK_TIMES = ("forward", "backward", "recompute", "update", "switch", "transfer", "transfer_back")


def _nothing() -> Array:
    return np.zeros((0, 0), np.int64)


@dataclass(frozen=True, eq=False)
class ArrayProblem:
    """Jobs that share a pipeline, with one mini-batch each: F on all stages, then B back to stage 0 (ArrayPipe, S
    IV-A).

    All times are integer nanoseconds in arrays of shape (jobs, stages). Times that are not given are 0.

    - A stage runs one block at a time. F occupies the stage for forward + switch, and B for recompute + backward +
      update + switch. The switch is the change to the next job. After an F that is directly followed on the stage by
      its own B, there is no switch, although the paper charges it after every block. If states are prefetched, the
      switch is 0.
    - The next block of a job may start forward + transfer after the start of an F, and recompute + backward +
      transfer_back after the start of a B. The update and the switch do not delay the job. On the last stage, there is
      no transfer between F and B, because both run on the same device.
    - With `early_recompute`, a B may begin its recomputation before its gradient arrives, but not before the job's
      previous B begins. The formulas of the paper are implemented as without this option.
    - The iteration ends with the last block of stage 0 (E3 to E9, with the additional constraint that F and B of a
      stage exclude each other).

    Blocks are numbered stage by stage. With J jobs, F of job j on stage s has the number 2 J s + j, and its B has the
    number 2 J s + J + j.

    Attributes:
        forward, backward: the durations of F and B.
        recompute: the duration of the recomputation before a B.
        update: the duration of the optimizer step after a B.
        switch: the duration of a change to another job.
        transfer, transfer_back: the durations of the messages to the next stage and to the previous stage.
        early_recompute: whether a recomputation may start before the gradient arrives.

    Raises:
        InputError: there are no jobs or no stages, shapes differ, a time is negative or not an integer, or a forward or
            backward takes no time.
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
        for name in BLOCK_TIMES:
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
        """Nanoseconds for which each F and each B occupies its stage, two arrays of shape (jobs, stages)."""
        return self.forward + self.switch, self.recompute + self.backward + self.update + self.switch

    @cached_property
    def stage_lags(self) -> tuple[Array, Array]:
        """Nanoseconds from the start of each F and each B to the earliest start of the job's next block.

        Both arrays have the shape (jobs, stages). The B of stage 0 has no next block, so its entry is the time for
        which it occupies the stage.
        """
        there, back = self.forward + self.transfer, self.recompute + self.backward + self.transfer_back
        if self.early_recompute:
            back[:, 1:] = np.maximum(back[:, 1:] - self.recompute[:, :-1], 0)
        there[:, -1] = self.forward[:, -1]
        back[:, 0] = self.occupied_times[1][:, 0]
        return there, back

    @cached_property
    def busy_times(self) -> Array:
        """The entries of `occupied_times` by block number."""
        return self.by_block(*self.occupied_times)

    @cached_property
    def saved_times(self) -> Array:
        """Nanoseconds by which `busy_times` is shorter if the job's own B follows on the stage, by block number."""
        return self.by_block(self.switch, np.zeros_like(self.switch))

    @cached_property
    def block_lags(self) -> Array:
        """The entries of `stage_lags` by block number."""
        return self.by_block(*self.stage_lags)

    @cached_property
    def earliest_starts(self) -> Array:
        """The earliest start of each block if its job runs alone, in nanoseconds, by block number."""
        there, back = self.stage_lags
        head = np.cumsum(there, 1) - there
        return self.by_block(head, there.sum(1)[:, None] + back.sum(1)[:, None] - np.cumsum(back, 1))

    @cached_property
    def least_rests(self) -> Array:
        """The shortest time from the start of each block to the end of its job, in nanoseconds, by block number."""
        there, back = self.stage_lags
        tail = back.sum(1)[:, None] + there[:, ::-1].cumsum(1)[:, ::-1]
        return self.by_block(tail, np.cumsum(back, 1))

    @cached_property
    def equal_jobs(self) -> Array:
        """The first job with the same times, by job. Jobs with equal times are interchangeable."""
        _, first, which = np.unique(
            np.concatenate([*self.occupied_times, *self.stage_lags, self.switch], axis=1),
            axis=0,
            return_index=True,
            return_inverse=True,
        )
        return np.asarray(first[which.reshape(-1)], np.int64)

    def read(self, kernel: Kernel) -> Blocks:
        """Return the blocks in the format of `kernel`, which does not write to them."""
        tables = self.busy_times, self.block_lags, self.least_rests, self.saved_times
        return Blocks(self.jobs, self.blocks, *map(kernel.copy, tables))

    def by_block(self, forward: Array, backward: Array) -> Array:
        """Return the entries of two arrays of shape (jobs, stages) in one flat array by block number."""
        return np.ascontiguousarray(np.stack([forward.T, backward.T], axis=1).reshape(-1), np.int64)

    def makespan(self, starts: Array) -> int:
        """Return the nanoseconds until the last block of stage 0 ends, for blocks with these starts."""
        return int((starts + self.busy_times).reshape(self.stages, 2, self.jobs)[0, 1].max())

    def order_of(self, starts: Array) -> Array:
        """Return the order in which each stage runs its blocks, as block numbers of shape (stages, 2 jobs)."""
        table = np.asarray(starts).reshape(self.stages, -1)
        return np.argsort(table, axis=1, kind="stable") + np.arange(self.stages)[:, None] * 2 * self.jobs

    def check(self, starts: Array) -> None:
        """Raise an error if the starts violate a constraint of the problem.

        Args:
            starts: nanoseconds by block number.

        Raises:
            InputError: a block starts before time 0 or before the previous block of its job has arrived, or a stage
                runs two blocks at the same time. The message names the jobs and their steps, or the stage.
        """
        forward, backward = starts.reshape(self.stages, 2, self.jobs).transpose(1, 2, 0)
        there, back = self.stage_lags
        chain = np.concatenate([forward, backward[:, ::-1]], axis=1)
        lags = np.concatenate([there, back[:, ::-1]], axis=1)
        early = np.argwhere(chain[:, 1:] < (chain + lags)[:, :-1])
        if early.size or starts.min() < 0:
            raise InputError(f"(job, step) {early.tolist()} start before the previous step has arrived")
        ends = (starts + self.busy_times).reshape(self.stages, -1)
        table = starts.reshape(self.stages, -1)
        saved = self.saved_times.reshape(self.stages, -1)
        for stage, row in enumerate(np.argsort(table, axis=1, kind="stable")):
            own = row[1:] == row[:-1] + self.jobs
            if (table[stage, row][1:] < ends[stage, row][:-1] - own * saved[stage, row][:-1]).any():
                raise InputError(f"stage {stage} runs two blocks at once")


def problem_from_plan(plan: Plan, costs: Costs, switch: float = 0.0) -> ArrayProblem:
    """Return the problem of one mini-batch of each job of `plan`, with the durations that `costs` specifies.

    Each mini-batch is a single micro-batch, and each rank has one stage. The backward of a stage that recomputes
    includes the recomputation, and every block includes the overhead of a computation. Messages do not wait for each
    other.

    Args:
        plan: the plan of the jobs.
        costs: the costs of its stages and links.
        switch: the seconds that a stage needs to change to another job.
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
    """Return the start of each block, in nanoseconds, if every stage runs its blocks in `order` as early as possible.

    Args:
        problem: the array.
        order: block numbers of shape (stages, 2 jobs), as returned by `ArrayProblem.order_of`.
        kernel: the loops that compute the times.

    Returns:
        The starts by block number, or None if stages wait for each other.
    """
    n = problem.blocks
    sequence = Sequence(kernel.copy(order.reshape(-1)), kernel.copy(np.argsort(order.reshape(-1))))
    path = Path(kernel.fill(n), kernel.fill(n))
    span = kernel.run.time_sequence(problem.read(kernel), sequence, path, Sweep(kernel.fill(n), kernel.fill(n)))
    return None if span < 0 else np.array(path.starts, np.int64)


@dataclass(frozen=True, eq=False)
class ArraySolution:
    """An order of the blocks of an array.

    Attributes:
        problem: the problem that was solved.
        starts: the start of each block in nanoseconds, by block number.
        makespan: the duration of the iteration in nanoseconds.
        bound: a lower bound of the makespan of any order, in nanoseconds.
        method: the name of the solver that found the order.
        tried: the number of orders that were timed, or of nodes that were expanded.
    """

    problem: ArrayProblem
    starts: Array
    makespan: int
    bound: int
    method: str
    tried: int = 1

    @property
    def gap(self) -> float:
        """The relative gap between the makespan and the bound: 0.02 is 2 %, and 0 means that the order is optimal."""
        return self.makespan / self.bound - 1

    @property
    def order(self) -> Array:
        """The block numbers in the order in which each stage runs them, of shape (stages, 2 jobs)."""
        return self.problem.order_of(self.starts)
