"""Kills a rank of a running training at a random instant, again and again.

Each time: do all ranks end by themselves, how soon, and does training resume from the last checkpoint to losses that
are equal, bit for bit, to those of a run that nobody disturbed?

    python benchmarks/faults.py [--quick] [--json] [--kills N] [--ranks N] [--schedule NAME]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_pipes.testing.ranks import Outcome, watch_ranks

EPOCHS, STEPS, ROWS, WIDTH = 12, 8, 32, 128
DEADLINE = 90.0


@dataclass(frozen=True)
class Run:
    """One training, as its ranks are told.

    Attributes:
        directory: for checkpoints and for the losses of the last stage.
        victim: the rank that ends itself, and `after` seconds of training; -1 for nobody.
        resume: continue from the last checkpoint.
    """

    directory: str
    schedule: str
    victim: int = -1
    after: float = 0.0
    resume: bool = False


def train(rank: int, run: Run) -> float:
    """Trains a small network with dropout; the last stage writes every loss, with all its bits, to a file.

    Returns the seconds from the first step to the end.
    """
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    from lightning_pipes import PipelineStrategy

    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_pipes"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            parts: list[nn.Module] = []
            for _ in range(8):
                parts += [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)]
            self.layers = nn.Sequential(*parts)

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            x, target = batch
            loss: torch.Tensor = ((self.layers(x) - target) ** 2).mean()
            if self.trainer.is_global_zero:
                with open(Path(run.directory, "losses.txt"), "a") as file:
                    file.write(f"{self.trainer.fit_loop.total_batch_idx} {float(loss).hex()}\n")
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

        def on_train_start(self) -> None:
            self.started = time.monotonic()
            if rank == run.victim:
                threading.Timer(run.after, os.kill, (os.getpid(), signal.SIGKILL)).start()

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, STEPS * ROWS, WIDTH, generator=generator)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[0], x[1]), batch_size=ROWS)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=PipelineStrategy(run.schedule, microbatches=4, seed=3),
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(run.directory, filename="last", enable_version_counter=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = Path(run.directory, "last.ckpt")
    net = Net()
    trainer.fit(net, loader, ckpt_path=str(last) if run.resume and last.exists() else None)
    return time.monotonic() - net.started


def losses(directory: str) -> dict[int, set[str]]:
    """The losses of every step's micro-batches, with all their bits; a step that ran twice must not add any."""
    found: dict[int, set[str]] = {}
    path = Path(directory, "losses.txt")
    for line in path.read_text().splitlines() if path.exists() else ():
        step, bits = line.split()
        found.setdefault(int(step), set()).add(bits)
    return found


def finish(outcomes: list[Outcome]) -> None:
    """Raises if any rank failed."""
    if any(o.error for o in outcomes):
        raise SystemExit("\n".join(f"rank {o.rank}: {o.error}" for o in outcomes if o.error))


@dataclass(frozen=True)
class Result:
    """What one kill led to; seconds from the kill to the end of the last rank."""

    victim: int
    clean: bool
    bit_equal: bool
    seconds: float


def one_kill(number: int, ranks: int, schedule: str, wanted: dict[int, set[str]], length: float) -> Result | None:
    """Kills a random rank at a random instant of a training of `length` seconds, and resumes; None if too late."""
    rng = random.Random(number)
    victim, after = rng.randrange(ranks), rng.uniform(0.0, length)
    with tempfile.TemporaryDirectory() as directory:
        outcomes = watch_ranks(train, ranks, Run(directory, schedule, victim, after), timeout=DEADLINE)
        if outcomes[victim].exitcode != -signal.SIGKILL:  # it was through before
            return None
        died = outcomes[victim].seconds
        seconds = max(o.seconds for o in outcomes) - died
        clean = all(o.exitcode is not None for o in outcomes) and seconds < 10
        finish(watch_ranks(train, ranks, Run(directory, schedule, resume=True), timeout=DEADLINE))
        return Result(victim, clean, losses(directory) == wanted, max(seconds, 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 kills")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    options = parser.parse_args()
    kills = 5 if options.quick else options.kills
    with tempfile.TemporaryDirectory() as directory:
        undisturbed = watch_ranks(train, options.ranks, Run(directory, options.schedule), timeout=DEADLINE)
        finish(undisturbed)
        length, wanted = undisturbed[0].value, losses(directory)
    print(f"undisturbed: {len(wanted)} steps in {length:.1f} s on {options.ranks} ranks, {options.schedule}")
    results: list[Result] = []
    for number in count():
        if len(results) == kills:
            break
        result = one_kill(number, options.ranks, options.schedule, wanted, length)
        if result is None:
            continue
        results.append(result)
        words = f"{'clean' if result.clean else 'NOT CLEAN'}, {'bit-equal' if result.bit_equal else 'NOT EQUAL'}"
        print(
            f"kill {number + 1:2} of rank {result.victim}: all ended after {result.seconds:.1f} s, {words}", flush=True
        )
    headline: dict[str, Any] = {
        "kills": kills,
        "clean_ends": sum(r.clean for r in results),
        "bit_equal_resumes": sum(r.bit_equal for r in results),
        "slowest_end_s": round(max(r.seconds for r in results), 2),
    }
    print(f"{headline['clean_ends']} clean ends and {headline['bit_equal_resumes']} bit-equal resumes of {kills}")
    if options.json:
        print(json.dumps(headline))


if __name__ == "__main__":
    main()
