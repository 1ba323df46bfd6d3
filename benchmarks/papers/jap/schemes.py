"""An epoch of the 64 jobs of ArrayPipe's paper under every scheme that it compares, simulated.

What a scheme may choose, as micro-batches, it chooses as it is fastest within the devices' memory. All times are
nanoseconds, all sizes bytes. A job that recomputes keeps the input of each stage from forward to backward, and runs the
stage again then; its gradients live while the last backward of a batch runs, unless the batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import heappop, heappush
from math import inf

import numpy as np

from benchmarks.papers.jap.jobs import KINDS, Footprint, array_size, batch_sizes, switching
from benchmarks.papers.jap.single import OneJob, Spent, bpipe, spent_in
from lightning_pipes.cost import Cluster, CostModel, Link
from lightning_pipes.cost import Costs as AllCosts
from lightning_pipes.cost.layer import Table, at_rows, sum_tables
from lightning_pipes.cost.zoo import named_profile
from lightning_pipes.ir import STEP, B, Cut, F, Instruction, Kind, Plan, Program, Schedule, Span, even_spans
from lightning_pipes.ir.program import Rows
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import makespan
from lightning_pipes.sim.residency import Residency, VirtualCopier
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.hanayo import Hanayo
from lightning_pipes.strategies.jap import ArrayProblem, Effort, Job, problem_from_plan, solve_array, stream_jobs
from lightning_pipes.strategies.jap.problem import Array

# ---- An order of blocks, run in virtual time where the states of jobs take turns on the devices.

AHEAD = 64
"""Blocks whose states a device knows to come."""


def replayed(
    rows: Rows,
    plan: Plan,
    costs: AllCosts,
    states: Sequence[int],
    budgets: Sequence[int],
    hosts: Sequence[Sequence[int]],
    bandwidth: float,
) -> tuple[int, int]:
    """Nanoseconds until all has run, and nanoseconds that stages waited for states, all together.

    The order of each stage stays. A block begins when its data is there, and waits for its state then; while it runs,
    the states of those that come are loaded as far as there is room. Messages do not wait for each other.

    Args:
        rows: computations of each stage, of one-stage ranks.
        states: bytes of every job's state, by stage.
        budgets: bytes for states, by stage.
        hosts: the stages of each server, which share `bandwidth` bytes per second in each direction.
    """
    devices: dict[int, Residency[int]] = {}
    links: dict[int, VirtualCopier] = {}
    for host in hosts:
        link = VirtualCopier(bandwidth)
        for s in host:
            links[s] = link
            devices[s] = Residency(budgets[s], dict.fromkeys(range(len(plan.jobs)), states[s]), link)
    blocks = [[i for i in row if i.kind is not Kind.STEP] for row in rows]
    last = {job: cut.forward[0][-1] for job, cut in enumerate(plan.jobs)}
    for s, row in enumerate(blocks):
        devices[s].expect_leases(i.job for i in row[:AHEAD])
    at, free = [0] * len(rows), [0] * len(rows)
    offered = [False] * len(rows)
    arrived: dict[Instruction, int] = {}
    updated: dict[tuple[int, int], int] = {}  # of stage 0, by job and batch
    heap: list[tuple[int, int]] = []
    waited = end = 0

    def offer(s: int) -> None:
        if offered[s] or at[s] == len(blocks[s]):
            return
        i = blocks[s][at[s]]
        first = i.kind is Kind.F and s == 0
        there = (updated.get((i.job, i.batch - 1)) if i.batch else 0) if first else arrived.pop(i, None)
        if there is not None:
            offered[s] = True
            heappush(heap, (max(there, free[s]), s))

    for s in range(len(rows)):
        offer(s)
    while heap:
        now, s = heappop(heap)
        i = blocks[s][at[s]]
        link, device = links[s], devices[s]
        link.now = now
        stall = device.lease(i.job, write=i.kind is Kind.B)
        waited += stall
        if at[s] + AHEAD < len(blocks[s]):
            device.expect_leases([blocks[s][at[s] + AHEAD].job])
        link.now = now
        device.prefetch()
        done = now + stall + costs.duration_ns(i, plan) + costs.overhead_ns
        free[s] = done
        if i.kind is Kind.B and i.span == last[i.job]:
            free[s] += costs.duration_ns(Instruction(Kind.STEP, s, i.job, i.batch), plan)
            if s == 0:
                updated[i.job, i.batch] = free[s]
        device.release(i.job)
        end = max(end, free[s])
        step = 1 if i.kind is Kind.F else -1
        if 0 <= s + step < len(rows):
            send = i._replace(kind=Kind.SF if step > 0 else Kind.SB)
            arrived[i._replace(stage=s + step)] = done + sum(costs.transfer_ns(send, plan))
        elif step > 0:
            arrived[i._replace(kind=Kind.B)] = done
        at[s] += 1
        offered[s] = False
        for each in {s, max(0, s + step), 0}:
            if each < len(rows):
                offer(each)
    return end, waited


JOBS = 64
ITERATIONS = 240
"""Of the smallest batch size in an epoch; the others have as many samples."""
PARTS = (1, 2, 4, 8)
"""In how many parts a stage may run a batch that is too large for it, one after another in one block."""
MODELS = {"VGG-19": "vision", "ResNet-152": "vision", "BERT-large": "language", "GPT-2-1.5B": "language"}
OPTIMIZER = {"vision": "momentum", "language": "adam"}
Costs = Callable[[tuple[int, ...]], CostModel]
"""By the rank of each stage."""


@dataclass(frozen=True)
class Hardware:
    """The A100s that the paper simulates.

    Attributes:
        stages: one a GPU; every server has equally many.
        memory: of a GPU.
        inside: bytes per second between GPUs of a server: NVLink, or 64e9 for PCIe.
        between: bytes per second between servers.
        host: bytes per second from a server's memory to all its GPUs together.
    """

    stages: int = 8
    servers: int = 1
    memory: float = 80 * 2**30
    inside: float = 300e9
    between: float = 50e9
    host: float = 64e9

    @property
    def hosts(self) -> list[list[int]]:
        """The stages of each server."""
        each = self.stages // self.servers
        return [list(range(first, first + each)) for first in range(0, self.stages, each)]

    @property
    def cluster(self) -> Cluster:
        """Its devices and links."""
        each = self.stages // self.servers
        return Cluster.from_counts(self.servers, each, inside=Link(self.inside), between=Link(self.between))


UNLIMITED = Hardware(memory=inf)


@dataclass(frozen=True)
class Mode:
    """How the blocks of an array's jobs run.

    Attributes:
        recompute: whether stages keep their input only.
        parts: of a batch, which run one after another in one block.
    """

    recompute: bool = False
    parts: int = 1


ARRAYED: dict[str, tuple[Schedule, ...]] = {
    "ArGPipe": (GPipe(),),
    "ArBPipe": (),
    "ArHanayo": (Hanayo(waves=2), Hanayo(waves=1)),
}
"""Batches of siblings in the place of micro-batches."""


class Epoch:
    """An epoch of the grid's jobs.

    Args:
        kind: "vision" or "language", which says what the batch sizes are.
        most_stages: as many as the model can be cut into.
        orders: of a round, that a solver may try.
    """

    def __init__(
        self,
        costs: Costs,
        kind: str,
        hardware: Hardware = UNLIMITED,
        most_stages: int = 1 << 30,
        iterations: int = ITERATIONS,
        jobs: int = JOBS,
        orders: int = 6_000,
    ) -> None:
        self.orders = orders
        self.costs, self.hardware, self.most_stages = costs, hardware, most_stages
        self.stages = hardware.stages
        self.sizes = batch_sizes(jobs, kind).tolist()
        self.kinds = KINDS[kind][2]
        self.iterations = {rows: iterations * min(self.kinds) // rows for rows in self.kinds}
        self.line = costs(tuple(range(self.stages)))
        self._rounds: dict[object, tuple[int, int]] = {}

    # Jobs one after another -----------------------------------------------------------------------------------------

    def one_by_one(self, how: OneJob) -> Spent | None:
        """With the best setting for each batch size; None where some batch fits with no setting."""
        found = []
        for rows in self.kinds:
            best = min(how.steps(self, rows), key=lambda spent: spent.time, default=None)
            if best is None:
                return None
            found.append((best, self.iterations[rows] * self.sizes.count(rows)))
        return _sum(found)

    def vanilla(self) -> Spent | None:
        """Whole batches walk through the stages."""
        for mode in (Mode(recompute, parts) for parts in PARTS for recompute in (False, True)):
            if self.array_size(mode, gradients=True):
                break
        else:
            return None
        costs, found = self.blocks(mode), []
        for rows in self.kinds:
            plan = even_plan(GPipe(), self.stages, 1, rows)
            time = makespan(GPipe().program(plan), plan, costs)
            found.append((self._batch(rows, mode, time), self.iterations[rows] * self.sizes.count(rows)))
        return _sum(found)

    def to_partner(self, size: Array) -> Array:
        """Nanoseconds that bytes, by number and stage, take to the stage that counts as far from the other end."""
        hosts = self.hardware.hosts
        of = [next(n for n, host in enumerate(hosts) if s in host) for s in range(self.stages)]
        rate = [self.hardware.inside if of[s] == of[-1 - s] else self.hardware.between for s in range(self.stages)]
        return np.asarray(np.round(1e9 * size / np.array(rate)), np.int64)

    # Blocks and memory ----------------------------------------------------------------------------------------------

    def blocks(self, mode: Mode, where: tuple[int, ...] = (), extra: Sequence[float] = ()) -> CostModel:
        """What blocks cost in this mode, by default one stage a rank.

        Args:
            extra: seconds more for each block, by rank.
        """
        costs = self.costs(where) if where else self.line
        where = where or tuple(range(self.stages))
        tables: dict[tuple[Kind, int], Table] = {}
        for s, rank in enumerate(where):
            forward, backward = costs.seconds[Kind.F, s], costs.seconds[Kind.B, s]
            if mode.recompute:
                backward = sum_tables((forward, backward))
            for kind, table in ((Kind.F, forward), (Kind.B, backward)):
                tables[kind, s] = _in_parts(table, mode.parts, self.kinds) if mode.parts > 1 else table
                if extra:
                    tables[kind, s] = tuple((rows, time + extra[rank]) for rows, time in tables[kind, s])
        return replace(costs, seconds={**costs.seconds, **tables})

    def footprints(self, mode: Mode, gradients: bool = False) -> list[Footprint]:
        """Of a job with the largest batches, by stage.

        Args:
            gradients: whether they stay, as with those of a batch that is cut.
        """
        costs, rows = self.line, max(self.kinds)
        if not costs.activation_bytes:
            return [Footprint(0, 0)] * self.stages
        part = -(-rows // mode.parts)
        found = []
        for s in range(self.stages):
            gradient = costs.weight_bytes[s]  # float32, but for buffers
            state = costs.weight_bytes[s] + costs.state_bytes[s] - (0 if gradients else gradient)
            working = int(costs.working_bytes[s] * part) + (0 if gradients else gradient)
            if mode.recompute:
                kept = int(costs.forward_bytes[s - 1] * rows) if s else 0
                working += costs.activation_bytes[s] * part
            else:
                kept = costs.activation_bytes[s] * rows
            found.append(Footprint(state, kept, working))
        return found

    def array_size(self, mode: Mode, gradients: bool = False, swapped: bool = False) -> int:
        """The most siblings that fit; with `swapped` states lie on the host, which has room for all."""
        if self.hardware.memory == inf:
            return len(self.sizes)
        host = 1 << 62 if swapped else None
        return min(len(self.sizes), array_size(self.footprints(mode, gradients), int(self.hardware.memory), host))

    def visible(self, mode: Mode, hidden: bool = True) -> list[float]:
        """Seconds of each switch that nothing hides, by stage, where all states of a server change places (E2); without
        `hidden` all of it."""
        plan = Plan(tuple(range(self.stages)), tuple(Cut.even(rows, 1, self.stages) for rows in self.kinds))
        states = [[each.state for each in self.footprints(mode)]] * len(self.kinds)
        found = [0.0] * self.stages
        for each in switching(plan, self.blocks(mode), states, self.hardware.hosts, self.hardware.host):
            for s in each.stages:
                found[s] = each.visible_seconds if hidden else each.transfer
        return found

    @property
    def work(self) -> int:
        """What the stage with most work computes in an epoch."""
        runs = np.array([self.iterations[rows] * self.sizes.count(rows) for rows in self.kinds])
        return int((runs[:, None] * sum(self.problem(Mode()).occupied_times)).sum(0).max())

    @property
    def _work(self) -> Array:
        """What a batch of each size takes all stages."""
        return np.asarray(sum(self.problem(Mode()).occupied_times).sum(1))  # type: ignore[union-attr]

    def problem(self, mode: Mode, switch: Sequence[float] = ()) -> ArrayProblem:
        """A batch of each size; `switch` has seconds by stage."""
        cuts = tuple(Cut.even(rows, 1, self.stages) for rows in self.kinds)
        problem = problem_from_plan(Plan(tuple(range(self.stages)), cuts), self.blocks(mode))
        ns = np.round(1e9 * np.array(switch or [0.0] * self.stages)).astype(np.int64)
        return replace(problem, switch=np.tile(ns, (len(self.kinds), 1)))

    # Arrays ---------------------------------------------------------------------------------------------------------

    def in_rounds(
        self,
        resident: int,
        method: str = "search",
        mode: Mode = Mode(),
        switch: Sequence[float] = (),
        grouped: bool = False,
    ) -> Spent:
        """The paper's scheme: arrays one after another, in each of them an iteration of all jobs that are left.

        Args:
            method: how a round is ordered: a solver, or one of `ARRAYED`.
            switch: seconds that the change to another job takes, by stage. `ARRAYED` takes them after every block.
            grouped: whether jobs of equal batch size are put together.
        """
        order = sorted(self.sizes) if grouped else np.random.default_rng(0).permutation(self.sizes).tolist()
        total = switches = 0
        for first in range(0, len(order), resident):
            left = sorted(order[first : first + resident])
            done = 0
            while left:
                steps = min(self.iterations[rows] for rows in left) - done
                time, switched = self._round(tuple(left), method, mode, tuple(switch))
                total, switches = total + steps * time, switches + steps * switched
                done += steps
                left = [rows for rows in left if self.iterations[rows] > done]
        return replace(self._all(mode, total), switching=switches, setting=f"{min(resident, len(order))} jobs")

    def _round(self, sizes: tuple[int, ...], method: str, mode: Mode, switch: tuple[float, ...]) -> tuple[int, int]:
        """Return the nanoseconds of a round, and of its switches on all stages together."""
        key = sizes, method, mode, switch
        if key not in self._rounds:
            self._rounds[key] = self._ordered(*key)
        return self._rounds[key]

    def _ordered(self, sizes: tuple[int, ...], method: str, mode: Mode, switch: tuple[float, ...]) -> tuple[int, int]:
        problem = self.problem(mode, switch).select_jobs([self.kinds.index(rows) for rows in sizes])
        after_each = 2 * int(problem.switch.sum())
        found = []
        for program, plan in (arrayed(schedule, sizes, self.stages) for schedule in ARRAYED.get(method, ())):
            if plan.n_stages <= self.most_stages:
                chunks = plan.n_stages // self.stages
                costs = self.blocks(mode, plan.ranks, [each / chunks for each in switch])
                found.append(makespan(program, plan, costs))
        if found:
            return min(found), after_each
        if method == "ArBPipe":
            kept = np.array([self.footprints(mode)[s].kept for s in range(self.stages)]) / max(self.kinds)
            return bpipe(problem, self.to_partner(np.outer(sizes, kept).astype(np.int64))).makespan, after_each
        solution = solve_array(problem, method, Effort(self.orders))
        return solution.makespan, after_each - saved_switches(problem, solution.order)

    def paper(self, method: str = "search") -> Spent | None:
        """Rounds of as many jobs as fit, recomputing: with all states on the device, or more jobs and E2's switches."""
        mode = self._recomputing
        if mode is None or (method == "ArHanayo" and 2 * self.stages > self.most_stages):
            return None
        there, more = self.array_size(mode), self.array_size(mode, swapped=True)
        found = [self.in_rounds(there, method, mode)] if there else []
        if more > there:
            found.append(self.in_rounds(more, method, mode, self.visible(mode)))
        return min(found, key=lambda spent: spent.time)

    def without_memory_manager(self) -> Spent | None:
        """Rounds where everything of every job stays on the devices; None where not even one job fits."""
        mode = Mode()
        fit = self.array_size(mode, gradients=True)
        return self.in_rounds(fit, mode=mode) if fit else None

    def without_low_cost_switching(self) -> Spent | None:
        """Rounds of as many jobs as fit where every change of the job waits for its state from the host."""
        mode = self._recomputing
        if mode is None:
            return None
        return self.in_rounds(self.array_size(mode, swapped=True), mode=mode, switch=self.visible(mode, hidden=False))

    @cached_property
    def _recomputing(self) -> Mode | None:
        """Recomputing, with whole batches or else in as few parts as let as many jobs fit as there are stages."""
        modes = [mode for parts in PARTS if self.array_size(mode := Mode(True, parts), swapped=True)]
        most = max((min(self.stages, self.array_size(mode, swapped=True)) for mode in modes), default=0)
        return next((mode for mode in modes if self.array_size(mode, swapped=True) >= most), None)

    def streamed(self, resident: int, mode: Mode = Mode(), microbatches: int = 1, budgets: Sequence[int] = ()) -> Spent:
        """Without rounds, the job with most work first.

        Args:
            microbatches: of each batch.
            budgets: bytes of each stage for states, where they are switched.
        """
        costs = self.blocks(mode)
        work = dict(zip(self.kinds, self._work.tolist(), strict=True))
        sizes = sorted(self.sizes, key=lambda rows: -self.iterations[rows] * work[rows])
        jobs = [Job(Cut.even(rows, min(microbatches, rows), self.stages), self.iterations[rows]) for rows in sizes]
        array = stream_jobs(jobs, costs, resident)
        time, waited = array.time, 0
        if budgets:
            states = [each.state for each in self.footprints(mode)]
            time, waited = replayed(
                array.program.head, array.plan, costs, states, budgets, self.hardware.hosts, self.hardware.host
            )
        parts = dict.fromkeys(self.kinds, mode.parts if microbatches == 1 else microbatches)
        return replace(self._all(mode, time, parts), switching=waited)

    def ours(self, modes: Sequence[bool] = (False, True)) -> Spent | None:
        """Without rounds, the fastest of what fits: twice as many siblings as stages, or fewer and cut batches.

        Args:
            modes: whether stages may recompute.
        """
        found = []
        enough = min(2 * self.stages, len(self.sizes))
        for recompute in modes:
            name = ", recomputing" if recompute else ""
            mode = Mode(recompute)
            there = min(self.array_size(mode), enough)
            if there >= self.stages:
                found.append(replace(self.streamed(there, mode=mode), setting=f"{there} jobs{name}"))
                continue
            more = min(self.array_size(mode, swapped=True), enough)
            if more >= self.stages:
                budgets = [
                    int(self.hardware.memory) - each.working - more * each.kept for each in self.footprints(mode)
                ]
                spent = self.streamed(more, mode=mode, budgets=budgets)
                found.append(replace(spent, setting=f"{more} jobs{name}, states switched"))
            for parts in PARTS[1:]:
                few = min(self.array_size(Mode(recompute, parts), gradients=True), enough)
                if few:
                    found += [
                        replace(self.streamed(few, mode, m), setting=f"{few} jobs{name}, m={m}") for m in PARTS[1:]
                    ]
                    break
        return min(found, key=lambda spent: spent.time, default=None)

    def _all(self, mode: Mode, time: float, parts: dict[int, int] | None = None) -> Spent:
        """The whole epoch in `time`."""
        found = []
        for rows in self.kinds:
            cut = replace(mode, parts=parts[rows]) if parts else mode
            found.append((self._batch(rows, cut, 0), self.iterations[rows] * self.sizes.count(rows)))
        return replace(_sum(found), time=time)

    def _batch(self, rows: int, mode: Mode, time: float) -> Spent:
        """A batch of one job, in blocks of this mode."""
        spans = even_spans(rows, min(rows, mode.parts))
        plan = Plan(
            tuple(range(self.stages)), (Cut(rows, (spans,) * self.stages),), recompute=(mode.recompute,) * self.stages
        )
        return spent_in(time, plan, self.line)


def _in_parts(table: Table, parts: int, sizes: Sequence[int]) -> Table:
    """Seconds of whole batches that run in so many parts."""
    return tuple(
        (rows, sum(at_rows(table, span.rows) for span in even_spans(rows, min(rows, parts)))) for rows in sizes
    )


def _sum(parts: Sequence[tuple[Spent, int]]) -> Spent:
    """Each so many times, one after another."""
    names = ("time", "forward", "backward", "overhead", "switching")
    sums = {name: sum(getattr(spent, name) * count for spent, count in parts) for name in names}
    return Spent(**sums, setting=", ".join(dict.fromkeys(spent.setting for spent, _ in parts)))


def saved_switches(problem: ArrayProblem, order: Array) -> int:
    """Return the nanoseconds of switches that an order saves, where a forward's own backward follows on the stage."""
    own = order[:, 1:] == order[:, :-1] + problem.jobs
    return int(problem.saved_times[order[:, :-1][own]].sum())


def arrayed(schedule: Schedule, sizes: Sequence[int], ranks: int) -> tuple[Program, Plan]:
    """A batch of each of some siblings, which stand where the schedule has micro-batches; updates follow backwards."""
    where = schedule.place_stages(ranks)
    order = schedule.program(Plan.even(len(where), len(sizes), ranks=where))
    plan = Plan(where, tuple(Cut.even(rows, 1, len(where)) for rows in sizes))
    rows = []
    for row in order.head:
        found: list[Instruction] = []
        for i in row:
            job = i.span.start
            if i.kind is Kind.F:
                found.append(F(i.stage, Span(0, sizes[job]), job))
            elif i.kind is Kind.B:
                found += [B(i.stage, Span(0, sizes[job]), job), STEP(i.stage, job)]
        rows.append(tuple(found))
    return Program(tuple(rows)), plan


def of_model(name: str, hardware: Hardware, **options: int) -> Epoch:
    """An epoch of jobs of one of the paper's `MODELS`, in float32, in stages of equal time."""
    kind = MODELS[name]
    rows = {"vision": 256, "language": 16}[kind]
    profile = named_profile(name, "A100-80G", dtype="float32", optimizer=OPTIMIZER[kind])
    layers = range(len(profile.layers))
    seconds = [profile.seconds(Kind.F, n, rows) + profile.seconds(Kind.B, n, rows) for n in layers]

    @cache
    def costs(where: tuple[int, ...]) -> CostModel:
        return profile.stage_costs(even_partition(seconds, len(where))).on_cluster(hardware.cluster, where)

    return Epoch(costs, kind, hardware, len(layers), **{"orders": 500, **options})
