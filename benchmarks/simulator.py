"""The cost of a simulation with 8 stages, 64 micro-batches and their transfers: 1920 operations and 8 updates.

*fixed* is the makespan of a program. *dispatch* is the makespan of a rule that chooses the order. *batch* is the
makespan of a program with 256 cost vectors in one call, divided by the number of vectors. All calls use the public API,
after everything is set up. *set up* is the time of the first call with a new plan. All times are processor times, so
that other programs have little influence. The table shows the median, the quartiles and the least time of each call.

    python benchmarks/simulator.py [--quick] [--json]
    python benchmarks/simulator.py --large 1000      # a plan for this number of ranks, and the verification of an order
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks.harness.report import describe_machine, make_parser
from lightning_pipes.cost import CostModel, LayerProfile, Link, ModelProfile
from lightning_pipes.cost.cluster import make_cluster
from lightning_pipes.ir import MAX_FORWARDS, Kind, Plan, Program, Rule, RulePolicy, Schedule, verify
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.auto import choose_option
from lightning_pipes.sim import cost_representatives, load_kernel, makespan, makespans, simulate
from lightning_pipes.sim.loops.kernel import SIMULATION_KERNELS

STAGES, MICROBATCHES, VECTORS = 8, 64, 256
LARGE_BATCH = 10_000
"""The number of samples in a batch for a large number of ranks."""
FORWARD, BACKWARD, LINK = 20e-3, 40e-3, Link(bandwidth=1e8, latency=1e-4)
MESSAGE = 500_000
"""Bytes of a message. On the link, it takes 5 ms."""


@dataclass(frozen=True)
class ReadyFirst(RulePolicy):
    """A policy that runs any ready instruction, with twice as many micro-batches in flight as 1F1B."""

    name: ClassVar[str] = "ready_first"

    def rule(self, plan: Plan) -> Rule:
        return Rule(tuple(2 * (plan.n_stages - s) for s in range(plan.n_stages)))


@dataclass(frozen=True)
class Times:
    """The microseconds of a call.

    Attributes:
        least: the least time.
        low, median, high: the quartiles.
    """

    least: float
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, call: Callable[[], object], repeats: int, parts: int = 1) -> Times:
        """Measure a call several times, after a first call that does not count.

        Args:
            call: the function to measure.
            repeats: the number of calls.
            parts: the number by which the times are divided.
        """
        call()
        seconds = []
        for _ in range(repeats):
            began = time.thread_time()
            call()
            seconds.append((time.thread_time() - began) * 1e6 / parts)
        low, median, high = statistics.quantiles(seconds, n=4)
        return cls(min(seconds), low, median, high)

    def __str__(self) -> str:
        return f"{self.median:9.1f} us  ({self.low:.1f}-{self.high:.1f}, least {self.least:.1f})"


def problem(link: Link = LINK) -> tuple[Program, Plan, CostModel]:
    """Return the program, plan and costs of 1F1B with the stages and micro-batches of this benchmark."""
    plan = Plan.even(STAGES, MICROBATCHES)
    costs = CostModel.uniform(STAGES, FORWARD, BACKWARD, message_bytes=MESSAGE, link=link)
    schedule = make_schedule("1f1b")
    assert hasattr(schedule, "program")
    return schedule.program(plan), plan, costs


def measure(quick: bool) -> dict[str, Times]:
    """Return the times by key, with the Python kernel and, if numba is installed, with the compiled kernel."""
    program, plan, costs = problem()
    free = problem(Link())[2]
    shaped = problem(replace(LINK, burst=1e5, peak=1e9, max_in_flight=4))[2]
    rule = ReadyFirst()
    one = [
        costs.transfer_ns(i, plan)[0] if i.kind in (Kind.SF, Kind.SB) else costs.duration_ns(i, plan)
        for i in cost_representatives(program, plan)
    ]
    vectors = np.random.default_rng(0).normal(1, 0.1, (VECTORS, len(one))) * one
    nanoseconds: npt.NDArray[np.int64] = np.maximum(vectors, 0).astype(np.int64)
    times = {}
    many = 1 if quick else 4
    for name in ("_python", ""):
        SIMULATION_KERNELS.patience = 1 << 60 if name else 0
        if not name and load_kernel() == "python":
            break
        repeats = many * (25 if name else 250)
        times["sim_us_fixed" + name] = Times.of(lambda: makespan(program, plan, costs), repeats)
        times["sim_us_fixed_free" + name] = Times.of(lambda: makespan(program, plan, free), repeats)
        times["sim_us_fixed_shaped" + name] = Times.of(lambda: makespan(program, plan, shaped), repeats)
        times["sim_us_dispatch" + name] = Times.of(lambda: makespan(rule, plan, costs), repeats)
        times["sim_us_batch256" + name] = Times.of(
            lambda: makespans(program, plan, costs, nanoseconds), 2 + repeats // 25, VECTORS
        )
        times["sim_us_timeline" + name] = Times.of(lambda: simulate(program, plan, costs), 25 * many)
    return times


def set_up() -> dict[str, float]:
    """Return the milliseconds of the first calls with a new plan."""
    found = {}
    for name, order in (("fixed", make_schedule("1f1b")), ("dispatch", ReadyFirst())):
        plan = Plan.even(STAGES, MICROBATCHES, rows=2 * MICROBATCHES)
        costs = CostModel.uniform(STAGES, FORWARD, BACKWARD, message_bytes=MESSAGE, link=LINK)
        ordered = order.program(plan) if hasattr(order, "program") else order
        began = time.thread_time()
        makespan(ordered, plan, costs)
        found[name] = (time.thread_time() - began) * 1e3
    return found


def measure_large(ranks: int) -> dict[str, float]:
    """Choose a schedule for a large number of ranks and verify 1F1B on them.

    Args:
        ranks: the number of ranks.

    Returns:
        The seconds and MB of planning, and the seconds of the first makespan and of the verification.
    """
    layer = LayerProfile(
        "layer",
        ((1, 1e-3), (16, 16e-3)),
        ((1, 2e-3), (16, 32e-3)),
        weight_bytes=10**6,
        saved=((1, 1e6),),
        output=((1, 1e4),),
    )
    cluster = make_cluster(
        -(-ranks // 8), 8, "40GiB", {"bandwidth": "300GB/s"}, {"bandwidth": "25GB/s", "latency": "10us"}
    )
    began = time.process_time()
    choice = choose_option(ModelProfile((layer,) * 1282), ranks, LARGE_BATCH, cluster)
    found = {"plan_seconds": time.process_time() - began}
    found["plan_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(choice)
    plan = Plan.even(ranks, MAX_FORWARDS // ranks // 2)
    schedule = make_schedule("1f1b")
    assert isinstance(schedule, Schedule)
    program = schedule.program(plan)
    began = time.process_time()
    makespan(program, plan, CostModel.uniform(ranks, FORWARD, BACKWARD))
    found["first_makespan_seconds"] = time.process_time() - began
    began = time.process_time()
    verify(program, plan)
    return {**found, "verify_seconds": time.process_time() - began}


def installed(package: str) -> str:
    """Return the name and version of a package, or that it is missing."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def main() -> None:
    """Measure all simulations and print the table."""
    parser = make_parser(__doc__, "fewer repetitions, within a few seconds")
    parser.add_argument("--large", type=int, metavar="RANKS", help="only measure a plan for this number of ranks")
    options = parser.parse_args()
    if options.large:
        print(json.dumps(measure_large(options.large)))
        return
    print(f"{describe_machine()}, Python {platform.python_version()}, {installed('numpy')}, {installed('numba')}")
    print("set up:", ", ".join(f"{name} {ms:.1f} ms" for name, ms in set_up().items()))
    times = measure(options.quick)
    for key, found in times.items():
        print(f"{key:28} {found}")
    if options.json:
        print(json.dumps({key: found.median for key, found in times.items()}))


if __name__ == "__main__":
    main()
