"""Simulates how step time, memory and bubble depend on the number of stages, micro-batches and replicas.

The benchmark prints the tables of SCALING.md, and draws the picture of docs/scaling.md. With --planning, it prints how
long the planner takes to choose a schedule instead.

The tables by stages and by micro-batches have three columns for each schedule: the step in ms, the bubble, and the
memory of the fullest rank in GiB, with an asterisk if the devices have less.

    python benchmarks/scaling.py [--quick] [--png PATH] [--planning [--json]]
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from hydra import compose, initialize_config_module
from hydra.utils import instantiate

from benchmarks.harness.report import make_parser
from lightning_pipes.cost import Cluster, Deployment, ModelProfile
from lightning_pipes.cost.cluster import make_cluster
from lightning_pipes.cost.zoo import named_profile
from lightning_pipes.ir import PlanError, Policy, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.auto import choose_option
from lightning_pipes.planning.fit import Fit, evaluate_plan, fit_layers
from lightning_pipes.planning.planner import even_plan

OVERHEAD = 1e-4
"""Seconds that a rank spends before each computation. The engine was measured at 80 to 130 us on a CPU, see RESULTS.md.
"""
SCHEDULES: dict[str, Schedule | Policy] = {
    "gpipe": make_schedule("gpipe"),
    "1f1b": make_schedule("1f1b"),
    "kfkb k=2": make_schedule("kfkb", k=2),
    "interleaved v=2": make_schedule("interleaved", stages_per_rank=2),
    "zero_bubble": make_schedule("zero_bubble"),
}


@dataclass(frozen=True)
class Case:
    """A model on a cluster.

    Attributes:
        model: the name of the model.
        rows: the number of samples in a step, for the tables by stages and by micro-batches.
        microbatch: the number of samples in a micro-batch, for the table by stages.
        cluster: the name of the cluster in the settings.
        device: the name of the device.
        dtype: the data type of the model.
    """

    model: str
    rows: int
    microbatch: int
    cluster: str
    device: str
    dtype: str

    @property
    def title(self) -> str:
        """The title of the tables."""
        return f"{self.model} on {self.device}, cluster={self.cluster}"

    @property
    def profile(self) -> ModelProfile:
        """The profile of the model, computed by formulas."""
        return replace(named_profile(self.model, self.device, dtype=self.dtype), overhead=OVERHEAD)

    def devices(self) -> Cluster:
        """Return the cluster of the settings, which has 64 devices."""
        with initialize_config_module("lightning_pipes.conf", version_base="1.3"):
            found = instantiate(compose(f"cluster/{self.cluster}").cluster)
        assert isinstance(found, Cluster)
        return found

    @property
    def gib(self) -> float:
        """The memory of a device in GiB."""
        return (self.devices().devices[0].memory or 0) / 2**30


CASES = [
    Case(model, rows, microbatch, cluster, device, dtype)
    for model, rows, microbatch in (("GPT-2-1.3B", 128, 1), ("ResNet-152", 2048, 16))
    for cluster, device, dtype in (("dgx_a100", "A100-80G", "bfloat16"), ("v100_ethernet", "V100-16G", "float16"))
]


@cache
def fitted(case: Case, name: str, ranks: int, microbatches: int) -> Fit | None:
    """Return the best partition without a memory limit, or None if there are more stages than layers."""
    schedule = SCHEDULES[name]
    plan = even_plan(schedule, ranks, microbatches, case.rows)
    cluster = case.devices()
    roomy = replace(cluster, devices=tuple(replace(device, memory=None) for device in cluster.devices))
    try:
        return fit_layers(case.profile, schedule, plan, roomy, trials=10)
    except PlanError:
        return None


def bubble(fit: Fit) -> float:
    """Return the share of the time of all ranks in which they do not compute."""
    plan = fit.plan
    stages = range(plan.n_stages)
    busy = sum(
        fit.costs.seconds_at(kind, s, span.rows)
        for s in stages
        for kind in plan.compute_kinds
        for span in plan.spans(kind, s)
    )
    return 1 - busy / (plan.n_ranks * fit.seconds)


def columns(case: Case, ranks: int, microbatches: int) -> str:
    """Return step, bubble and peak for every schedule, with an asterisk if the devices have less memory."""
    out = []
    for name in SCHEDULES:
        fit = fitted(case, name, ranks, microbatches)
        if fit is None:
            out.append(f"{'-':>19} ")
            continue
        peak = max(fit.peak_bytes) / 2**30
        out.append(f"{1e3 * fit.seconds:7.0f} {bubble(fit):4.0%} {peak:6.1f}{'*' if peak > case.gib else ' '}")
    return " ".join(out).rstrip()


def head(first: str) -> str:
    """Return the header of the columns."""
    return f"{first:>6} " + " ".join(f"{name:>19} " for name in SCHEDULES).rstrip()


def by_stages(case: Case, most: int = 64) -> Iterator[str]:
    """Yield the lines of a table with an increasing number of ranks for the same samples."""
    m = case.rows // case.microbatch
    yield f"{case.title}: {case.rows} samples in {m} micro-batches; step in ms, bubble, GiB of the fullest rank"
    yield head("ranks")
    ranks = 1
    while ranks <= min(most, len(case.profile.layers)):
        yield f"{ranks:6} {columns(case, ranks, m)}"
        ranks *= 2


def by_microbatches(case: Case, ranks: int = 16) -> Iterator[str]:
    """Yield the lines of a table with an increasing number of micro-batches for the same samples."""
    yield f"{case.title}: {case.rows} samples on {ranks} ranks; step in ms, bubble, GiB of the fullest rank"
    yield head("pieces")
    m = ranks // 2
    while m <= min(case.rows, 16 * ranks):
        yield f"{m:6} {columns(case, ranks, m)}"
        m *= 2


def by_replicas(case: Case, devices: int = 64) -> Iterator[str]:
    """Yield the lines of a table that divides the same devices into few long pipelines or many short ones.

    Each line shows the best schedule that fits into memory.
    """
    rows = 4 * case.rows
    yield f"{case.title}: {rows} samples on {devices} devices; the best of all that fit"
    yield "ranks replicas                     schedule  pieces recompute  step ms  averaging ms"
    ranks = 1
    while ranks <= devices:
        replicas = devices // ranks
        place = Deployment.from_cluster(case.devices(), ranks, replicas)
        try:
            schedules = list(SCHEDULES.values()) if ranks > 1 else [SCHEDULES["1f1b"]]
            choice = choose_option(case.profile, ranks, rows // replicas, place, schedules)
            fit, best = choice.fit, choice.best
            alone = evaluate_plan(case.profile, fit.order, fit.plan, place.pipeline).seconds
            yield (
                f"{ranks:5} {replicas:8} {best.label:>28} {best.microbatches:7} {'yes' if best.recompute else 'no':>9} "
                f"{1e3 * fit.seconds:8.0f} {1e3 * (fit.seconds - alone):13.0f}"
            )
        except PlanError as error:
            yield f"{ranks:5} {replicas:8} {str(error).partition('; ')[0].removeprefix('no schedule fits: ')}"
        ranks *= 2


def save_png(path: str) -> None:
    """Draw the busy share of ranks by their number, with a panel for each case and a line for each schedule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.7), layout="constrained")
    axes = figure.subplots(1, len(CASES), sharey=True)
    for axis, case in zip(axes, CASES, strict=True):
        for name in SCHEDULES:
            found = [
                (ranks, fitted(case, name, ranks, case.rows // case.microbatch)) for ranks in (2, 4, 8, 16, 32, 64)
            ]
            points = [(ranks, 1 - bubble(fit)) for ranks, fit in found if fit is not None]
            axis.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name, linewidth=1.2)
        axis.set_xscale("log", base=2)
        axis.set_xticks([2, 4, 8, 16, 32, 64], ["2", "4", "8", "16", "32", "64"])
        axis.set_title(f"{case.model}, {case.cluster}", fontsize=8)
        axis.set_xlabel("ranks", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    axes[0].set_ylabel("busy share of ranks, simulated", fontsize=8)
    axes[0].legend(fontsize=7, loc="lower left")
    figure.savefig(path, dpi=100)


def planning_seconds(stages: int, microbatches: int, replicas: int, between: str) -> tuple[float, int, int]:
    """Return how long it takes to choose a schedule for GPT-2-1.3B.

    Args:
        stages: the number of stages.
        microbatches: the number of samples, and thus the largest number of micro-batches.
        replicas: the number of replicas.
        between: the bandwidth between machines.

    Returns:
        Processor seconds, the number of options, and the number of options that were simulated.
    """
    cluster = make_cluster(
        2 * stages, 8, "74GiB", {"bandwidth": "300GB/s", "latency": "5us"}, {"bandwidth": between, "latency": "10us"}
    )
    place = Deployment.from_cluster(cluster, stages, replicas)
    profile = named_profile("GPT-2-1.3B", "A100-80G")
    began = time.process_time()
    found = choose_option(profile, stages, microbatches, place)
    return time.process_time() - began, len(found.options), sum(o.fit is not None for o in found.options)


def planning() -> dict[str, float]:
    """Print the time to choose a schedule on large clusters, and return the keys for `--json`.

    The time should be less than 10 s.
    """
    keys = {}
    for stages, microbatches, replicas in ((8, 64, 2), (64, 512, 16)):
        for between in ("25GB/s", "200MB/s"):
            seconds, options, simulated = planning_seconds(stages, microbatches, replicas, between)
            print(
                f"{stages} stages, {microbatches} micro-batches, {replicas} replicas, {between}: {seconds:5.2f} s, "
                f"{options} options, {simulated} simulated",
                flush=True,
            )
            keys[f"planning_seconds_{stages}x{microbatches}x{replicas}_{between.partition('B')[0]}"] = round(seconds, 2)
    return keys


def main() -> None:
    """Print the tables, or the times of planning."""
    parser = make_parser(__doc__, "the first case only, up to 16 ranks")
    parser.add_argument("--png", help="the file for the picture")
    parser.add_argument("--planning", action="store_true", help="only measure the time to choose a schedule")
    options = parser.parse_args()
    if options.planning:
        keys = planning()
        if options.json:
            print(json.dumps(keys))
        return
    cases = CASES[:1] if options.quick else CASES
    for table in (by_stages, by_microbatches, by_replicas):
        for case in cases:
            print("\n".join(table(case, 16) if options.quick else table(case)), end="\n\n", flush=True)
    if options.png:
        save_png(options.png)


if __name__ == "__main__":
    main()
