"""CSP with a cut for each subnet, against the same cut for all: subnets a second on ranks of this machine.

    python benchmarks/papers/csp/mirroring.py [--ranks 4] [--subnets 60] [--quick] [--json]
    python benchmarks/papers/csp/mirroring.py --simulate        the paper's spaces: gains by stages and micro-batches

Layers sleep as long as those of a GPU would compute, and candidates of a block differ by a factor of 12, so that few
cores are enough for many ranks. Beside them is what the simulator of `emulation/` says. Weights of both
are compared, bit by bit.
"""

from __future__ import annotations

import hashlib
import json
import time
from itertools import product
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.harness.report import make_parser
from benchmarks.harness.silence import QUIET
from benchmarks.papers.csp.emulation.spaces import Kind, Space, balanced, fixed, space_of
from benchmarks.papers.csp.emulation.stream import Rules, run
from lightning_pipes import PipelineStrategy
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.supernets import ChoiceBlock, ExplorerFeedback, SubnetStream, Supernet, Uniform
from lightning_pipes.testing.ranks import run_ranks

BLOCKS, CANDIDATES, ROWS, MICROBATCHES, WIDTH = 16, 96, 8, 4, 16
FORWARD = (4, 12, 24, 48)
"""Milliseconds of a whole batch; backward takes twice as long."""
OVERHEAD = 700_000
"""Nanoseconds that a task takes besides, of two at once on a busy machine."""


class Sleep(torch.autograd.Function):
    """Nothing, in its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds * len(x) / ROWS
        time.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Candidate(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.seconds = FORWARD[number % len(FORWARD)] / 1e3
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Sleep.apply(x + self.lin(x).tanh(), self.seconds)  # type: ignore[no-untyped-call]
        return out


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Supernet(*(ChoiceBlock(Candidate(c) for c in range(CANDIDATES)) for _ in range(BLOCKS)))

    def layers_of_batch(self, batch: Any) -> Any:
        return self.net.layers_of(batch[-1])

    def costs_of_layers(self) -> dict[str, float]:
        return {f"{n}.{c}": FORWARD[c % len(FORWARD)] for n in range(BLOCKS) for c in range(CANDIDATES)}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, subnet = batch
        out: torch.Tensor = self.net((x, subnet))
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(rank: int, ranks: int, subnets: int, by_subnet: bool) -> tuple[float, str, int]:
    """Seconds of the second of two epochs, a hash of the weights, and bytes of layers that this rank has sent."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, begun = Lit(), [0.0, 0.0]

    class Clock(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            begun[trainer.current_epoch] = time.monotonic()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            begun.append(time.monotonic())
            part = trainer.strategy.current_run.local_layers
            begun.append(part.bulk_transfer.traffic.sent if by_subnet else 0)

    stream = SubnetStream(Uniform(module.net.space, seed=1))
    batches: Any = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(n)) for n in range(subnets)]
    data: Any = DataLoader(batches, batch_size=None)
    pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=PipelineStrategy(
            CSP(balanced=by_subnet), MICROBATCHES, partition=[s * BLOCKS // ranks for s in range(1, ranks)]
        ),
        max_epochs=2,
        callbacks=[Clock(), ExplorerFeedback(stream)],
        **QUIET,
    ).fit(module, stream.pair_with(data))
    digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in module.state_dict().values())).hexdigest()
    return begun[2] - begun[1], digest, int(begun[3])


def predicted(ranks: int, subnets: int) -> tuple[float, float]:
    """Subnets a second, with one cut for all and with one for each."""
    kinds = tuple(Kind(f"{ms} ms", ms, 2 * ms, 0.5) for ms in FORWARD)
    drawn = Space("sleeping", BLOCKS, CANDIDATES, kinds).draw(subnets, seed=1)
    rules = Rules(MICROBATCHES, overhead=OVERHEAD)
    one, each = (run(place(drawn, ranks), rules) for place in (fixed, balanced))
    return subnets / one.makespan * 1e9, subnets / each.makespan * 1e9


def simulated(subnets: int) -> None:
    """Prints the gains in the paper's spaces, with their swap times."""
    for name in ("NLP.c1", "NLP.c2", "NLP.c3", "CV.c1", "CV.c2", "CV.c3"):
        drawn, gains = space_of(name).draw(subnets, seed=1), {}
        for stages, microbatches in product((4, 8), (1, 4, 8)):
            one, each = (run(place(drawn, stages), Rules(microbatches)).throughput for place in (fixed, balanced))
            gains[f"{stages} stages, {microbatches}"] = round(each / one, 2)
        print(name, json.dumps(gains))


def main() -> None:
    parser = make_parser(__doc__, "40 subnets; within 90 s")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--subnets", type=int, default=60)
    parser.add_argument("--simulate", action="store_true")
    given = parser.parse_args()
    given.subnets = 40 if given.quick else given.subnets
    if given.simulate:
        simulated(300)
        return
    one, each = (run_ranks(train, given.ranks, given.ranks, given.subnets, how, timeout=500) for how in (False, True))
    says = predicted(given.ranks, given.subnets)
    measured = [given.subnets / max(seconds for seconds, _, _ in ranks) for ranks in (one, each)]
    sent = sum(sent for _, _, sent in each)
    equal = {digest for _, digest, _ in (*one, *each)} == {one[0][1]}
    print(f"{given.ranks} ranks, {given.subnets} subnets, emulated layers: subnets a second, executed and simulated")
    for name, found, said in zip(("one cut", "a cut each"), measured, says, strict=True):
        print(f"{name:10} {found:6.2f} {said:6.2f}")
    print(f"gain {measured[1] / measured[0]:.3f}, simulated {says[1] / says[0]:.3f}; the same bits: {equal}")
    print(f"{sent / 2 / given.subnets / 1024:.1f} KiB a subnet went to other ranks. Left out: GPUs.")
    if given.json:
        keys = {"one_cut": measured[0], "a_cut_each": measured[1], "gain": measured[1] / measured[0]}
        keys |= {"gain_simulated": says[1] / says[0], "bit_equal": float(equal)}
        print(json.dumps({key: round(value, 3) for key, value in keys.items()}))


if __name__ == "__main__":
    main()
