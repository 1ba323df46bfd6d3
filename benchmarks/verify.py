"""The differences that `PipelineStrategy(verify=...)` finds, its false alarms, and its cost.

    python benchmarks/verify.py [--quick] [--modules 200] [--first-seed 0] [--json]

The faults are defined in tests/trainer/verify/faults.py. Each one is trained on two ranks, also in quick mode. The
module is cut between layers of a container, and the same module is cut by units, unless this cut makes it equal to one
process.

False alarms are counted on random modules of tests/fuzz, which are verified with a warning only and end with the same
weights, logs and metrics as one plain process. A run can be divided into several runs by the seeds of the modules.

The cost is the additional time of a fit over two batches with a residual network with 4 million parameters on two
ranks. Fits with and without verification take turns.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.report import QUIET, make_parser
from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan.settings import VERIFY_VARIABLE
from tests.fuzz.module_runs import EQUAL, WRONG, verdicts
from tests.fuzz.modules import random_module
from tests.trainer.lit import quiet
from tests.trainer.verify.faults import (
    BY_UNITS,
    FAULTS,
    FOUND,
    LAID_BY_UNITS,
    NOT_FOUND_BY_UNITS,
    found,
    is_found_by_units,
)
from tests.trainer.verify.faults import EQUAL as SOUND

WIDTH, BLOCKS, ROWS, TOGETHER = 256, 32, 32, 50
MODULES, QUICK_MODULES = 200, 40
REPEATS, QUICK_REPEATS = 9, 3


class Residual(nn.Module):
    """A residual block with two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


class Net(pl.LightningModule):
    """A network of residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Residual() for _ in range(BLOCKS)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def seconds_of_fits(rank: int, repeats: int) -> dict[int, list[float]]:
    """Return the seconds of fits over two batches for each value of `verify`.

    The values take turns, and the first fit of each one is left out.
    """
    quiet()
    seconds: dict[int, list[float]] = {2: [], 0: []}
    for _ in range(repeats + 1):
        for verify, those in seconds.items():
            torch.manual_seed(0)
            trainer = pl.Trainer(
                accelerator="cpu",
                devices=2,
                strategy=PipelineStrategy(partition="parameters", verify=verify),
                max_epochs=1,
                **QUIET,
            )
            started = time.monotonic()
            trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(2 * ROWS, WIDTH)), batch_size=ROWS))
            those.append(time.monotonic() - started)
    return {verify: those[1:] for verify, those in seconds.items()}


@dataclass
class Alarms:
    """The results of random modules that are verified with a warning.

    Attributes:
        equal: the number of modules that end like one plain process.
        told: the differences that were reported for these modules.
        wrong: the results of modules that differ without being refused or warned about for a reason of their own.
        next_seed: the seed of the first module that was not checked.
    """

    equal: int = 0
    told: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    next_seed: int = 0


def count_alarms(wanted: int, first_seed: int) -> Alarms:
    """Verify random modules until a number of them are equal.

    The function stops after four times as many seeds.

    Args:
        wanted: the number of equal modules.
        first_seed: the seed of the first module.
    """
    found = Alarms(next_seed=first_seed)
    while found.equal < wanted and found.next_seed < first_seed + 4 * wanted:
        count = min(TOGETHER, math.ceil((wanted - found.equal) * 1.25))
        cases = [random_module(found.next_seed + n) for n in range(count)]
        for made, came in zip(cases, verdicts(cases, {VERIFY_VARIABLE: "warn"}), strict=True):
            if found.equal == wanted:
                break
            found.next_seed = made.seed + 1
            if came.kind == WRONG:
                found.wrong.append(f"{made.seed} {made.causes}: {came.text}")
            elif came.kind == EQUAL:
                found.equal += 1
                found.told += [f"{made.seed} {made.causes}: {text}" for text in came.warned if "verify='warn'" in text]
    return found


def main() -> None:
    """Find the faults, count the false alarms, measure the cost, and print the table."""
    parser = make_parser(__doc__, f"{QUICK_MODULES} modules instead of {MODULES}, within 120 s")
    parser.add_argument("--modules", type=int, help="the number of equal modules to verify")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first module")
    options = parser.parse_args()
    modules = options.modules if options.modules is not None else QUICK_MODULES if options.quick else MODULES
    said = found(range(len(FAULTS)))
    names = [FOUND in text and fault.finds in text for fault, text in zip(FAULTS, said, strict=True)]
    units = [number for number in LAID_BY_UNITS if NOT_FOUND_BY_UNITS.get(FAULTS[number].name) != SOUND]
    by_units = dict(zip(units, found(units, **BY_UNITS), strict=True))
    missed = {number: text for number, text in by_units.items() if not is_found_by_units(FAULTS[number], text)}
    alarms = count_alarms(modules, options.first_seed)
    seconds = run_ranks(seconds_of_fits, 2, QUICK_REPEATS if options.quick else REPEATS, timeout=240)[0]
    with_verify, without = (statistics.median(seconds[verify]) for verify in (2, 0))
    result = {
        "seeded": len(FAULTS),
        "found": sum(names),
        "seeded_by_units": len(units),
        "found_by_units": len(units) - len(missed),
        "equal_modules": alarms.equal,
        "false_alarms": len({text.partition(" ")[0] for text in alarms.told}),
        "wrong_modules": len(alarms.wrong),
        "next_seed": alarms.next_seed,
        "seconds_for_two_batches": round(with_verify - without, 2),
        "seconds_of_the_fit_without": round(without, 2),
    }
    for fault, right, text in zip(FAULTS, names, said, strict=True):
        if not right:
            print(f"not found: {fault.name}: {text}", file=sys.stderr)
    for number, text in missed.items():
        print(f"not found by units: {FAULTS[number].name}: {text}", file=sys.stderr)
    for text in alarms.told:
        print(f"false alarm: {text}", file=sys.stderr)
    for text in alarms.wrong:
        print(f"wrong: {text}", file=sys.stderr)
    print("| | |\n| --- | --- |")
    for name, value in result.items():
        print(f"| {name.replace('_', ' ')} | {value} |")
    if options.quick:
        print(
            f"\nLeft out: {MODULES - alarms.equal} of {MODULES} modules, {REPEATS - QUICK_REPEATS} of {REPEATS} fits."
        )
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
