"""The command `lightning-pipes report`."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from omegaconf import DictConfig

from lightning_pipes.ir import InputError
from lightning_pipes.planning.advice import advise_run
from lightning_pipes.planning.formatting import progress_bar
from lightning_pipes.sim import compare_timelines
from lightning_pipes.sim.page import render_page
from lightning_pipes.sim.records.compare import BottleneckRank
from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.tune.cli.command import Command, print_json
from lightning_pipes.tune.cli.pictures import check_writable
from lightning_pipes.tune.cli.sources import load_profile


def run(cfg: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    """Write the HTML page about a run, and print the advice."""
    where = Path(words[0])
    record = RunRecord.load(where)
    if options.profile:
        record = _with_profile(record, options.profile)
    out = check_writable(options.out or str((where if where.is_dir() else where.parent) / "report.html"))
    with progress_bar("trying changes") as progress:
        advice = advise_run(record, progress)
    out.write_text(render_page(record, advice), encoding="utf-8")
    if options.open:
        webbrowser.open(out.resolve().as_uri())
    slowest, shown = BottleneckRank.from_timeline(record.displayed_timeline), record.displayed_timeline
    if options.json:
        print_json(
            {
                "page": str(out),
                "advice": advice.sentence,
                "batches": shown.batches,
                "step_seconds": shown.step / 1e9,
                "predicted_seconds": None if record.predicted is None else record.predicted.step / 1e9,
                "replayed_seconds": None if record.replayed is None else record.replayed.step / 1e9,
                "regime": record.simulated_timeline.regime,
                "bubble": record.bubble,
                "efficiency": shown.efficiency if record.siblings == 1 else None,
                "slowest_stage": slowest.stages[0],
                "slowest_ratio": slowest.ratio,
                "siblings": record.siblings,
                "changes": [asdict(change) | {"call": change.call} for change in advice.changes],
                "notes": list(advice.notes),
            }
        )
        return
    print(advice.sentence)
    if advice.proposed:
        print(f"\n    {advice.proposed.call}\n")
    if record.measured is not None and record.siblings == 1:
        print(f"{record.prediction_text}.")
        print(compare_timelines(record.predicted or record.simulated_timeline, record.measured))
    for note in advice.notes:
        print(f"note: {note}")
    print(f"page: {out}")


def _with_profile(record: RunRecord, path: str) -> RunRecord:
    profile = load_profile(path)
    layers = record.plan.layers
    if layers and layers[-1].stop != len(profile.layers):
        raise InputError(
            f"{path} has {len(profile.layers)} layers and the run had {layers[-1].stop}; profile the model that was run"
        )
    return replace(record, profile=profile)


COMMAND = Command(
    "report",
    "Writes one HTML page about a run, with its timeline, bubble, memory, and advice. The page needs no network.\n"
    "RUN is a directory that strategy.report.save(directory) has written to, such as a directory of examples/train.py.",
    [
        "lightning-pipes report outputs/2026-01-31/12-00-00",
        "lightning-pipes report outputs/2026-01-31/12-00-00 --open",
        "lightning-pipes report RUN --profile profile.json      (so that other cuts can be tried)",
    ],
    run,
    positionals=("RUN",),
    flags={
        "--out": ("FILE", "the page to write; by default report.html in the directory of the run"),
        "--profile": ("FILE", "the profile of the model, which lightning-pipes profile has written"),
        "--open": ("", "open the page in the browser"),
    },
)
