"""The command `lightning-pipes profile`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_pipes.cost import ModelProfile
from lightning_pipes.cost.layer import per_row
from lightning_pipes.cost.units import bytes_text, seconds_text
from lightning_pipes.ir import InputError, Kind, check_count
from lightning_pipes.planning.formatting import progress_bar
from lightning_pipes.tune.cli.command import Command, format_table, print_json
from lightning_pipes.tune.cli.pictures import check_writable
from lightning_pipes.tune.cli.sources import parse_numbers


def run(cfg: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    """Measure the layers of a model, and write the profile to a file."""
    if options.clear:
        from lightning_pipes.trainer.plan.profile_cache import clear_profiles

        print(f"{clear_profiles(Path.cwd())} profiles that trainings have kept here were removed")
        return
    out = check_writable(cfg.out)
    rows = parse_numbers(cfg.rows, "rows")
    if not rows:
        raise InputError("rows: name at least one number of samples to measure, as in rows=[4,8]")
    check_count("repeats", cfg.repeats, "; the median counts", most=1000)
    check_count("threads", cfg.threads, most=1024)
    with progress_bar("profile") as progress:
        progress("loading torch", 0.0)
        from lightning_pipes.tune.cli import subjects

        subject = subjects.subject_from_factory(cfg.model or "")
        profile = subjects.profile_subject(
            subject, rows, cfg.device, cfg.threads, cfg.optimizer, cfg.split, cfg.repeats, progress
        )
    profile.save(out)
    if options.json:
        print_json({"file": str(out), "device": profile.device, "rows": rows, "layers": _layers(profile, max(rows))})
        return
    print(_text(profile, max(rows)))
    print(f"\nprofile: {out}\nnext: lightning-pipes plan profile={out} ranks=2 batch={4 * max(rows)}")


def _layers(profile: ModelProfile, rows: int) -> list[dict[str, Any]]:
    return [
        {
            "layer": number,
            "name": layer.name,
            "forward_seconds": profile.seconds(Kind.F, number, rows),
            "backward_seconds": profile.seconds(Kind.B, number, rows),
            "step_seconds": layer.step,
            "weight_bytes": layer.weight_bytes,
            "saved_bytes_per_row": per_row(layer.saved),
            "output_bytes_per_row": per_row(layer.output),
        }
        for number, layer in enumerate(profile.layers)
    ]


def _text(profile: ModelProfile, rows: int) -> str:
    shown = [
        {
            "layer": each["layer"],
            "name": each["name"],
            "forward": seconds_text(1e9 * each["forward_seconds"]),
            "backward": seconds_text(1e9 * each["backward_seconds"]),
            "step": seconds_text(1e9 * each["step_seconds"]),
            "weights": bytes_text(each["weight_bytes"]),
            "saved a row": bytes_text(each["saved_bytes_per_row"]),
            "output a row": bytes_text(each["output_bytes_per_row"]),
        }
        for each in _layers(profile, rows)
    ]
    return f"{format_table(shown)}\n\nTimes are of {rows} rows, on {profile.device}."


COMMAND = Command(
    "profile",
    "Measures the layers of a model on this device, one by one and as the engine runs them, and writes a file\n"
    "that `plan`, `simulate` and `report` read. A factory is called without arguments; it returns a LightningModule\n"
    "with an example_input_array, or a pair of a module (its largest nn.Sequential, or itself) and an example input.",
    [
        "lightning-pipes profile model=examples.models:make_gpt",
        "lightning-pipes profile model=my_package.my_module:make_model rows=[8,16,32] device=cuda out=mine.json",
        "lightning-pipes profile --clear",
    ],
    run,
    config="profile",
    flags={"--clear": ("", "remove the profiles that trainings have kept in this folder")},
)
