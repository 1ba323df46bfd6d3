"""A small supernet of real layers, really trained on two cores; all is executed and measured, nothing emulated.

    python benchmarks/papers/csp/peers.py [--only peers t2 f7 t5] [--quick] [--json] [--pictures FOLDER]

peers  CSP beside what one could do instead, with the same subnets and batches: `csp` on two processes; one subnet after
       another in a pipeline, with schedules that flush; one-shot training under DDP, as NNI's examples do it, one
       process a core, each with half of the batch; and one process with both cores. All take turns, several rounds.
t2     the columns of NASPipe's Table 2 on two processes, for CSP as NASPipe has it, which swaps layers and cuts each
       subnet for itself; without scheduler, predictor or mirroring (Figure 6); and for bulk-synchronous and
       asynchronous training
f7     CSP on 1, 2 and 4 processes of one thread each
t5     forward, backward and swap of layers of each type in Table 5, smaller; on a GPU if there is one

VPipe, which swaps what a bulk of subnets reads, is emulated only (`figures.py`): layers that subnets read late stay on
the device here.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.report import Panel, Picture, Report, describe_machine, make_parser, run_parts
from benchmarks.harness.silence import QUIET, hush
from lightning_pipes import MemorySwap, PipelineStrategy
from lightning_pipes.ir import COMPUTE, Policy
from lightning_pipes.sim.residency import Statistics
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.supernets import ChoiceBlock, SubnetStream, Supernet, Uniform, bulk_synchronous
from lightning_pipes.testing.ranks import run_ranks

BLOCKS, CANDIDATES, WIDTH, ROWS = 12, 16, 384, 64
HIDDEN = (256, 512, 768, 1024)
WARM = 8
"""Batches that are not counted."""


class Residual(nn.Module):
    """A candidate; they differ in width."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


class Search(L.LightningModule):
    """One subnet a batch; subnets of a bulk read the weights that the bulk before has left."""

    def __init__(self, bulk: int = 0) -> None:
        super().__init__()
        self.bulk = bulk
        torch.manual_seed(0)
        blocks = (ChoiceBlock(Residual(HIDDEN[n % len(HIDDEN)]) for n in range(CANDIDATES)) for _ in range(BLOCKS))
        self.net = Supernet(*blocks, nn.Linear(WIDTH, 10), shared="frozen")

    def layers_of_batch(self, batch: Any) -> Any:
        """Those of its subnet."""
        layers = self.net.layers_of(batch[-1])
        return bulk_synchronous(layers, batch[-1].id, self.bulk) if self.bulk else layers

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Classifies."""
        (x, y), subnet = batch
        return F.cross_entropy(self.net((x, subnet)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Seconds from the end of batch `WARM` to the end of training."""

    began = seconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == WARM:
            self.began = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seconds = time.perf_counter() - self.began


def batches(subnets: int, rows: int) -> Any:
    """Random inputs, classified by a linear map."""
    generator = torch.Generator().manual_seed(0)
    x, teacher = (torch.randn(n, m, generator=generator) for n, m in ((ROWS * subnets, WIDTH), (WIDTH, 10)))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, (x @ teacher).argmax(1)), rows)


def fit(rank: int, name: str, subnets: int) -> float:
    """Subnets a second, by one way to train them."""
    hush()
    processes = 1 if name == "one process" else 2
    torch.set_num_threads(2 // processes)
    strategy: Any = "auto"
    if name == "ddp":
        strategy = DDPStrategy(find_unused_parameters=True, process_group_backend="gloo")
    elif name != "one process":
        schedule, microbatches = name.split()
        strategy = PipelineStrategy(schedule, microbatches=int(microbatches), partition=[BLOCKS // 2])
    module, clock = Search(), Clock()
    stream = SubnetStream(Uniform(module.net.space, seed=1))
    loader = batches(subnets, ROWS // 2 if name == "ddp" else ROWS)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        max_steps=subnets,
        strategy=strategy,
        callbacks=[clock],
        **QUIET,
    )
    trainer.fit(module, stream.pair_with(loader))
    return (subnets - WARM) / clock.seconds


WAYS = ("csp 1", "csp 2", "csp 4", "1f1b 2", "1f1b 4", "zero_bubble 2", "zero_bubble 4", "ddp", "one process")
FEW_WAYS = ("csp 1", "1f1b 2", "ddp", "one process")


def peers(quick: bool) -> Report:
    """Subnets a second of each way: the median, least and most, and the best csp over it."""
    subnets, rounds, ways = (60, 1, FEW_WAYS) if quick else (200, 3, WAYS)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name in ways:
            run = partial(run_ranks, fit, 1 if name == "one process" else 2)
            found[name].append(run(name, subnets, timeout=300)[0])
    rate = {name: statistics.median(values) for name, values in found.items()}
    csp, flushed = (max(rate[name] for name in ways if name.startswith(each)) for each in ("csp", ("1f1b", "zero")))
    report = Report(
        [f"{BLOCKS} blocks of {CANDIDATES}, {ROWS} rows: subnets/s, median (least to most), best csp over it"]
    )
    for name, values in found.items():
        report.lines.append(
            f"{name:16} {rate[name]:7.1f} ({min(values):.1f} to {max(values):.1f}) {csp / rate[name]:6.2f}"
        )
    report.lines.append("Left out: more than two processes; NNI itself, whose strategies run such a loop.")
    others = {"vs_one_by_one": flushed, "vs_ddp": rate["ddp"], "vs_one_process": rate["one process"]}
    report.keys = {key: csp / value for key, value in others.items()}
    return report


# ---- Table 2 and Figure 6, executed


@dataclass(frozen=True)
class System:
    """A way to train the supernet.

    Attributes:
        rows: samples of a batch.
        swap: settings of MemorySwap; None where all layers stay on the devices.
        bulk: subnets that read the same weights; 0 where each reads those of the one before.
    """

    schedule: str | Policy
    rows: int = ROWS
    swap: dict[str, Any] | None = field(default_factory=lambda: {"predictor": "algorithm_3"})
    bulk: int = 0


SYSTEMS = {
    "csp": System(CSP(balanced=True)),
    "no scheduler": System(CSP(depth=1, balanced=True)),
    "no predictor: on demand": System(CSP(balanced=True), swap={"prefetch": False}),
    "no predictor: all there": System(CSP(balanced=True), ROWS // 6, None),
    "no mirroring": System(CSP()),
    "BSP, as GPipe": System(CSP(), ROWS // 6, None, bulk=2),
    "ASP, as PipeDream": System("pipedream", ROWS // 12, None),
}
"""NASPipe's, its ablations, and baselines with the batches that Table 2 has for NLP.c1: 192, 32 and 16 samples."""
CONTEXTS = 3
STATE = sum(p.nbytes for p in Residual(max(HIDDEN)).parameters()) * 3
"""Bytes of the largest candidate, with Adam's moments."""


@dataclass(frozen=True)
class Ran:
    """What one rank measured after `WARM` subnets.

    Attributes:
        seconds: of a subnet.
        busy: seconds in which the rank computed, of a subnet.
        held: bytes of parameters with Adam's moments.
        device: bytes of them that fit on the device at a time.
        operations: floating point operations of a second, of one thread, in a matrix product.
    """

    seconds: float
    busy: float
    held: int
    device: int
    operations: float
    losses: tuple[float, ...]
    statistics: Statistics


def train(rank: int, system: System, subnets: int, processes: int) -> Ran:
    """Train, one thread a process."""
    hush()
    torch.set_num_threads(1)
    speed = operations_a_second()
    module, clock, losses = Search(system.bulk), Clock(), Losses()
    room = CONTEXTS * STATE * -(-BLOCKS // processes)
    memory = None if system.swap is None else MemorySwap(room, **system.swap)
    strategy = PipelineStrategy(
        system.schedule,
        1,
        partition=[BLOCKS * n // processes for n in range(1, processes)],
        recompute=memory is not None and processes > 1,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=processes,
        max_steps=subnets,
        strategy=strategy,
        callbacks=[clock, losses, *([] if memory is None else [memory])],
        **QUIET,
    )
    stream = SubnetStream(Uniform(module.net.space, seed=1))
    trainer.fit(module, stream.pair_with(batches(subnets, system.rows)))
    events = [e for w in losses.windows for e in w if e.instruction.kind in COMPUTE and e.instruction.batch >= WARM]
    held = 3 * losses.bytes
    return Ran(
        clock.seconds / (subnets - WARM),
        sum(e.end - e.start for e in events) / 1e9 / (subnets - WARM),
        held,
        held if memory is None else min(room, held),
        speed,
        tuple(losses.found),
        Statistics() if memory is None else memory.statistics,
    )


class Losses(Callback):
    """Losses of subnets; events, and bytes of parameters, of this rank."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.windows: list[Any] = []
        self.bytes = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run = trainer.strategy.current_run  # type: ignore[attr-defined]
        self.windows = [list(window.events) for window in run.windows]
        self.bytes = sum(p.nbytes for p in run.local_layers.parameters if p.requires_grad and not p.is_meta)


def operations_a_second() -> float:
    """Floating point operations of a second in matrix products of the layers' size, the most of five runs."""
    a, b, times = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, max(HIDDEN)), []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(20):
            a @ b
        times.append(time.perf_counter() - begun)
    return 20 * 2 * ROWS * WIDTH * max(HIDDEN) / min(times)


def operations(rows: int) -> float:
    """Floating point operations of a subnet of mean size: forward and backward, matrix products counted."""
    layers = nn.Sequential(*(Residual(HIDDEN[n % len(HIDDEN)]) for n in range(BLOCKS)))
    with FlopCounterMode(display=False) as counted:
        layers(torch.randn(rows, WIDTH, requires_grad=True)).sum().backward()
    return float(counted.get_total_flops())


def t2(quick: bool) -> Report:
    """The columns of Table 2: parameters on devices, score, batch, memory, utilisation, host memory, computing time,
    bubble and hits."""
    subnets = 48 if quick else 240
    report = Report(
        [
            f"{BLOCKS} blocks of {CANDIDATES}, two processes                MiB with Adam's moments",
            "                        batch  samples/s  parameters  devices  host   score  utilisation  computing"
            "  bubble  hits",
        ]
    )
    for name, system in SYSTEMS.items():
        ranks: list[Ran] = run_ranks(train, 2, system, subnets, 2, timeout=900)
        seconds, busy = max(r.seconds for r in ranks), sum(r.busy for r in ranks)
        device, held = sum(r.device for r in ranks), sum(r.held for r in ranks)
        used = operations(system.rows) / seconds / sum(r.operations for r in ranks)
        total = Statistics.sum_devices([r.statistics for r in ranks])
        swaps = system.swap is not None
        score = statistics.mean(ranks[0].losses[-subnets // 4 :])
        values = {
            "samples_s": system.rows / seconds,
            "bubble": 1 - busy / seconds / len(ranks),
            "utilisation": used,
            "hits": total.hit_rate,
        }
        report.keys |= {f"t2_{name.partition(',')[0].replace(' ', '_')}_{key}": v for key, v in values.items()}
        report.lines.append(
            f"{name:23} {system.rows:5} {values['samples_s']:10.1f} {device / 12e6:10.2f}M {device / 2**20:8.0f} "
            f"{held / 2**20 if swaps else 0:5.0f} {score:7.3f} {used:12.3f} {1e3 * busy:8.1f}ms "
            f"{values['bubble']:7.3f} " + (f"{total.hit_rate:5.3f}" if swaps else "")
        )
    report.lines.append(
        "Score: mean loss of the last quarter. Utilisation: of what threads reach in matrix products of such layers."
    )
    return report


def f7(quick: bool) -> Report:
    """CSP on 1, 2 and 4 processes: subnets a second and bubbles. Processes beyond the cores share them."""
    subnets, counts = 40 if quick else 240, [1, 2, 4]
    speeds, idle = list[float](), list[float]()
    report = Report(["processes  subnets/s  bubble"])
    for processes in counts:
        ranks: list[Ran] = run_ranks(train, processes, System(CSP(), swap=None), subnets, processes, timeout=900)
        seconds = max(r.seconds for r in ranks)
        speeds.append(1 / seconds)
        idle.append(1 - sum(r.busy for r in ranks) / seconds / processes)
        report.lines.append(f"{processes:9} {speeds[-1]:10.1f} {idle[-1]:7.3f}")
    report.keys |= {"f7_speedup_2": speeds[1] / speeds[0], "f7_speedup_4": speeds[2] / speeds[0]}
    panels = [Panel("throughput", "processes", "subnets/s", counts, {"CSP": speeds})]
    panels += [Panel("idle", "processes", "bubble", counts, {"CSP": idle})]
    report.picture = Picture("F7, executed", panels)
    return report


# ---- Table 5, executed


class LightConv(nn.Module):
    """A depthwise convolution over time whose normalised kernels channels of a head share (Wu et al. 2019)."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.randn(heads, 1, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernels = self.kernels.softmax(-1).repeat_interleave(x.size(1) // len(self.kernels), 0)
        return F.conv1d(x, kernels, padding=kernels.size(-1) // 2, groups=x.size(1))


class Attention(nn.Module):
    """Self-attention of (samples, channels, tokens)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        return self.attention(x, x, x, need_weights=False)[0].transpose(1, 2)  # type: ignore[no-any-return]


def separable(kind: type[nn.Module], width: int, size: int, dilation: int = 1) -> nn.Module:
    """A depthwise convolution and a pointwise one."""
    padding = dilation * (size // 2)
    return nn.Sequential(kind(width, width, size, 1, padding, dilation, width), kind(width, width, 1))


def layer_types(width: int, channels: int) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """The layers of Table 5, and the shape of their input."""
    text, image = (4, width, 192), (2, channels, 56, 56)
    return {
        "Conv 3x1": (nn.Conv1d(width, width, 3, padding=1), text),
        "SepConv 7x1": (separable(nn.Conv1d, width, 7), text),
        "LightConv 5x1": (LightConv(16, 5), text),
        "8-head attention": (Attention(width), text),
        "Conv 3x3": (nn.Conv2d(channels, channels, 3, padding=1), image),
        "SepConv 3x3": (separable(nn.Conv2d, channels, 3), image),
        "SepConv 5x5": (separable(nn.Conv2d, channels, 5), image),
        "DilConv 3x3": (separable(nn.Conv2d, channels, 3, 2), image),
    }


def t5(quick: bool) -> Report:
    """Milliseconds of forward, backward, and of the way of a layer with Adam's moments to the device; medians."""
    device, rounds = torch.device("cuda" if torch.cuda.is_available() else "cpu"), 5 if quick else 30
    report = Report([f"on {device}          forward backward   swap   (ms; computing it takes so many times its swap)"])
    torch.set_num_threads(1)
    for name, (layer, shape) in layer_types(256, 64).items():
        layer.to(device)
        x = torch.randn(shape, device=device, requires_grad=True)
        size = 3 * sum(p.numel() for p in layer.parameters())
        there, host = torch.empty(size, device=device), torch.empty(size, pin_memory=device.type == "cuda")
        back = partial(torch.autograd.backward, layer(x).sum(), retain_graph=True)
        steps = (partial(layer, x), back, partial(there.copy_, host))
        forward, backward, swap = (1e3 * median_seconds(step, rounds, device) for step in steps)
        report.lines.append(f"{name:18} {forward:8.2f} {backward:8.2f} {swap:6.3f} {(forward + backward) / swap:8.1f}")
        report.keys["t5_" + name.replace(" ", "_").lower()] = (forward + backward) / swap
    return report


def median_seconds(step: Callable[[], object], rounds: int, device: torch.device) -> float:
    """The median time of a step, after one that is not counted."""
    times = []
    for _ in range(1 + rounds):
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


PARTS = {"peers": peers, "t2": t2, "f7": f7, "t5": t5}


def main() -> None:
    parser = make_parser(__doc__, "one round of fewer subnets and ways; within 120 s")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pictures", type=Path, help="a folder for the picture of f7")
    options = parser.parse_args()
    print(f"{describe_machine()}, {platform.python_version()}, torch {torch.__version__}, lightning {L.__version__}\n")
    keys = run_parts(PARTS, options.only, options.quick, options.pictures)
    if options.json:
        print(json.dumps({key: round(value, 3) for key, value in keys.items()}))


if __name__ == "__main__":
    main()
