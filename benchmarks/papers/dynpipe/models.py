"""Time to a loss of small real models beside neighbours that come and go (DynPipe, table II), by PipeDream-Flush, 2BW,
PipeDream and DynPipe, in turns; and a spot instance that is taken away, after which training goes on with fewer stages.

    python benchmarks/papers/dynpipe/models.py [--quick] [--json] [--only loss|spot]

Executed, by `Trainer.fit` on three processes: a BERT-like and a GPT-like transformer on the bytes of Python's manual,
a VGG-like network on scikit-learn's digits. Layers compute and train. *Emulated* are their time and the neighbours:
layers sleep as long as those of a larger model would, and longer on a rank while a trace says so. So two cores stand
for three devices. Losses are what training gives, each with its own staleness. The loss to reach is the highest of
those that the four have in the end, means of SMOOTHED batches.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.report import Report, make_parser, run_parts
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
    "dynpipe": ("dynpipe", 1),
}
SMOOTHED = 20
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


def case_of(schedule: str, model: str, steps: int, seed: int = 0, **more: Any) -> Case:
    """Return a training of a model by one of SCHEDULES."""
    name, pieces = SCHEDULES[schedule]
    return Case(
        name, RANKS, LAYERS, steps, replan=False, pieces=pieces, make=partial(make_small, model, seed), every=5, **more
    )


def seconds_to(ended: Sequence[float], losses: Sequence[float], loss: float) -> float:
    """Return seconds after the first batch until the mean of the last losses is as low."""
    for n in range(SMOOTHED, len(losses) + 1):
        if statistics.fmean(losses[n - SMOOTHED : n]) <= loss:
            return ended[n - 1] - ended[0]
    return float("inf")


def known_losses(found: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return when batches ended, and their losses; the first ones are not known at once where batches overlap."""
    pairs = [(at, loss) for at, loss in zip(found["ended"], found["losses"], strict=True) if loss == loss]
    return [at for at, _ in pairs], [loss for _, loss in pairs]


def to_a_loss(quick: bool) -> Report:
    """Three models under both traces, in turns of all schedules."""
    report, steps, rounds = Report(), 60 if quick else 240, 1 if quick else 3
    for model in ("bert", "gpt", "vgg"):
        for load, neighbours in LOADS.items():
            took: dict[str, list[float]] = {name: [] for name in SCHEDULES}
            target = []
            for seed in range(rounds):
                cases = [case_of(name, model, steps, seed, visitors=(neighbours, STAY, 3 + seed)) for name in SCHEDULES]
                order = range(len(cases)) if seed % 2 == 0 else range(len(cases))[::-1]
                (first, *_) = run_ranks(several, RANKS, [cases[n] for n in order], timeout=900)
                curves = {list(SCHEDULES)[n]: known_losses(found) for n, found in zip(order, first, strict=True)}
                target.append(max(statistics.fmean(losses[-SMOOTHED:]) for _, losses in curves.values()))
                for name, curve in curves.items():
                    took[name].append(seconds_to(*curve, target[-1]))
            own = took["dynpipe"]
            for name, seconds in took.items():
                ratios = [a / b for a, b in zip(seconds, own, strict=True)]
                report.keys[f"{model}_{load}_{name}"] = statistics.median(ratios)
                report.lines.append(
                    f"{model:4} {load:5} {name:9} {statistics.median(seconds):6.1f} s ({min(seconds):.1f}-"
                    f"{max(seconds):.1f}) to a loss of {statistics.median(target):.2f}; of DynPipe's "
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
                )
    return report


def taken_away(quick: bool) -> Report:
    """The process of stage 1 is killed; training goes on from the last checkpoint, on two stages."""
    report, steps, killed, saves = Report(), 90 if quick else 200, 50 if quick else 110, 20
    for name in ("flush", "dynpipe"):
        base = case_of(name, "gpt", steps)
        (whole, *_) = run_ranks(several, RANKS, [base], timeout=600)[0]
        with tempfile.TemporaryDirectory() as folder:
            results = watch_ranks(
                several, RANKS, [replace(base, killed=killed, saves=saves, folder=folder)], timeout=600
            )
            ended = time.monotonic()
            assert all(result.error for result in results), "a killed rank ends all"
            path = max(Path(folder).glob("step=*.ckpt"), key=lambda each: int(each.stem[5:]))
            again = replace(base, ranks=2, saves=saves, folder=folder, resume=str(path))
            run_ranks(several, 2, [again], timeout=600)
            rows = [line.split() for line in (Path(folder) / LOSSES).read_text().splitlines()]
        first = next(n for n in range(1, len(rows)) if float(rows[n][1]) > ended)
        lost, waits = int(path.stem[5:]), float(rows[first][1]) - float(rows[first - 1][1])
        kept = {int(step): float(loss) for step, _, loss in rows if loss != "nan"}
        before = dict(enumerate(whole["losses"], 1))
        apart = max(abs(kept[n] - before[n]) for n in kept.keys() & before.keys() if before[n] == before[n])
        last = statistics.fmean(list(kept.values())[-SMOOTHED:])
        undisturbed = statistics.fmean(known_losses(whole)[1][-SMOOTHED:])
        report.keys |= {f"spot_{name}_wait_s": waits, f"spot_{name}_again": killed - lost, f"spot_{name}_apart": apart}
        report.lines.append(
            f"{name:8} killed after batch {killed}; {waits:.1f} s from the last batch before to the first one after, "
            f"on 2 stages, from batch {lost}; loss {last:.3f} in the end, {undisturbed:.3f} undisturbed on 3 stages; "
            f"losses at most {apart:.1e} apart"
        )
    return report


PARTS = {"loss": to_a_loss, "spot": taken_away}


def main() -> None:
    parser = make_parser(__doc__, "fewer batches, one round")
    parser.add_argument("--only", choices=PARTS, help="one part")
    options = parser.parse_args()
    keys = run_parts(PARTS, [options.only] if options.only else PARTS, options.quick)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
