"""Time to a loss of small real models beside neighbours that come and go (DynPipe, table II, figures 11 and 12), by
PipeDream-Flush, 2BW, PipeDream, PipeDream-Re and DynPipe without a forest, in turns; what a neighbour of one device
costs (figure 14); and spot instances that are taken away and come back (figure 3), by a trace.

    python benchmarks/papers/dynpipe/models.py [--quick] [--json] [--only loss|sensitivity|spot] [--trace FILE]
                                               [--pictures FOLDER]

Executed, by `Trainer.fit` on three processes: a BERT-like and a GPT-like transformer on the bytes of Python's manual,
a VGG-like network on scikit-learn's digits. Layers compute and train. *Emulated* are their time and the neighbours:
layers sleep as long as those of a larger model would, and longer on a rank while a trace says so. So two cores stand
for three devices. Losses are what training gives, each with its own staleness. The loss to reach is the highest of
those that all have in the end, means of SMOOTHED batches. PipeDream-Re re-partitions at the end of an epoch, a quarter
of the run; each time counts as a restart, which is measured once. Emulated neighbours slow all layers alike, which is
what DynPipe without a forest takes them to do, so that a forest would change nothing.

A trace has a line `batch,instances` for each change, such as `50,2`: two stages from that batch on. The default one is
made by a seed: a third instance goes with a chance of a tenth in each WINDOW of batches, and comes back so, too.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.dynpipe import restart_seconds
from benchmarks.harness.report import Panel, Picture, Report, make_parser, run_parts
from benchmarks.papers.dynpipe.trainings import LOSSES, Case, Paced, several
from lightning_pipes.testing.ranks import run_ranks, watch_ranks

RANKS, LAYERS, ROWS = 3, 12, 12
WIDTH, TOKENS, SIDE = 32, 16, 8
LOADS = {"light": 0.2, "heavy": 0.6}
STAY = 60.0
"""Batches that a neighbour stays on the average."""
SCHEDULES = {
    "flush": ("1f1b", 6),
    "2bw": ("pipedream_2bw", 2),
    "pipedream": ("pipedream", 1),
    "re": ("dynpipe", 1),
    "dynpipe": ("dynpipe", 1),
}
SYSTEMS = (*list(SCHEDULES)[:-1], "re free", "dynpipe")
"""The rows of the table; "re free" counts no time for restarts."""
SMOOTHED = 20
SHARES = (0.1, 0.2, 0.3, 0.4)
"""Of one device that a neighbour takes."""
WINDOW, CHANGE = 20, 0.1
"""Batches for which an instance stays at least, and the chance that it goes or comes then."""
MASKED = 3
"""Of TOKENS tokens, those that the BERT-like model has to find; 256 stands for them."""


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(257, WIDTH), nn.Embedding(TOKENS, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.places.weight  # type: ignore[no-any-return]


class Block(nn.Module):
    """A transformer's block, causal or not."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        return self.inner(x, mask, is_causal=self.causal)  # type: ignore[no-any-return]


def transformer(causal: bool) -> list[nn.Module]:
    """Return the layers of a transformer over bytes."""
    blocks = [Block(causal) for _ in range(LAYERS - 2)]
    return [Embedding(), *blocks, nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))]


def convolutions() -> list[nn.Module]:
    """Return the layers of a VGG-like network for small pictures."""
    widths = [1, *[16] * 5, *[32] * (LAYERS - 7)]
    layers: list[nn.Module] = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if a < b and a > 1 else []))
        for a, b in pairwise(widths)
    ]
    for layer in layers:
        nn.init.kaiming_normal_(layer[0].weight)  # type: ignore[index]
    return [*layers, nn.Flatten(), nn.Linear(32 * (SIDE // 2) ** 2, 10)]


class LitSmall(pl.LightningModule):
    """One of the models, with layers that take the time of larger ones."""

    def __init__(self, layers: Iterable[nn.Module], rate: float) -> None:
        super().__init__()
        self.net, self.rate = nn.Sequential(*(Paced(layer, 1 / ROWS) for layer in layers)), rate

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x).flatten(0, -2), y.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


def make_small(name: str, seed: int, case: Case) -> tuple[pl.LightningModule, DataLoader[Any]]:
    """Return a model and as many batches as the case has."""
    random, rows = torch.Generator().manual_seed(seed), ROWS * case.steps
    torch.manual_seed(seed)
    if name == "vgg":
        from sklearn.datasets import load_digits

        digits = load_digits()
        chosen = torch.randint(len(digits.target), (rows,), generator=random)
        x = torch.tensor(digits.data, dtype=torch.float32)[chosen].view(-1, 1, SIDE, SIDE) / 8 - 1
        y = torch.tensor(digits.target)[chosen]
        return LitSmall(convolutions(), 0.01), DataLoader(TensorDataset(x, y), batch_size=ROWS)
    text = torch.frombuffer(bytearray("".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - TOKENS - 1, (rows, 1), generator=random)
    tokens = text[starts + torch.arange(TOKENS + 1)]
    if name == "gpt":
        data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        return LitSmall(transformer(causal=True), 0.02), DataLoader(data, batch_size=ROWS)
    places = torch.rand(rows, TOKENS, generator=random).argsort(1)[:, :MASKED]
    y = torch.full((rows, TOKENS), -100).scatter(1, places, tokens[:, :-1].gather(1, places))
    x = tokens[:, :-1].scatter(1, places, 256)
    return LitSmall(transformer(causal=False), 0.02), DataLoader(TensorDataset(x, y), batch_size=ROWS)


def case_of(system: str, model: str, steps: int, seed: int = 0, **more: Any) -> Case:
    """Return a training of a model by one of SCHEDULES."""
    name, pieces = SCHEDULES[system]
    every, windows = (steps // 4, 1) if system == "re" else (5, 2)
    made = Case(name, RANKS, LAYERS, steps, replan=False, pieces=pieces, make=partial(make_small, model, seed), **more)
    return replace(made, every=every, windows=windows)


def seconds_to(ended: Sequence[float], losses: Sequence[float], loss: float) -> float:
    """Return seconds after the first batch until the mean of the last losses is as low."""
    for n in range(SMOOTHED, len(losses) + 1):
        if statistics.fmean(losses[n - SMOOTHED : n]) <= loss:
            return ended[n - 1] - ended[0]
    return float("inf")


def known_losses(found: dict[str, Any], wait: float = 0.0) -> tuple[list[float], list[float]]:
    """Return when batches ended, and their losses; the first ones are not known at once where batches overlap.

    Args:
        wait: seconds that each move takes more.
    """
    moves = [0, *accumulate(a != b for a, b in pairwise(found["layers"]))]
    rows = zip(found["ended"], moves, found["losses"], strict=True)
    known = [(at + wait * moved, loss) for at, moved, loss in rows if loss == loss]
    return [at for at, _ in known], [loss for _, loss in known]


def to_a_loss(quick: bool) -> Report:
    """Three models under both traces, in turns of all systems."""
    report, steps = Report(picture=Picture("Losses under the heavy trace")), 32 if quick else 240
    loads, rounds = ({"heavy": LOADS["heavy"]}, 1) if quick else (LOADS, 3)
    wait = restart_seconds(case_of("re", "gpt", steps))
    report.lines.append(f"a restart takes {wait:.1f} s")
    for model in ("bert", "gpt", "vgg"):
        for load, neighbours in loads.items():
            curves = [round_of(model, steps, seed, neighbours, wait) for seed in range(rounds)]
            add_lines(report, f"{model} {load}", curves)
            if load == "heavy":
                assert report.picture is not None
                report.picture.panels.append(panel_of(model, curves[0]))
    return report


Curve = tuple[list[float], list[float]]
"""When batches ended, in seconds, and their losses."""


def round_of(model: str, steps: int, seed: int, neighbours: float, wait: float) -> dict[str, Curve]:
    """Return the curve of each system beside the same neighbours, in an order that turns with the seed."""
    order = list(SCHEDULES) if seed % 2 == 0 else list(reversed(SCHEDULES))
    cases = [case_of(name, model, steps, seed, visitors=(neighbours, STAY, 3 + seed)) for name in order]
    (first, *_) = run_ranks(several, RANKS, cases, timeout=900)
    curves = {name: known_losses(found) for name, found in zip(order, first, strict=True)}
    restarted = known_losses(first[order.index("re")], wait)
    return {name: restarted if name == "re" else curves[name.removesuffix(" free")] for name in SYSTEMS}


def add_lines(report: Report, title: str, curves: Sequence[dict[str, Curve]]) -> None:
    """Add a line for each system: seconds to the loss that all reach, samples a second, and the slowest iterations."""
    targets = [max(statistics.fmean(losses[-SMOOTHED:]) for _, losses in each.values()) for each in curves]
    took = {
        name: [seconds_to(*each[name], target) for each, target in zip(curves, targets, strict=True)]
        for name in SYSTEMS
    }
    loss = statistics.median(targets)
    for name, seconds in took.items():
        steps = [b - a for each in curves for a, b in pairwise(each[name][0])]
        rate, slow = ROWS / statistics.fmean(steps), statistics.quantiles(steps, n=10)[-1]
        ratios = [a / b for a, b in zip(seconds, took["dynpipe"], strict=True)]
        key = f"{title} {name}".replace(" ", "_")
        report.keys |= {key: statistics.median(ratios), f"{key}_rate": rate}
        report.lines.append(
            f"{title:10} {name:9} {statistics.median(seconds):6.1f} s ({min(seconds):.1f}-{max(seconds):.1f}) to a "
            f"loss of {loss:.2f}, of DynPipe's {statistics.median(ratios):.2f} ({min(ratios):.2f}-"
            f"{max(ratios):.2f}); {rate:.0f} samples/s, nine of ten iterations within {1e3 * slow:.0f} ms"
        )
        print(report.lines[-1], flush=True)


def panel_of(model: str, curves: dict[str, Curve]) -> Panel:
    """Return the smoothed loss of each system over time (figure 11)."""
    ends = [at[-1] - at[0] for at, _ in curves.values()]
    x = [max(ends) * n / 24 for n in range(1, 25)]
    lines = {name: [loss_at(curve, seconds) for seconds in x] for name, curve in curves.items()}
    return Panel(model, "seconds", "loss", x, lines)


def loss_at(curve: Curve, seconds: float) -> float:
    """Return the mean of the last losses that were known so long after the first batch."""
    at, losses = curve
    known = max(1, sum(end - at[0] <= seconds for end in at))
    return statistics.fmean(losses[max(0, known - SMOOTHED) : known])


def sensitivity(quick: bool) -> Report:
    """A neighbour takes a share of the second of three devices from a batch on (figure 14)."""
    report, steps, since = Report(), 32 if quick else 80, 10
    for share in SHARES[-1:] if quick else SHARES:
        slow = ((since, 1 / (1 - share)),)
        cases = [case_of(name, "gpt", steps, slow=slow, at=1) for name in ("pipedream", "dynpipe")]
        (first, *_) = run_ranks(several, RANKS, cases, timeout=300)
        medians = []
        for found in first:
            steps_taken = [b - a for a, b in pairwise(found["ended"])]
            medians.append(
                statistics.median(steps_taken[-steps // 4 :]) / statistics.median(steps_taken[2 : since - 1])
            )
        report.keys |= {f"share_{share:.0%}_never": medians[0], f"share_{share:.0%}_moved": medians[1]}
        report.lines.append(
            f"a neighbour takes {share:.0%} of a device: a batch takes {medians[0]:.2f} times as long, "
            f"{medians[1]:.2f} times with DynPipe"
        )
    return report


def made_trace(steps: int, seed: int = 3) -> list[tuple[int, int]]:
    """Return changes of instances, as a file has them: the batch, and how many there are from it on."""
    chance, instances = random.Random(seed), RANKS
    found: list[tuple[int, int]] = []
    for batch in range(WINDOW, steps, WINDOW):
        if chance.random() < CHANGE or (not found and batch + WINDOW >= steps // 2):  # one goes at least
            instances = RANKS - 1 if instances == RANKS else RANKS
            found.append((batch, instances))
    return found


def read_trace(path: Path) -> list[tuple[int, int]]:
    """Return the changes of instances in a file."""
    found = [tuple(map(int, line.split(","))) for line in path.read_text().splitlines() if line.strip()]
    if not all(len(pair) == 2 and 2 <= pair[1] <= RANKS for pair in found) or found != sorted(found):
        raise SystemExit(f"{path}: give lines of batch,instances in their order, with 2 to {RANKS} instances")
    return found  # type: ignore[return-value]


def spot_run(base: Case, trace: Sequence[tuple[int, int]], folder: str) -> list[tuple[int, float, float, int]]:
    """Train on as many stages as there are instances; return the step, the end and the loss of each batch, and the
    number of the segment.

    Where an instance goes its process is killed, and the others end. Then, and where one comes, training goes on from
    the last checkpoint.
    """
    instances, rows, resume = RANKS, [], ""
    for number, (until, following) in enumerate([*trace, (base.steps, 0)]):
        killed = until if following and following < instances else None
        case = replace(base, ranks=instances, folder=folder, resume=resume, killed=killed, stop=until)
        case = replace(case, stop=None) if killed is not None else case
        results = watch_ranks(several, instances, [case], timeout=600)
        failed = [result.error for result in results if result.error]
        assert len(failed) == (instances if killed is not None else 0), failed
        file = Path(folder) / LOSSES
        read = [line.split() for line in file.read_text().splitlines()]
        rows += [(int(step), float(at), float(loss), number) for step, at, loss in read]
        file.unlink()
        resume = str(max(Path(folder).glob("step=*.ckpt"), key=lambda each: int(each.stem[5:])))
        instances = following
    return rows


def taken_away(quick: bool, trace: Sequence[tuple[int, int]] = ()) -> Report:
    """Instances go and come by a trace; the share of the time in which batches were trained that counted."""
    report, steps, saves = Report(), 45 if quick else 200, 10
    trace = [pair for pair in trace or made_trace(steps) if pair[0] < steps]
    for name in ("flush", "dynpipe"):
        base = case_of(name, "gpt", steps)
        (whole, *_) = run_ranks(several, RANKS, [base], timeout=600)[0]
        with tempfile.TemporaryDirectory() as folder:
            rows = spot_run(replace(base, saves=saves), trace, folder)
        last = {step: n for n, (step, *_) in enumerate(rows)}
        taken = [b[1] - a[1] for a, b in pairwise(rows)]
        counted = [t for n, t in enumerate(taken, 1) if rows[n][3] == rows[n - 1][3] and last[rows[n][0]] == n]
        waits = [t for n, t in enumerate(taken, 1) if rows[n][3] != rows[n - 1][3]]
        losses = {step: rows[n][2] for step, n in last.items() if rows[n][2] == rows[n][2]}
        before = {n: loss for n, loss in enumerate(whole["losses"], 1) if loss == loss}
        apart = max(abs(losses[n] - before[n]) for n in losses.keys() & before.keys())
        again = len(rows) - len(last)
        share = sum(counted) / sum(taken)
        report.keys |= {
            f"spot_{name}_effective": share,
            f"spot_{name}_wait_s": statistics.fmean(waits) if waits else 0.0,
            f"spot_{name}_again": again,
            f"spot_{name}_apart": apart,
        }
        changes = ", ".join(f"{instances} from batch {batch} on" for batch, instances in trace)
        report.lines.append(
            f"{name:8} instances: {RANKS}, {changes}. {share:.0%} of the time trained batches that counted; a change "
            f"took {statistics.fmean(waits) if waits else 0:.1f} s, and {again} batches ran again. Loss "
            f"{statistics.fmean(list(losses.values())[-SMOOTHED:]):.3f} in the end, "
            f"{statistics.fmean(known_losses(whole)[1][-SMOOTHED:]):.3f} undisturbed; losses at most {apart:.1e} apart"
        )
    return report


PARTS = {"loss": to_a_loss, "sensitivity": sensitivity, "spot": taken_away}


def main() -> None:
    parser = make_parser(__doc__, "fewer batches, one round, the heavy trace only")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--trace", type=Path, help="of spot instances: a line batch,instances for each change")
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of the losses")
    options = parser.parse_args()
    parts = PARTS | ({"spot": partial(taken_away, trace=read_trace(options.trace))} if options.trace else {})
    keys = run_parts(parts, [options.only] if options.only else parts, options.quick, options.pictures)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
