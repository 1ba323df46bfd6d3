"""The paper's workload (S V, F7) on small real models, executed: siblings in an array, and without one.

    python benchmarks/papers/jap/workload.py [--quick] [--json] [--only vgg|resnet|bert|gpt] [--ranks 2]

A process for each of `--ranks` cores. Siblings are a grid of batch sizes, learning rates and weight decays over one
data set, as in the paper: a VGG-like and a ResNet-like network on scikit-learn's digits by SGD with momentum, a
BERT-like and a GPT-like transformer on the bytes of Python's manual by AdamW. All systems train all siblings for an
epoch, by ordinary Trainers unless they are plain, and take turns:

- array: `JobArray`, a stage a rank; rounds: the paper's, in a searched order of whole batches.
- 1F1B, GPipe and Hanayo: one sibling after another, each with the number of micro-batches that simulation with measured
  layers finds best. One sibling of each batch size runs, and counts for those of its size.
- processes: siblings side by side, each on one process, plain PyTorch; the best that a user has where a model fits one.

The ResNet-like network has GroupNorm: BatchNorm sees other samples in micro-batches. Losses of an array's siblings are
compared with those of plain processes.
"""

from __future__ import annotations

import itertools
import json
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from benchmarks.engine import Block
from benchmarks.harness.report import Report, make_parser, run_parts
from benchmarks.harness.silence import QUIET, hush
from benchmarks.papers.jap.peers import MICROBATCHES
from lightning_pipes import JobArray, PipelineStrategy
from lightning_pipes.cost import ModelProfile
from lightning_pipes.engine.compute.profiler import profile_layers
from lightning_pipes.ir import Schedule, Span
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import makespan
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.hanayo import Hanayo
from lightning_pipes.strategies.jap import round_order
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.ranks import run_ranks

WIDTH, TOKENS, BLOCKS = 64, 32, 6
MASKED = 5
"""Of TOKENS tokens, those that the BERT-like model has to find."""
BATCHES = {"vgg": (16, 32, 64, 96), "resnet": (16, 32, 64, 96), "bert": (8, 16, 24, 32), "gpt": (8, 16, 24, 32)}
RATES, DECAYS = (1e-2, 1e-3), (1e-4, 1e-5)
SINGLES: dict[str, Schedule] = {"1F1B": OneFOneB(), "GPipe": GPipe(), "Hanayo": Hanayo(waves=1)}
APART = 2e-4
"""Losses of siblings may differ by so much, relatively, from those of plain processes: kernels depend on cores."""


@dataclass(frozen=True)
class Sibling:
    """The settings of one training."""

    model: str
    rows: int
    rate: float
    decay: float


def grid(model: str, siblings: int) -> list[Sibling]:
    """Return the first siblings of the grid, all batch sizes in turn."""
    each = itertools.product(DECAYS, RATES, BATCHES[model])
    return [Sibling(model, rows, rate, decay) for decay, rate, rows in each][:siblings]


class Residual(nn.Module):
    """Two convolutions and what goes around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, width, width, 3, padding=1, bias=False)
        self.inner = nn.Sequential(conv(), nn.GroupNorm(4, width), nn.ReLU(), conv(), nn.GroupNorm(4, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.inner(x))


def layers_of(model: str) -> list[nn.Module]:
    """Return the layers of a model, the same in every call."""
    torch.manual_seed(0)
    if model == "vgg":
        widths = [1, 16, 16, 32, 32, 32, 64, 64]
        pools = {3: [nn.MaxPool2d(2)], 6: [nn.MaxPool2d(2)]}
        parts: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), *pools.get(n, []))
            for n, (a, b) in enumerate(itertools.pairwise(widths))
        ]
        return [*parts, nn.Sequential(nn.Flatten(), nn.Linear(64 * 4, 64), nn.ReLU()), nn.Linear(64, 10)]
    if model == "resnet":
        stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.GroupNorm(4, 32), nn.ReLU())
        last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        return [stem, *(Residual(32) for _ in range(BLOCKS)), last]
    if model == "gpt":
        return [nn.Embedding(257, WIDTH), *(Block(WIDTH, 4) for _ in range(BLOCKS)), nn.Linear(WIDTH, 256)]
    encoder = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, activation="gelu")
    return [nn.Embedding(257, WIDTH), *(encoder() for _ in range(BLOCKS)), nn.Linear(WIDTH, 256)]


@cache
def samples(model: str, count: int) -> TensorDataset:
    """Return so many samples, the same for all siblings."""
    random = torch.Generator().manual_seed(0)
    if model in ("vgg", "resnet"):
        from sklearn.datasets import load_digits

        digits = load_digits()
        chosen = torch.randint(len(digits.target), (count,), generator=random)
        x = torch.tensor(digits.data, dtype=torch.float32)[chosen].view(-1, 1, 8, 8) / 8 - 1
        return TensorDataset(x, torch.tensor(digits.target)[chosen])
    text = torch.frombuffer(bytearray("".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - TOKENS - 1, (count, 1), generator=random)
    tokens = text[starts + torch.arange(TOKENS + 1)]
    if model == "gpt":
        return TensorDataset(tokens[:, :-1], tokens[:, 1:])
    places = torch.rand(count, TOKENS, generator=random).argsort(1)[:, :MASKED]
    y = torch.full((count, TOKENS), -100).scatter(1, places, tokens[:, :-1].gather(1, places))
    return TensorDataset(tokens[:, :-1].scatter(1, places, 256), y)


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of all outputs."""
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


class Lit(L.LightningModule):
    """A sibling as a user writes it."""

    def __init__(self, sibling: Sibling) -> None:
        super().__init__()
        self.sibling, self.net, self.loss = sibling, nn.Sequential(*layers_of(sibling.model)), float("nan")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return loss_of(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.loss = float(outputs["loss"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        s = self.sibling
        if s.model in ("vgg", "resnet"):
            return torch.optim.SGD(self.parameters(), lr=s.rate, momentum=0.9, weight_decay=s.decay)
        return torch.optim.AdamW(self.parameters(), lr=s.rate, weight_decay=s.decay)


def batches(sibling: Sibling, epoch: int) -> DataLoader[Any]:
    """Return the batches of an epoch; all batch sizes have as many samples, but for a rest."""
    whole: Dataset[Any] = Subset(samples(sibling.model, epoch), range(epoch // sibling.rows * sibling.rows))
    return DataLoader(whole, sibling.rows)


def fit(
    ranks: int, sibling: Sibling, epoch: int, schedule: Schedule | str, microbatches: int, layers: Sequence[Span]
) -> float:
    """Train one sibling by a Trainer and return the last loss."""
    module = Lit(sibling)
    strategy = PipelineStrategy(schedule, microbatches=microbatches, partition=[span.start for span in layers[1:]])
    L.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=1, **QUIET).fit(
        module, batches(sibling, epoch)
    )
    return module.loss


def fit_plain(sibling: Sibling, epoch: int) -> float:
    """Train one sibling by plain PyTorch on this process and return the last loss."""
    module, loss = Lit(sibling), torch.zeros(())
    optimizer = module.configure_optimizers()
    for n, batch in enumerate(batches(sibling, epoch)):
        optimizer.zero_grad()
        loss = module.training_step(batch, n)
        torch.autograd.backward(loss)
        optimizer.step()
    return float(loss)


def profile(rank: int, model: str) -> ModelProfile:
    """Return what the layers of a model take on one core, with the loss after them."""
    torch.set_num_threads(1)
    layers = layers_of(model)
    data = samples(model, max(BATCHES[model])).tensors

    class WithLoss(nn.Module):
        """The last layer with the loss."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = layers[-1](x)
            return loss_of(out, data[1][: len(out)])

    sizes = [rows for rows in MICROBATCHES if rows < max(BATCHES[model])] + [max(BATCHES[model])]
    return profile_layers([*layers[:-1], WithLoss()], {rows: data[0][:rows] for rows in sizes}, repeats=3)


def cut(found: ModelProfile, stages: int) -> tuple[Span, ...]:
    """Return the layers of stages, balanced by time."""
    return even_partition([max(layer.forward)[1] + max(layer.backward)[1] for layer in found.layers], stages)


def choose_microbatches(schedule: Schedule, rows: int, found: ModelProfile, ranks: int) -> int:
    """Return the number of micro-batches with which a batch is fastest, in simulation."""
    costs = found.stage_costs(cut(found, len(schedule.place_stages(ranks))))
    times = {}
    for m in (m for m in MICROBATCHES if m <= rows):
        plan = even_plan(schedule, ranks, m, rows)
        times[m] = makespan(schedule.program(plan), plan, costs)
    return min(times, key=times.__getitem__)


@dataclass(frozen=True)
class Case:
    """A model's siblings, and what was found out about its layers."""

    siblings: tuple[Sibling, ...]
    epoch: int
    profile: ModelProfile
    ranks: int

    def in_array(self, rounds: Any = None) -> tuple[float, list[float]]:
        """Return the seconds of all siblings in an array, and their last losses."""
        begun, layers = time.monotonic(), cut(self.profile, self.ranks)
        array: JobArray[float] = JobArray(len(self.siblings), progress=False, rounds=rounds)
        losses = {}
        for outcome in array.run(partial(fit, self.ranks, s, self.epoch, "jap", 1, layers) for s in self.siblings):
            if outcome.error is not None:
                raise outcome.error
            losses[outcome.index] = outcome.value or float("nan")
        return time.monotonic() - begun, [losses[n] for n in range(len(self.siblings))]

    def one_by_one(self, schedule: Schedule) -> float:
        """Return the seconds of all siblings one after another; those of one batch size take equally long."""
        total, layers = 0.0, cut(self.profile, len(schedule.place_stages(self.ranks)))
        for rows in BATCHES[self.siblings[0].model]:
            same = [s for s in self.siblings if s.rows == rows]
            m = choose_microbatches(schedule, rows, self.profile, self.ranks)
            dist.barrier()
            begun = time.monotonic()
            fit(self.ranks, same[0], self.epoch, schedule, m, layers)
            dist.barrier()
            total += len(same) * (time.monotonic() - begun)
        return total

    def side_by_side(self, rank: int) -> tuple[float, dict[int, float]]:
        """Return the seconds of all siblings, each on one process, and the last losses of this rank's."""
        begun = time.monotonic()
        losses = {n: fit_plain(s, self.epoch) for n, s in enumerate(self.siblings) if n % self.ranks == rank}
        dist.barrier()
        return time.monotonic() - begun, losses


def measure(rank: int, case: Case, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each system, in turns, and how far losses are from those of plain processes."""
    hush()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    plain: dict[int, float] = {}
    apart: list[float] = []

    def array(order: Any = None) -> float:
        seconds, losses = case.in_array(order)
        apart.extend(abs(losses[n] / plain[n] - 1) for n in plain)
        return seconds

    def processes() -> float:
        seconds, losses = case.side_by_side(rank)
        plain.update(losses)
        return seconds

    systems: dict[str, Callable[[], float]] = {
        "processes": processes,
        "array": array,
        "rounds": partial(array, round_order),
        **{name: partial(case.one_by_one, schedule) for name, schedule in SINGLES.items()},
    }
    found: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds):
        for name in list(systems)[:: -1 if turn % 2 else 1]:
            dist.barrier()
            found[name].append(systems[name]())
    return {**found, "apart": apart}


def compare(model: str, ranks: int, quick: bool) -> Report:
    """Compare all systems on one model."""
    siblings = tuple(grid(model, 8 if quick else 16))
    (layers,) = run_ranks(profile, 1, model, timeout=600)
    case = Case(siblings, 96 if quick else 768, layers, ranks)
    results = run_ranks(measure, ranks, case, 1 if quick else 3, timeout=3600)
    differences = [a for each in results for a in each["apart"]]
    apart = max(differences)
    found = {name: statistics.median(seconds) for name, seconds in results[0].items() if name != "apart"}
    trained = sum(case.epoch // s.rows * s.rows for s in siblings)
    report = Report(
        [
            f"{model}: {len(siblings)} siblings, {case.epoch} samples each, batches of {BATCHES[model]}; the second "
            f"stage begins at layer {cut(layers, ranks)[1].start} of {len(layers.layers)}; losses at most {apart:.1e} "
            "from plain ones"
        ]
    )
    if not all(a < APART for a in differences):  # no numbers, too
        raise RuntimeError(f"{model}: losses of siblings are {apart:.1e} from those of plain processes")
    for name, seconds in found.items():
        report.lines.append(
            f"  {name:10} {seconds:7.2f} s, {trained / seconds:7.1f} samples a second; over the array's time "
            f"{seconds / found['array']:.2f}"
        )
        report.keys[f"{model}_array_over_{name}"] = seconds / found["array"]
    del report.keys[f"{model}_array_over_array"]
    return report


def main() -> None:
    parser = make_parser(__doc__, "eight siblings, 96 samples, one turn; within 120 s")
    parser.add_argument("--only", choices=BATCHES, help="one model")
    parser.add_argument("--ranks", type=int, default=2, help="processes, a core each")
    options = parser.parse_args()
    parts = {name: partial(compare, name, options.ranks) for name in BATCHES}
    keys = run_parts(parts, [options.only] if options.only else parts, options.quick)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
