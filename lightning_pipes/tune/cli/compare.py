"""The command `lightning-pipes compare`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig

from lightning_pipes.ir import InputError
from lightning_pipes.sim.records.training_record import TrainingRecord, compare_runs, natural_key
from lightning_pipes.tune.cli.command import Command, print_json


def run(cfg: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    """Compare the records of two trainings, and print the first difference."""
    a, b = (TrainingRecord.load(Path(word)) for word in words)
    found = compare_runs(a, b)
    if options.layer:
        _show_orders(options.layer, a, b)
    if options.json:
        print_json({"equal": found.is_equal, **asdict(found)})
    else:
        print(found)
    if not found.is_equal:
        raise SystemExit(1)


def _show_orders(layer: str, a: TrainingRecord, b: TrainingRecord) -> None:
    known = sorted({*a.accesses, *b.accesses}, key=natural_key)
    if layer not in known:
        raise InputError(f"no batch of these runs uses a layer {layer!r}; there are {', '.join(known[:40])}")
    for name, record in (("first", a), ("second", b)):
        print(f"{name:6} {record.order(layer)}")


COMMAND = Command(
    "compare",
    "Finds the first batch and layer in which two trainings are not bitwise equal, and exits with 1 if there is one.\n"
    "RUN is a folder that the callback ReproducibilityLog has written to.",
    [
        "lightning-pipes compare runs/two_stages runs/eight_stages",
        "lightning-pipes compare runs/a runs/b --layer 5.2      (the batches that read (F) and step (B) it, in order)",
    ],
    run,
    positionals=("RUN", "RUN"),
    flags={"--layer": ("NAME", "print the order in which batches used this layer, in both runs")},
)
