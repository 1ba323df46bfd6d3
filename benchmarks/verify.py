"""What `PipelineStrategy(verify=...)` finds, what it takes for a difference that is none, and what it costs.

    python benchmarks/verify.py [--quick] [--modules 200] [--json]

The faults are those of tests/trainer/verify/faults.py, each trained on two ranks. Alarms are counted on random modules
of tests/fuzz, verified with a warning only, which end with the weights, logs and metrics of one plain process. The cost
is that of a fit over two batches of a residual network with 4 million parameters, with and without, on two ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from tests.fuzz.module_runs import EQUAL, alone, in_pipeline, verdict
from tests.fuzz.modules import Made, random_module
from tests.trainer.lit import quiet
from tests.trainer.verify.faults import FAULTS, FOUND, found

WIDTH, BLOCKS, ROWS, TOGETHER = 256, 32, 32, 20
MODULES, QUICK_MODULES, REPEATS = 200, 40, 5


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Residual() for _ in range(BLOCKS)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fit_seconds(rank: int, verify: int) -> list[float]:
    """Seconds of fits over two batches, the first one left out."""
    quiet()
    seconds = []
    for _ in range(REPEATS + 1):
        torch.manual_seed(0)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=PipelineStrategy(partition="parameters", verify=verify),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        started = time.monotonic()
        trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(2 * ROWS, WIDTH)), batch_size=ROWS))
        seconds.append(time.monotonic() - started)
    return seconds[1:]


def verified(rank: int, cases: Sequence[Made], folder: str) -> list[dict[str, Any]]:
    """The findings on one rank of modules that are verified with a warning."""
    os.environ["LIGHTNING_PIPES_VERIFY"] = "warn"
    return [in_pipeline(made, f"{folder}/{number}")[0] for number, made in enumerate(cases)]


def false_alarms(wanted: int) -> tuple[int, int, list[str]]:
    """How many modules are equal, of how many of those a difference was told, and what was told."""
    equal, told, seed = 0, list[str](), 0
    while equal < wanted and seed < 4 * wanted:
        cases = [made for n in range(seed, seed + TOGETHER) if (made := random_module(n)).base.ranks == 2]
        seed += TOGETHER
        with TemporaryDirectory() as folder:
            plain = [alone(made, f"{folder}/alone{n}")[0] for n, made in enumerate(cases)]
            try:
                by_rank = run_ranks(verified, 2, cases, folder, timeout=120 + 20 * len(cases))
            except RanksFailedError as error:
                print(f"seeds from {seed - TOGETHER}: {error}", file=sys.stderr)
                continue
            for made, one, *ranks in zip(cases, plain, *by_rank, strict=True):
                if equal < wanted and verdict(made, ranks, one).kind == EQUAL:
                    equal += 1
                    alarms = [text for rank in ranks for text in rank["warned"] if "verify='warn'" in text]
                    told += [f"{made.seed} {made.causes}: {alarms[0]}"] if alarms else []
    return equal, len(told), told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MODULES} modules instead of {MODULES}")
    parser.add_argument("--modules", type=int, help="how many equal modules are verified")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    modules = options.modules if options.modules is not None else QUICK_MODULES if options.quick else MODULES
    said = found(range(len(FAULTS)))
    names = [FOUND in text and fault.finds in text for fault, text in zip(FAULTS, said, strict=True)]
    equal, alarms, told = false_alarms(modules)
    seconds = [statistics.median(run_ranks(fit_seconds, 2, verify, timeout=240)[0]) for verify in (2, 0)]
    result = {
        "seeded": len(FAULTS),
        "found": sum(names),
        "equal_modules": equal,
        "false_alarms": alarms,
        "seconds_for_two_batches": round(seconds[0] - seconds[1], 2),
        "seconds_of_the_fit_without": round(seconds[1], 2),
    }
    for fault, right, text in zip(FAULTS, names, said, strict=True):
        if not right:
            print(f"not found: {fault.name}: {text}", file=sys.stderr)
    for text in told:
        print(f"false alarm: {text}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
