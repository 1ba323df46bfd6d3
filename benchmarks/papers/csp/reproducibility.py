"""A supernet that is trained by several systems on 1, 2, 4 and 8 stages (NASPipe, Zhao et al. 2022).

The results show which systems give the same weights (Table 3), the accuracy of a search with these weights, the loss
(Figure 4), and the order in which subnets use a layer (Table 4).

The supernet is really trained on handwritten digits, with one process for each stage. It has twelve blocks of eight
candidates with dropout and LayerNorm, and a first and a last layer that all subnets share. The optimizer is Adam. A
fifth of the images is held out; an evolution searches for the subnet with the highest accuracy on these images, with
the weights of the supernet. CSP uses the values of `shared` that the names of its variants contain. BSP has bulks with
as many subnets as there are stages, and ASP is the schedule of PipeDream. Both update the shared layers without a fixed
order.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from benchmarks.harness.report import QUIET, Output
from lightning_pipes import PipelineStrategy, ReproducibilityLog
from lightning_pipes.sim.records.training_record import TrainingRecord, compare_runs
from lightning_pipes.supernets import ChoiceBlock, Evolution, SubnetStream, Supernet, Uniform, bulk_synchronous
from lightning_pipes.testing.ranks import run_ranks

WIDTH, BLOCKS, CANDIDATES, ROWS = 16, 12, 8, 16
PIXELS, DIGITS = 64, 10
SMOOTHED = 40
"""The number of losses that are averaged for the picture."""
TRIED, GENERATION, PARENTS = 200, 25, 5
"""The number of subnets that the search tries, the size of a generation, and the number of its parents."""
SYSTEMS = {
    "CSP sequential": "sequential",
    "CSP delayed by 16": "delayed",
    "CSP frozen": "frozen",
    "BSP": "sequential",
    "ASP": "sequential",
}


class Search(L.LightningModule):
    def __init__(self, shared: Any, bulk: int) -> None:
        super().__init__()
        blocks = (ChoiceBlock([Candidate() for _ in range(CANDIDATES)]) for _ in range(BLOCKS))
        delay = 16 if shared == "delayed" else None
        self.net = Supernet(nn.Linear(PIXELS, WIDTH), *blocks, nn.Linear(WIDTH, DIGITS), shared=shared, delay=delay)
        self.bulk = bulk

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x, y), subnet = batch
        return F.cross_entropy(self.net((x, subnet)), y)

    def layers_of_batch(self, batch: Any) -> Any:
        layers = self.net.layers_of(batch[-1])
        return bulk_synchronous(layers, batch[-1].id, self.bulk) if self.bulk else layers

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Candidate(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)  # type: ignore[no-any-return]


class Found(NamedTuple):
    """The results of one training.

    Attributes:
        losses: the losses of the batches, as hexadecimal text.
        weights: a hash of all weights.
        accuracy: the accuracy of the best subnet that a search found.
        record: the record of the training.
    """

    losses: list[str]
    weights: str
    accuracy: float
    record: TrainingRecord


def trained(system: str, stages: int, subnets: int) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        weights, accuracy = run_ranks(train, stages, system, stages, subnets, folder, timeout=600)[0]
        record = TrainingRecord.load(Path(folder))
    return Found([record.losses[n] for n in range(subnets)], weights, accuracy, record)


def train(rank: int, system: str, stages: int, subnets: int, folder: str) -> tuple[str, float]:
    """Train on one rank, and return a hash of the final weights and, on rank 0, the accuracy of a search."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    module = Search(SYSTEMS[system], bulk=stages if system == "BSP" else 0)
    images, digits = load_digits(return_X_y=True)
    all_x, all_y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    held_out = len(images) // 5
    chosen = torch.randint(len(images) - held_out, (subnets, ROWS), generator=torch.Generator().manual_seed(0))
    x, y = all_x[chosen], all_y[chosen]
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=None)
    layers = BLOCKS + 2
    strategy = PipelineStrategy(
        "pipedream" if system == "ASP" else "csp", 2, partition=[s * layers // stages for s in range(1, stages)]
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages,
        strategy=strategy,
        max_epochs=1,
        callbacks=[ReproducibilityLog(folder, every_n_batches=1)],
        **QUIET,
    )
    trainer.fit(module, SubnetStream(Uniform(module.net.space, 1)).pair_with(loader))
    digest = hashlib.blake2b(digest_size=6)
    for tensor in module.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest(), 0.0 if rank else search(module.net, all_x[-held_out:], all_y[-held_out:])


def search(net: Supernet, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the accuracy of the best subnet that evolution finds. Its loss is one minus the accuracy."""
    net.eval()
    stream, best = SubnetStream(Evolution(net.space, GENERATION, PARENTS, seed=2)), 0.0
    for _ in range(TRIED):
        subnet = next(stream)
        with torch.no_grad():
            accuracy = float((net((x, subnet)).argmax(-1) == y).float().mean())
        stream.report_loss(subnet, 1 - accuracy)
        best = max(best, accuracy)
    return best


def smoothed(losses: Sequence[str]) -> list[float]:
    """Return the moving average over `SMOOTHED` losses."""
    return [statistics.fmean(map(float.fromhex, losses[n - SMOOTHED : n])) for n in range(SMOOTHED, len(losses) + 1)]


def crowded(record: TrainingRecord) -> tuple[str, int]:
    """Return the candidate that three subnets use within the smallest number of batches.

    The second value is the position of these uses in the accesses of the candidate.
    """

    def spread(name: str) -> tuple[int, int]:
        users = sorted({access.batch for access in record.accesses[name]})
        return min((after - before, 2 * n) for n, (before, after) in enumerate(zip(users, users[2:], strict=False)))

    names = [name for name in record.accesses if "." in name and len(record.accesses[name]) > 6]
    layer = min(names, key=lambda name: (*spread(name), name))
    return layer, spread(layer)[1]


def draw(losses: Mapping[str, Mapping[str, list[float]]], path: Path) -> None:
    """Draw the losses of each system by number of stages into a file, with the same scale for all systems."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), layout="constrained")
    for axis, (title, curves) in zip(figure.subplots(2, 3, sharey=True).flat, losses.items(), strict=False):
        for name, values in curves.items():
            axis.plot(range(SMOOTHED, SMOOTHED + len(values)), values, label=name)
        axis.set(title=title, xlabel="subnets", ylabel="loss")
        axis.legend(frameon=False)
    figure.suptitle(f"Loss of a supernet on digits, averaged over {SMOOTHED} subnets")
    figure.savefig(path, dpi=110)


def convergence(subnets: int, counts: Sequence[int], picture: str = "") -> Output:
    """Yield losses, hashes and searches of all systems on several numbers of stages.

    Args:
        subnets: the number of subnets.
        counts: the numbers of stages.
        picture: a file for a picture of the losses, or an empty string.
    """
    keys: dict[str, float] = {}
    wrong = 0
    losses: dict[str, dict[str, list[float]]] = {}
    for system in SYSTEMS:
        found = {stages: trained(system, stages, subnets) for stages in counts}
        first = found[counts[0]]
        equal = all(each.weights == first.weights for each in found.values())
        wrong += equal != system.startswith("CSP")
        yield f"{system}: {'equal' if equal else 'different'} on {', '.join(map(str, counts))} stages"
        layer, start = crowded(first.record)
        for stages, each in found.items():
            order = " ".join(each.record.order(layer).split()[start : start + 8])
            loss = statistics.fmean(map(float.fromhex, each.losses[-SMOOTHED:]))
            keys[f"search_{system.replace(' ', '_').lower()}_{stages}"] = round(each.accuracy, 4)
            yield (
                f"  {stages} stages: loss {each.losses[-1]}, of the last {SMOOTHED} {loss:.3f}; "
                f"search {each.accuracy:.1%}; weights {each.weights}; layer {layer}: ... {order} ..."
            )
        if not equal:
            yield f"  {compare_runs(first.record, found[counts[1]].record)}"
        curves = {f"{stages} stage{'s' * (stages > 1)}": smoothed(each.losses) for stages, each in found.items()}
        losses[f"{system}: {'the same on all' if equal else 'different'}"] = curves
    if picture:
        draw(losses, Path(picture))
    yield {"as_expected": float(not wrong), **keys}
