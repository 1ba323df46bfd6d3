"""The number of batches until a target with S stages and weight stashing, measured and predicted.

The measurements are compared with T(S) of DynPipe's theory, whose constants are estimated in a few steps, and with a
curve that is fitted to some of the measurements.

The model consists of linear layers and is trained on handwritten digits in one process. The gradient of a batch uses
weights that are as old as in a pipeline without flushes, in which each layer belongs to a stage. A training ends when
the mean squared gradient of the last batches is at most the target. The last table compares training with momentum on
stale weights with training on weights that are extrapolated to the update of their batch (`predict=True`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.harness.report import QUIET, Output, hush
from lightning_pipes import GradientProbe
from lightning_pipes.strategies.dynpipe import Constants, Iterations

LAYERS, WIDTH, ROWS = 8, 64, 64
RATE = 0.5
SHARE = 0.01
"""The target as a share of the mean squared gradient at the start."""
MOMENTUM, RATES = 0.9, (0.01, 0.03, 0.05)
MOST = 4000
"""The number of batches after which a run has failed to reach the target."""
MEAN = 20
"""The number of batches whose squared gradients are averaged."""
FITTED = (1, 4)
"""The numbers of stages to which the curve is fitted. It predicts all other numbers."""


def data() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    return x - x.mean(0), torch.tensor(digits.target)


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches without end, in a new random order in each epoch."""
    x, y = data()
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(x), generator=generator).split(ROWS):  # type: ignore[no-untyped-call]
            if len(rows) == ROWS:
                yield x[rows], y[rows]


def network(seed: int) -> list[nn.Linear]:
    torch.manual_seed(seed)
    widths = [64, *[WIDTH] * (LAYERS - 1), 10]
    return [nn.Linear(a, b) for a, b in pairwise(widths)]


def loss_of(weights: Sequence[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss, given weights and biases in turn. Inner layers have a residual connection."""
    for n in range(0, len(weights), 2):
        out = F.linear(x, weights[n], weights[n + 1])
        x = out if n in (0, len(weights) - 2) else x + out.relu()
    return F.cross_entropy(x, y)


def lags(stages: int) -> list[int]:
    """Return the age of each layer's weights in batches, which is the number of stages after its stage."""
    return [stages - 1 - layer * stages // LAYERS for layer in range(LAYERS)]


def taken(
    stages: int, target: float, seed: int, rate: float = RATE, momentum: float = 0.0, predict: bool = False
) -> float:
    """Return the number of batches until the target, or infinity if it is not reached."""
    now = [p.detach().clone() for layer in network(seed) for p in layer.parameters()]
    still = [torch.zeros_like(w) for w in now]
    old: deque[tuple[list[torch.Tensor], list[torch.Tensor]]] = deque([(now, still)], maxlen=stages)
    squares: deque[float] = deque(maxlen=MEAN)
    for number, (x, y) in enumerate(batches(seed), 1):
        used = []
        for n, lag in enumerate(lags(stages)):
            behind = min(lag, len(old) - 1)
            weights, speeds = old[-1 - behind]
            for k in (2 * n, 2 * n + 1):
                ahead = behind * rate * speeds[k] if predict else 0.0
                used.append((weights[k] - ahead).detach().requires_grad_())
        gradients = torch.autograd.grad(loss_of(used, x, y), used)
        squares.append(sum(float(g.square().sum()) for g in gradients))
        speeds = [momentum * v + g for v, g in zip(old[-1][1], gradients, strict=True)]
        old.append(([w - rate * v for w, v in zip(old[-1][0], speeds, strict=True)], speeds))
        mean = statistics.fmean(squares)
        if len(squares) == MEAN and mean <= target:
            return number
        if number == MOST or not math.isfinite(mean):
            return math.inf
    raise AssertionError


class Digits(pl.LightningModule):
    """The model in a LightningModule, for the callback that estimates the constants."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(network(seed))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return loss_of([*self.parameters()], *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def estimated(seed: int, steps: int = 20) -> Constants:
    """Return the constants of the theory, estimated in the first steps."""
    probe = GradientProbe()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[probe],
        **QUIET,
    )
    trainer.fit(Digits(seed), DataLoader([*islice(batches(seed), steps)], batch_size=None))  # type: ignore[arg-type]
    return Constants.from_probes(probe.loss, probe.probes)


def most_stages(iterations: Iterations) -> float:
    """Return the number of stages at which the predicted number of batches becomes infinite.

    It is infinite if the prediction has no penalty for stages.
    """
    return iterations.penalty ** (-1 / 3) if iterations.penalty else math.inf


def staleness(seeds: int) -> Output:
    """Yield batches until the target by stages, measured and predicted, and with predicted weights."""
    torch.set_num_threads(1)
    hush()
    constants = [estimated(seed) for seed in range(seeds)]
    noise = statistics.fmean(c.noise for c in constants)
    target = SHARE * noise
    mean = Constants(
        *(statistics.fmean(getattr(c, name) for c in constants) for name in ("loss", "lipschitz", "noise"))
    )
    theory = Iterations.of_theory(mean, RATE, target)
    measured = {s: statistics.median(taken(s, target, seed) for seed in range(seeds)) for s in (1, 2, 4, 6, 8)}
    reached = {s: t for s, t in measured.items() if math.isfinite(t)}
    fitted = Iterations.from_measured({s: reached[s] for s in FITTED})
    yield f"f(w0) {mean.loss:.2f}, L {mean.lipschitz:.1f}, xi^2 {mean.noise:.3f}; target {target:.4f}; {seeds} seeds"
    yield f"{'stages':>6} {'measured':>9} {'theory':>9} {'fitted':>9}"
    for stages, took in measured.items():
        yield f"{stages:6} {took:9.0f} {theory(stages):9.0f} {fitted(stages):9.0f}"
    others = {s: t for s, t in reached.items() if s not in FITTED}
    worst = max(abs(fitted(stages) / took - 1) for stages, took in others.items())
    failed = [s for s in measured if s not in reached]
    yield f"the curve for {FITTED} stages is off by up to {worst:.0%} for others; not reached with {failed}"
    yield f"the bound of the theory is finite below {most_stages(theory):.2f} stages at this rate"
    keys: dict[str, float] = {}
    yield f"with a momentum of {MOMENTUM}: batches with stale weights, and with predicted weights"
    for rate in RATES:
        for stages in (2, 4, 8):
            both = [
                statistics.median(taken(stages, target, seed, rate, MOMENTUM, predict) for seed in range(seeds))
                for predict in (False, True)
            ]
            yield f"rate {rate:5} {stages:3} stages " + "".join(f"{each:9.0f}" for each in both)
            keys |= {f"stale_{rate}_{stages}": both[0], f"predicted_{rate}_{stages}": both[1]}
    rise = reached[max(reached)] / measured[1]
    keys |= {"fitted_error": worst, "rise": rise, "reached": max(reached), "fitted_most": most_stages(fitted)}
    keys |= {"theory_most": most_stages(theory)}
    yield {name: each for name, each in keys.items() if math.isfinite(each)}
