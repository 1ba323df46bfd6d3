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

OBSERVATIONS_FILE = "interference.npz"
OBSERVATION_SECONDS, QUICK_OBSERVATION_SECONDS = 0.2, 0.06
"""Duration of one observation of a stage in seconds, by default and with --quick."""


def run(cfg: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    file, windows = Path(options.data or OBSERVATIONS_FILE), None
    if options.data is None or not file.exists():
        check_writable(str(file))
        from lightning_pipes.tune.interference import collect_windows

        with progress_bar("interference") as progress:
            windows = collect_windows(
                options.quick, QUICK_OBSERVATION_SECONDS if options.quick else OBSERVATION_SECONDS, progress
            )
    found = schedule_factory("dynpipe").score_predictor(windows, file)
    if options.json:
        print_json({"file": str(file), **found})
        return
    rows = [
        {"predictor": name, "R2": f"{found[f'{key}_r2']:.2f}", "mean error of the ratio": f"{found[f'{key}_mae']:.3f}"}
        for name, key in (("formula", "formula"), ("formula x forest", "forest"))
    ]
    print(f"{found['windows']} windows; each kind of neighbor is predicted from the others:\n\n{format_table(rows)}")
    improves = found["forest_mae"] < found["formula_mae"]
    effect = "improves the formula" if improves else "does not improve the formula, so do not use the predictor"
    print(f"\non this machine, the forest {effect}")
    print(f'\nmeasurements: {file}\nuse: PipelineStrategy("dynpipe", schedule_args={{"predictor": "{file}"}})')


COMMAND = Command(
    "interference",
    "Measures stages while other processes compete for a core of this machine, and writes the measurements to a file.\n"
    "schedule.predictor learns from it how much a neighbor slows down a stage (DynPipe, Section V-A). Needs Linux.\n"
    "It takes a few minutes, or about one minute with --quick. No other work should run on the machine meanwhile.",
    [
        "lightning-pipes interference",
        "lightning-pipes interference --data windows.npz",
        "python examples/train.py schedule=dynpipe schedule.predictor=interference.npz",
    ],
    run,
    flags={
        "--data": (
            "FILE",
            f"the measurements, written to {OBSERVATIONS_FILE} by default; if FILE exists, it is read",
        ),
        "--quick": ("", "fewer neighbors and stages"),
    },
)
