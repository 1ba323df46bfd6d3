"""Models of every kind, each trained by units on two and three processes beside one process of plain Lightning.

    python benchmarks/any_model.py [--quick] [--json] [--case NAME ...]

The models are those of tests/trainer/units: plain modules, and small ones of transformers, torchvision and timm, as
far as these are installed. All are in float64, for two epochs of two batches with AdamW. Equal means that no loss,
weight or optimizer state differs by more than 1e-10. Models that draw random numbers are compared with one process of
the same strategy, which draws them from the same streams. `--quick` takes every fourth model.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.report import make_parser
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from tests.trainer.lit import differences
from tests.trainer.units.lit_zoo import ALL, draws, read_result, settings_of, train_many, train_zoo

PARTS = ("losses", "val", "weights", "saved", "optimizer")
SIZES = (2, 3)
"""Processes of a pipeline."""


def compare(ranks: Sequence[dict[str, Any]], alone: dict[str, Any]) -> list[str]:
    """Return where the ranks of a pipeline differ from one process."""
    parts = [(rank, part) for rank in range(len(ranks)) for part in (PARTS if rank == 0 else PARTS[:3])]
    return [
        d for rank, part in parts for d in differences(alone[part], ranks[rank][part], 1e-10, f"rank {rank} {part}")
    ]


def train_in_pipelines(names: Sequence[str], folder: str) -> dict[str, list[list[dict[str, Any]] | str]]:
    """Return by case what each rank of each size of pipeline has, or why it failed."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    for size in SIZES:
        cases = [(name, settings_of(name)) for name in names]
        try:
            ranks = run_ranks(train_many, size, cases, size, folder, timeout=1800)
            for number, name in enumerate(names):
                found[name].append([read_result(of_rank[number]) for of_rank in ranks])
        except RanksFailedError:  # which of them it was
            for case in cases:
                try:
                    ranks = run_ranks(train_many, size, [case], size, folder, timeout=300)
                    found[case[0]].append([read_result(of_rank[0]) for of_rank in ranks])
                except RanksFailedError as error:
                    found[case[0]].append(str(error).strip().splitlines()[-1])
    return found


def check(name: str, pipelines: Sequence[list[dict[str, Any]] | str], folder: str) -> list[str]:
    """Return what is wrong with a case."""
    if draws(name):
        alone = read_result(run_ranks(train_many, 1, [(name, settings_of(name))], 1, folder, timeout=300)[0][0])
    else:
        alone = train_zoo(name, 0, folder)
    wrong = []
    for size, ranks in zip(SIZES, pipelines, strict=True):
        said = [ranks] if isinstance(ranks, str) else compare(ranks, alone)
        wrong += [f"{size} processes: {text}" for text in said[:1]]
    return wrong


def main(arguments: list[str]) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--case", nargs="*", choices=list(ALL))
    given = parser.parse_args(arguments)
    names = given.case or (list(ALL)[::4] if given.quick else list(ALL))
    equal = 0
    with tempfile.TemporaryDirectory() as folder:
        pipelines = train_in_pipelines(names, folder)
        for name in names:
            wrong = check(name, pipelines[name], folder)
            equal += not wrong
            print(f"{name:40s} {'; '.join(wrong) or 'equal'}", flush=True)
    if given.json:
        print(json.dumps({"zoo_equal": equal, "zoo_total": len(names)}))


if __name__ == "__main__":
    main(sys.argv[1:])
