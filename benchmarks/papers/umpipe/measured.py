"""Unequal micro-batches for networks whose layers were measured here: the paper's figures 8 and 9, tables 4, 5 and 6.

    python benchmarks/papers/umpipe/measured.py [--quick] [--json] [--experiment t5|t4 ...]

Every layer is a stage, and its time by samples is processor time of one core, the least of some runs, forward and
backward, for 1, 2, 4, ... samples. A link takes bytes over `BANDWIDTH`, and `LATENCY`: these are given, not measured.
The paper measures its networks on GPUs, in milliseconds; relations are to be compared, not times.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks.harness.report import Report, describe_machine, make_parser, run_parts
from benchmarks.papers.umpipe.overlap.search import search
from benchmarks.papers.umpipe.overlapped import equal
from benchmarks.papers.umpipe.search import genetic, table
from lightning_pipes.strategies.umpipe.network import Network
from lightning_pipes.strategies.umpipe.search import (
    best_equal_scheme,
    global_greedy,
    load_loops,
    local_greedy,
    search_optimum,
)

BANDWIDTH, LATENCY = 1.25e9, 50e-6
"""Bytes a second, and seconds, of a link of 10 Gbit/s."""
REPEATS = 3


class Curve(NamedTuple):
    """The times of a stage: seconds by number of samples, and the bytes that a sample hands on."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    output: float


def measure_curve(
    layer: nn.Module, inputs: Sequence[torch.Tensor], repeats: int = REPEATS
) -> tuple[Curve, list[torch.Tensor]]:
    """Return the times of a layer, and its outputs.

    Args:
        inputs: one for each number of samples.
    """
    forward, backward, outputs = [], [], []
    for x in inputs:
        there, back = [], []
        for _ in range(1 + repeats):
            given = x.detach().requires_grad_(x.is_floating_point())
            begin = time.thread_time()
            y = layer(given)
            middle = time.thread_time()
            y.backward(torch.ones_like(y))
            there.append(middle - begin)
            back.append(time.thread_time() - middle)
        forward.append(min(there))
        backward.append(min(back))
        outputs.append(y.detach())
    return Curve(tuple(forward), tuple(backward), outputs[0].element_size() * outputs[0][0].numel()), outputs


def measure_layers(layers: Sequence[nn.Module], inputs: Sequence[torch.Tensor]) -> list[Curve]:
    """Return the times of layers one after another; an object that stands several times is measured once."""
    torch.set_num_threads(1)
    known: dict[int, Curve] = {}
    found = []
    for layer in layers:
        if id(layer) not in known:
            known[id(layer)], inputs = measure_curve(layer, inputs)
        found.append(known[id(layer)])
    return found


def network_from_curves(curves: Sequence[Curve], sizes: Sequence[int]) -> Network:
    """Return the network of stages with these times, in microseconds.

    Args:
        sizes: numbers of samples of the curves, rising to those of a batch.
    """
    links = [[LATENCY + curve.output * rows / BANDWIDTH for rows in sizes] for curve in curves[:-1]]
    forward = [row for curve, link in zip(curves, [*links, None], strict=True) for row in (curve.forward, link) if row]
    there = 1e6 * np.array(forward)[:, ::-1]
    reverse = [
        row
        for curve, link in zip(curves[::-1], [*links[::-1], None], strict=True)
        for row in (curve.backward, link)
        if row
    ]
    back = 1e6 * np.array(reverse)[:, ::-1]
    whole = (np.maximum(1, np.rint(times)).astype(np.int64) for times in (there, back))
    return Network(sizes[-1], tuple(sizes[::-1]), *whole)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: torch.Tensor = self.layer(x, mask, is_causal=True)
        return out


def gpt_layers(width: int = 64, blocks: int = 12, words: int = 1000) -> list[nn.Module]:
    """Return the 14 stages of a small GPT: an embedding, equal blocks, a head."""
    return [nn.Embedding(words, width), *[Block(width)] * blocks, nn.Linear(width, words)]


def vgg_layers(channels: int = 16) -> list[nn.Module]:
    """Return the 16 stages of a VGG16 for images of 32 x 32, with `channels` in place of 64."""
    layers: list[nn.Module] = []
    before = 3
    for times, count in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for n in range(count):
            parts = [nn.Conv2d(before, times * channels, 3, padding=1), nn.ReLU()]
            layers.append(nn.Sequential(*parts, *[nn.MaxPool2d(2)] * (n == count - 1)))
            before = times * channels
    ends = [
        nn.Sequential(nn.Flatten(), nn.Linear(before, 512), nn.ReLU()),
        nn.Sequential(nn.Linear(512, 512), nn.ReLU()),
    ]
    return [*layers, *ends, nn.Linear(512, 10)]


def cnn_layers(depth: int) -> list[nn.Module]:
    """Return convolutions whose channels double, and whose sides halve, every fourth of them."""
    layers: list[nn.Module] = []
    before = 3
    for n in range(depth):
        after = 8 * 2 ** (n // 4)
        pool = [nn.MaxPool2d(2)] * (n % 4 == 3)
        layers.append(nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), *pool))
        before = after
    return layers


def drawn_cnn_layers(depth: int, seed: int = 0) -> list[nn.Module]:
    """Return the paper's convolutions: 20 to 50 channels, drawn at random, for images of one channel."""
    channels = [1, *np.random.default_rng(seed).integers(20, 51, depth).tolist()]
    return [nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in pairwise(channels)]


def classifying_layer(channels: int) -> nn.Module:
    """Return the layer that ends the paper's convolutional networks."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def doubled(rows: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `rows`."""
    return [2**n for n in range(rows.bit_length())]


COLUMNS = [
    "N, P",
    "paper's LG, GG over UMPIPE",
    "LG",
    "GG",
    "TiDGAP",
    "optimum",
    "proven",
    "GPipe",
    "paper's",
    "1F1B",
    "paper's",
    "UM-1F1B over optimum",
    "paper's",
]


def compare_methods(name: str, network: Network, paper: Sequence[str], quick: bool) -> tuple[list[str], float]:
    """Return the row of a network, every time over that of the best flushed scheme, and the gain over GPipe."""
    best = search_optimum(network, 10)
    generations = 100 if quick else 4000
    eager = search(network, [best.scheme], seconds=1 if quick else 5)

    def over(value: float) -> str:
        return f"{value / best.value:.3f}"

    gpipe = best_equal_scheme(network).value
    row = [
        f"{name} {network.stages}, {network.rows}",
        paper[0],
        over(local_greedy(network).value),
        over(global_greedy(network).value),
        over(genetic(network, "TiDGAP", 0, "equal", generations).best.value),
        f"{best.value / 1e3:.1f} ms",
        "yes" if best.is_proven else f"within {best.gap:.1%}",
        over(gpipe),
        paper[1],
        over(equal(network).makespan),
        paper[2],
        over(eager.value),
        paper[3],
    ]
    return row, gpipe / best.value


def t5(quick: bool) -> Report:
    """The paper's figure 8 and tables 5 and 6: a GPT and a VGG."""
    rows, keys = [], {}
    tokens = [torch.randint(1000, (n, 16)) for n in doubled(128 if quick else 512)]
    images = [torch.randn(n, 3, 32, 32) for n in doubled(64)]
    for name, layers, inputs, paper in (
        ("GPT", gpt_layers(), tokens, ("1.274, 1.034", "1.139", "1.111", "0.979")),
        ("VGG16", vgg_layers(), images, ("1.327, 1.246", "1.171", "1.080", "0.915")),
    ):
        sizes = [len(x) for x in inputs]
        network = network_from_curves(measure_layers(layers, inputs), sizes)
        row, gain = compare_methods(name, network, paper, quick)
        rows.append(row)
        keys[f"gpipe_over_umpipe_{name.lower()}"] = round(gain, 4)
    return Report(table("T5, T6, F8: layers measured here; times over those of the optimum", COLUMNS, rows), keys)


def t4(quick: bool) -> Report:
    """The paper's figure 9 and table 4: convolutional networks by depth."""
    sizes = doubled(64)
    drawn = drawn_cnn_layers(20)
    equal_sides = measure_layers(drawn, [torch.randn(n, 1, 28, 28) for n in sizes])
    halved = measure_layers(cnn_layers(20), [torch.randn(n, 3, 32, 32) for n in sizes])
    rows, keys = [], {}
    for name in ("CNN", "halving CNN"):
        gains = []
        for depth in (4, 12, 20) if quick else (4, 8, 12, 16, 20):
            curves = halved[:depth]
            if name == "CNN":
                channels = drawn[depth - 1][0].out_channels  # type: ignore[index]
                ends = [torch.randn(n, channels, 28, 28) for n in sizes]
                curves = [*equal_sides[:depth], *measure_layers([classifying_layer(channels)], ends)]
            row, gain = compare_methods(name, network_from_curves(curves, sizes), ("", "", "", ""), quick)
            rows.append(row)
            gains.append(gain)
        keys[f"gpipe_over_umpipe_{name.replace(' ', '_').lower()}"] = round(float(np.mean(gains)), 4)
    title = "T4, F9: convolutional networks by depth, layers measured here; times over those of the optimum"
    lines = table(title, COLUMNS, rows)
    lines.append(
        "CNN: the paper's, 20 to 50 channels at 28 x 28; halving: sides halve and channels double every fourth layer."
    )
    return Report(lines, keys)


EXPERIMENTS: dict[str, Callable[[bool], Report]] = {"t5": t5, "t4": t4}


def main() -> None:
    parser = make_parser(__doc__, "smaller batches, and fewer generations and depths; within 100 s")
    parser.add_argument("--experiment", nargs="*", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    options = parser.parse_args()
    print(f"{describe_machine()}, Python {platform.python_version()}, torch {torch.__version__}, {load_loops()}\n")
    keys = run_parts(EXPERIMENTS, options.experiment, options.quick)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
