"""The command `lightning-pipes interference`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from lightning_pipes.ir.registry import schedule_factory
from lightning_pipes.planning.formatting import progress_bar
from lightning_pipes.tune.cli.command import Command, format_table, print_json
from lightning_pipes.tune.cli.pictures import check_writable

FOREST = "forest.npz"
SECONDS, QUICK_SECONDS = 0.2, 0.06
"""Duration of one observation of a stage in seconds, by default and with --quick."""


def run(cfg: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    forest = check_writable(options.forest or FOREST)
    data = None if options.data is None else Path(options.data)
    windows = None
    if data is None or not data.exists():
        if data is not None:
            check_writable(str(data))
        from lightning_pipes.tune.interference import collect_windows

        with progress_bar("interference") as progress:
            windows = collect_windows(options.quick, QUICK_SECONDS if options.quick else SECONDS, progress)
    found = schedule_factory("dynpipe").train_predictor(windows, data, forest)
    if options.json:
        print_json({"file": str(forest), **found})
        return
    rows = [
        {"predictor": name, "R2": f"{found[f'{key}_r2']:.2f}", "mean error of the ratio": f"{found[f'{key}_mae']:.3f}"}
        for name, key in (("formula", "formula"), ("formula x forest", "forest"))
    ]
    print(f"{found['windows']} windows; each kind of neighbour is predicted from the others:\n\n{format_table(rows)}")
    better = "better" if found["forest_mae"] < found["formula_mae"] else "no better: leave the predictor out"
    print(f"\non this machine the forest makes the formula {better}")
    print(f'\nforest: {forest}\nuse: PipelineStrategy("dynpipe", schedule_args={{"predictor": "{forest}"}})')


COMMAND = Command(
    "interference",
    "Measures stages while other processes compete for a core of this machine, and trains the forest that predicts\n"
    "how much a neighbor slows down a stage (DynPipe, Section V-A), for schedule.predictor. The command needs Linux.\n"
    "It takes a few minutes, or about one minute with --quick. No other work should run on the machine meanwhile.",
    [
        "lightning-pipes interference",
        "lightning-pipes interference --data windows.npz --forest forest.npz",
        "python examples/train.py schedule=dynpipe schedule.predictor=forest.npz",
    ],
    run,
    flags={
        "--forest": ("FILE", f"where to write the forest; {FOREST} by default"),
        "--data": ("FILE", "the measurements; if the file exists, it is read, and otherwise it is written"),
        "--quick": ("", "fewer neighbors and stages"),
    },
)
