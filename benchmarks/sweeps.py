"""Sweeps over unlike siblings: equality with runs alone, memory and speed of LoRA arrays, busy stages, trials on Ray.

- Eight siblings of four widths, two depths and two LoRA ranks have the same losses and weights as alone.
- Eight siblings with adapters of different ranks share a frozen base of 217 MiB, on two processes. The peak of their
  resident memory is compared with the base and eight times what belongs to one sibling.
- The same siblings, with small batches, run together, one after another, and in the order of mLoRA (Ye et al. 2023,
  arXiv:2312.02515): backwards first, then forwards in their order of arrival, with one batch of each adapter in flight.
- Sixteen siblings whose blocks take from half to twice the mean time share eight simulated stages.
- One study runs in two arrays of two ranks on a local Ray cluster, and two ranks are killed. Trials that never complete
  are lost, and trials that complete twice are repeated.

    python benchmarks/sweeps.py [--quick] [--json] [--only NAME]
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.harness.report import QUIET, Report, hush, make_parser, run_command
from benchmarks.harness.timing import MAX_RANGE, explain_noise, measure_load, relative_range
from benchmarks.papers.jap.run import steady_state, uneven
from lightning_pipes import JobArray, MemorySwap, PipelineStrategy, load_pretrained
from lightning_pipes.arrays.arrivals import Arrivals, order_first_batches
from lightning_pipes.arrays.siblings.stage_loads import StageLoads
from lightning_pipes.cost import Cluster, CostModel, Deployment, Device, JobCosts, LayerProfile, ModelProfile
from lightning_pipes.ir import Cut, Kind, Plan
from lightning_pipes.planning.partition import partition_at
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import makespan, simulate
from lightning_pipes.strategies.jap import JAP, Job, stream_jobs
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan.decision import Decision
from tests.arrays import jobs as unlike

SIBLINGS = 8


# ---- equality


UNLIKE_JOBS = [
    unlike.Job(0, batch=16, width=3),
    unlike.Job(1, patience=0, epochs=4, depth=8),
    unlike.Job(2, harm="loss"),
    unlike.Job(3, batch=5, clip=0.1, width=32, lora=1),
    unlike.Job(4, patience=0, epochs=4, width=36, depth=8, lora=2),
    unlike.Job(5, epochs=3, width=32, lora=2),
    unlike.Job(6, batch=40, width=36, depth=8, lora=1),
    unlike.Job(7, width=3, depth=8),
    unlike.Job(8),
]
"""Siblings of four widths, two depths and two LoRA ranks. Two leave early, one fails, and the last one joins late."""


def equal_rank(rank: int, jobs: Sequence[unlike.Job]) -> bool:
    """Return whether unlike siblings of an array have the same results as alone. The one with a `harm` fails."""
    hush()
    outcomes = sorted(JobArray[Any](len(jobs) - 1, progress=False).run(jobs), key=lambda each: each.index)
    if [job for outcome, job in zip(outcomes, jobs, strict=True) if outcome.error] != [j for j in jobs if j.harm]:
        return False
    for outcome, job in zip(outcomes, jobs, strict=True):
        if not job.harm:
            assert outcome.value is not None
            losses, *values, weights = job()
            found_losses, *found_values, found = outcome.value
            same = losses == found_losses and values == found_values
            if not same or not all(torch.equal(weights[name], found[name]) for name in weights):
                return False
    return True


def compare_alone(quick: bool) -> Report:
    """Compare siblings with runs alone, on 2 and 4 stages, or half of the siblings on 2 stages if `quick`."""
    jobs = UNLIKE_JOBS[:4] + UNLIKE_JOBS[-1:] if quick else UNLIKE_JOBS
    equal = {ranks: all(run_ranks(equal_rank, ranks, jobs, timeout=300)) for ranks in ((2,) if quick else (2, 4))}
    lines = [
        f"{len(jobs) - 1} unlike siblings on {ranks} stages, bit-equal to runs alone: {same}"
        for ranks, same in equal.items()
    ]
    return Report(lines, {"unlike_bit_equal": float(all(equal.values()))})


# ---- LoRA over one frozen base


@dataclass(frozen=True)
class Shape:
    """The shape of the base.

    Attributes:
        width: the width of a block.
        depth: the number of blocks.
        tokens: the length of a sequence.
    """

    width: int = 768
    depth: int = 8
    tokens: int = 32


TINY, SMALL = Shape(64, 2), Shape(384)
"""The base of the arrays that load what a process loads once, and the base whose speed `--quick` measures."""
RANKS = (2, 4, 8, 16)
"""The ranks of the adapters of the siblings, in turn."""
ROWS = 2
"""The sequences in a batch."""


class AdaptedLinear(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def make_net(shape: Shape, rank: int) -> nn.Sequential:
    """Return a frozen transformer whose feed-forward layers have adapters."""
    width = shape.width
    blocks = [
        nn.TransformerEncoderLayer(width, width // 16, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(shape.depth)
    ]
    net = nn.Sequential(nn.Embedding(256, width), *blocks, nn.Linear(width, 256)).requires_grad_(False)
    for block in blocks:
        block.linear1 = AdaptedLinear(block.linear1, rank)  # type: ignore[assignment]
        block.linear2 = AdaptedLinear(block.linear2, rank)  # type: ignore[assignment]
    return net


def save_base(shape: Shape, path: str) -> int:
    """Write a base to a file, and return its bytes."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = {k: v for k, v in make_net(shape, 1).state_dict().items() if ".down." not in k and ".up." not in k}
    save_file(state, path)
    return sum(value.nbytes for value in state.values())


class Tuned(L.LightningModule):
    """Trains adapters over a base that is built on `meta` and read from a file."""

    def __init__(self, shape: Shape, file: str, rank: int) -> None:
        super().__init__()
        self.net: Any = None
        self._settings = shape, file, rank

    def configure_model(self) -> None:
        if self.net is None:
            shape, file, rank = self._settings
            with torch.device("meta"):
                self.net = make_net(shape, rank)
            load_pretrained(self.net, file, strict=False)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[0].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def tune(shape: Shape, file: str, number: int, batches: int, schedule: str = "jap", microbatches: int = 1) -> None:
    """Tune the adapters of one sibling.

    Batches are not compared with their micro-batches. Half of so few batches would be compared, which takes several
    times as long as the batches themselves.
    """
    torch.manual_seed(number)
    data = torch.utils.data.TensorDataset(torch.randint(256, (batches * ROWS, shape.tokens)))
    strategy = PipelineStrategy(
        schedule, microbatches=microbatches, partition=[1 + shape.depth // 2], module="net", check_loss=False
    )
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **QUIET)
    module = Tuned(shape, file, RANKS[number % len(RANKS)])
    trainer.fit(module, torch.utils.data.DataLoader(data, ROWS))


def run_array(
    jobs: Sequence[Callable[[], None]], arrivals: Arrivals[Any] | None = None, memory: MemorySwap | None = None
) -> int:
    """Run all jobs in one array, and return the bytes of the tensors that they shared on this rank."""
    array: JobArray[None] = JobArray(len(jobs), progress=False, memory=memory)
    shared = array.shared.tensors
    if arrivals is not None:
        array._arrivals = arrivals
    for outcome in array.run(jobs):
        if outcome.error is not None:
            raise outcome.error
    return shared.nbytes


def read_status(name: str) -> int:
    """Return a value of this process, in bytes, such as its resident memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def memory_rank(rank: int, base: str, tiny: str, quick: bool) -> tuple[int, ...]:
    """Return peaks of the memory of this process, in bytes.

    The first two are the peaks of the resident memory of arrays with one and with all siblings, without the memory
    before the first of them. The third is what an array with `MemorySwap` counts: the base, and the peak of the states.
    """
    hush()
    torch.set_num_threads(1)
    counted = count_bytes(TINY, tiny)  # this also loads what a process loads once
    trim_memory()
    before, peaks = read_status("VmRSS"), []
    for siblings in (1, SIBLINGS):
        trim_memory()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        run_array([partial(tune, Shape(), base, n, 3) for n in range(siblings)])
        peaks.append(read_status("VmHWM") - before)
    return *peaks, counted if quick else count_bytes(Shape(), base)


def count_bytes(shape: Shape, file: str) -> int:
    """Return the bytes of the base and the peak of the states on this rank that an array with `MemorySwap` counts."""
    memory = MemorySwap(1 << 40)
    shared = run_array([partial(tune, shape, file, n, 3) for n in range(SIBLINGS)], memory=memory)
    return shared + memory.statistics.peak_bytes


def trim_memory() -> None:
    """Return free memory of this process to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def count_adapter_bytes(shape: Shape) -> int:
    """Return the bytes of the adapters of all siblings, and of the two moments that Adam keeps for each weight."""
    with torch.device("meta"):
        nets = [make_net(shape, RANKS[n % len(RANKS)]) for n in range(SIBLINGS)]
    return sum(3 * p.nbytes for net in nets for p in net.parameters() if p.requires_grad)


def measure_memory(quick: bool) -> Report:
    """Measure the peak memory of arrays of one and of eight siblings."""
    with tempfile.TemporaryDirectory() as folder:
        base, tiny = f"{folder}/base.safetensors", f"{folder}/tiny.safetensors"
        size, tiny_size = save_base(Shape(), base), save_base(TINY, tiny)
        ranks = run_ranks(memory_rank, 2, base, tiny, quick, timeout=300)
    one, all_, counted = map(sum, zip(*ranks, strict=True))
    shape, counted_size = (TINY, tiny_size) if quick else (Shape(), size)
    limit = 1.15 * (size + SIBLINGS * (one - size))
    counted_limit = 1.15 * (counted_size + count_adapter_bytes(shape))
    lines = [
        f"resident memory of two processes: base {size >> 20} MiB, one sibling {one >> 20} MiB, {SIBLINGS} siblings "
        f"{all_ >> 20} MiB; base and {SIBLINGS} times what belongs to one sibling, plus 15 %: {int(limit) >> 20} MiB",
        f"bytes that MemorySwap counts on both devices, base {counted_size / 2**20:.1f} MiB, {SIBLINGS} siblings: "
        f"{counted / 2**20:.1f} MiB; base, adapters and optimizers, plus 15 %: {counted_limit / 2**20:.1f} MiB",
    ]
    return Report(
        lines,
        {
            "lora_memory_over_base": all_ / size,
            "lora_memory_over_limit": all_ / limit,
            "lora_counted_over_limit": counted / counted_limit,
        },
    )


# ---- speed


class BackwardsFirst(Arrivals[Any]):
    """The order of mLoRA: a rank computes backwards first, then forwards in the order of their arrival."""

    def choose_sibling(self, siblings: Iterable[Any], memory: Any) -> Any:
        """Return the sibling that computes next, or None."""
        chosen = super().choose_sibling(siblings, memory)
        if chosen is None or self._is_backward(chosen):
            return chosen
        backward = next((each for each in self._waiting if self._is_backward(each)), None)
        if backward is None:
            return chosen
        self._waiting.remove(backward)
        self._waiting.insert(0, chosen)
        return backward

    @staticmethod
    def _is_backward(sibling: Any) -> bool:
        i = None if sibling.engine is None else sibling.engine.next_ready()
        return i is not None and i.kind is Kind.B


def speed_rank(
    rank: int, shape: Shape, base: str, siblings: int, batches: int, pairs: int, has_mlora: bool
) -> dict[str, list[float]]:
    """Return the seconds of all siblings, in an array and one after another, in alternating runs."""
    hush()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    jobs = [partial(tune, shape, base, n, batches) for n in range(siblings)]

    def measure_seconds(run: Callable[[], object]) -> float:
        dist.barrier()
        begun = time.monotonic()
        run()
        dist.barrier()
        return time.monotonic() - begun

    run_array([partial(tune, shape, base, n, 1) for n in range(siblings)])
    one = {m: measure_seconds(partial(jobs[0], schedule="1f1b", microbatches=m)) for m in (1, 2)}
    fastest = torch.tensor(min(one, key=one.__getitem__))
    dist.broadcast(fastest, 0)
    sides: dict[str, Callable[[], object]] = {
        "array": partial(run_array, jobs),
        **({"mlora": lambda: run_array(jobs, BackwardsFirst())} if has_mlora else {}),
        f"alone m={int(fastest)}": lambda: [job(schedule="1f1b", microbatches=int(fastest)) for job in jobs],
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in list(sides)[:: -1 if pair % 2 else 1]:
            found[name].append(measure_seconds(sides[name]))
    return found


def simulated_speedups() -> dict[str, float]:
    """Return the simulated gains over one after another, if times are proportional to samples.

    A forward and a backward take the same time, because the base needs no weight gradients.
    """
    costs, batches = CostModel.uniform(2, 1e-3, 1e-3, rows=ROWS), 20
    plans = [even_plan(OneFOneB(), 2, m, ROWS) for m in (1, 2)]
    alone = SIBLINGS * batches * min(makespan(OneFOneB().program(plan), plan, costs) for plan in plans)
    array = stream_jobs([Job(Cut.even(ROWS, 1, 2), batches)] * SIBLINGS, costs)
    return {"array": alone / array.time}


def measure_speed(quick: bool) -> Report:
    """Compare an array with the same siblings one after another, and with mLoRA's order if not `quick`."""
    load = measure_load()
    lines = [f"simulated: the array is {simulated_speedups()['array']:.2f} times as fast as one after another"]
    shape, siblings, batches, pairs = (SMALL, SIBLINGS // 2, 8, 2) if quick else (Shape(), SIBLINGS, 12, 4)
    with tempfile.TemporaryDirectory() as folder:
        base = f"{folder}/base.safetensors"
        size = save_base(shape, base)
        found = run_ranks(speed_rank, 2, shape, base, siblings, batches, pairs, not quick, timeout=900)[0]
    (alone,) = (found[name] for name in found if name.startswith("alone"))
    ratios = sorted(there / ours for there, ours in zip(alone, found["array"], strict=True))
    lines.append(
        f"measured with setup, base {size >> 20} MiB, {siblings} siblings, {batches} batches of {ROWS} sequences each: "
        + ", ".join(f"{name} {', '.join(f'{each:.1f}' for each in seconds)} s" for name, seconds in found.items())
        + f"; the array is {ratios[0]:.2f} to {ratios[-1]:.2f} times as fast as one after another"
    )
    if reason := explain_noise(load, relative_range(ratios), MAX_RANGE):
        return Report([*lines, f"the measured speed has no key, because it is {reason}"])
    keys = {"lora_speedup": statistics.median(ratios)}
    if not quick:
        mlora = (there / ours for there, ours in zip(found["mlora"], found["array"], strict=True))
        keys["lora_speedup_vs_mlora_order"] = statistics.median(mlora)
    return Report(lines, keys)


# ---- unlike siblings on many stages

STAGES, UNLIKE, BATCHES, DEPTHS = 8, 16, 12, (16, 24, 32)


def simulate_unlike(seed: int, depths: Sequence[int] = DEPTHS, is_ordered: bool = True, microbatches: int = 1) -> float:
    """Return the share of the time for which the slowest stage computes in the steady state.

    The mean block of each sibling takes from half to twice 10 ms, in cuts that level the work as in an array.

    Args:
        seed: the seed of the order and the depths of the siblings.
        depths: the numbers of layers, of which each sibling has one.
        is_ordered: whether the first batches are ordered by their work, as in an array, or by their number.
        microbatches: the number of micro-batches of each batch.
    """
    rng, loads = random.Random(seed), StageLoads()
    work = [0.5 * 4 ** (n / (UNLIKE - 1)) for n in range(UNLIKE)]
    rng.shuffle(work)
    models = []
    for number, factor in enumerate(work):
        depth = rng.choice(depths)
        seconds = 0.010 * factor * STAGES / depth / ROWS
        profile = ModelProfile((LayerProfile("", ((1, seconds),), ((1, 2 * seconds),), output=((1, 4),)),) * depth)
        cut = partition_at([round(depth * s / STAGES) for s in range(1, STAGES)], depth, STAGES)
        devices = Deployment(Cluster((Device(),) * STAGES))
        decision = Decision(
            JAP(),
            microbatches,
            False,
            (*range(STAGES),),
            cut,
            rows=ROWS,
            profile=profile,
            deployment=devices,
            movable=True,
        )
        decision = replace(decision, layers=loads.level_cut(decision))
        loads.begin_sibling(number, decision)
        models.append(uneven(profile.stage_costs(decision.layers), number))
    turns = order_first_batches(work) if is_ordered else range(UNLIKE)
    plan = Plan(tuple(range(STAGES)), (Cut.even(ROWS, microbatches, STAGES),))
    costs = JobCosts((plan,) * UNLIKE, tuple(models[n] for n in turns))
    array = stream_jobs([Job(plan.jobs[0], BATCHES)] * UNLIKE, costs)
    return steady_state(simulate(array.program, array.plan, costs)).utilisation


def simulate_stages(quick: bool) -> Report:
    """Simulate unlike siblings on many stages, with layers that can be cut evenly and with layers that can not."""
    seeds, odd = range(1 if quick else 5), (18, 26, 34)
    even = [simulate_unlike(seed) for seed in seeds]
    listed = [simulate_unlike(seed, is_ordered=False) for seed in seeds]
    rest = [simulate_unlike(seed, odd) for seed in seeds]
    halves = [simulate_unlike(seed, odd, microbatches=2) for seed in seeds]
    lines = [
        f"simulated, {UNLIKE} siblings on {STAGES} stages, blocks of half to twice the mean time: the slowest stage is "
        f"busy for {min(even):.1%} (first batches in the order of their numbers {min(listed):.1%}; with depths of "
        f"{odd}, which can't be cut evenly, {min(rest):.1%}, and {min(halves):.1%} with two micro-batches in a batch)"
    ]
    return Report(lines, {"unlike_utilisation": min(even)})


# ---- trials on Ray

RAY_TRIALS = 8
RAY_KEYS = ("ray_lost_trials", "ray_repeated_trials")


def count_ray_trials(quick: bool) -> Report:
    """Count the lost and the repeated trials of a study whose ranks are killed, if Ray is installed."""
    try:
        import ray
    except ModuleNotFoundError:
        missing: dict[str, Any] = dict.fromkeys(RAY_KEYS)
        return Report(["no trials on Ray, which is not installed: pip install lightning-pipes[ray]"], missing)
    from optuna.trial import TrialState

    from lightning_pipes.ray import run_arrays
    from tests.ray.training import KILLS, deadly, open_study

    os.environ |= {"PYTHONPATH": str(Path(__file__).parents[1]), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(address="local", num_cpus=4, include_dashboard=False, _temp_dir=f"{folder}/ray", log_to_driver=False)
        try:
            study = run_arrays(partial(open_study, Path(folder)), deadly, RAY_TRIALS, 2, arrays=2, ranks=2)
            complete = study.get_trials(states=(TrialState.COMPLETE,))
        finally:
            ray.shutdown()
    distinct = len({trial.params["lr"] for trial in complete})
    lost, repeated = RAY_TRIALS - distinct, len(complete) - distinct
    line = f"{RAY_TRIALS} trials in two arrays on Ray, {len(KILLS)} ranks killed: {lost} lost, {repeated} repeated"
    return Report([line], dict(zip(RAY_KEYS, map(float, (lost, repeated)), strict=True)))


PARTS = {
    "equal": compare_alone,
    "memory": measure_memory,
    "speed": measure_speed,
    "stages": simulate_stages,
    "ray": count_ray_trials,
}


if __name__ == "__main__":
    run_command(make_parser(__doc__, "fewer siblings, batches, pairs and seeds; within 120 s"), PARTS)
