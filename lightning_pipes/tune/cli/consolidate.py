"""The command `lightning-pipes consolidate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_pipes.ir import InputError
from lightning_pipes.tune.cli.command import Command, print_json

CHECKPOINT_FORMATS = ("lightning", "safetensors")


def run(cfg: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    """Write a checkpoint that ranks have written as one Lightning checkpoint, or as safetensors files."""
    from lightning_pipes.trainer.checkpoint.export import export_weights
    from lightning_pipes.trainer.checkpoint.sharded import consolidate

    checkpoint, out = words
    form = options.format or CHECKPOINT_FORMATS[0]
    if form not in CHECKPOINT_FORMATS:
        raise InputError(f"--format is one of {' and '.join(CHECKPOINT_FORMATS)}, not {form!r}")
    if form == "lightning":
        if options.prefix or options.model:
            raise InputError(
                "--prefix and --model belong to --format safetensors; a Lightning checkpoint is always complete"
            )
        consolidate(checkpoint, out)
    else:
        export_weights(checkpoint, out, prefix=options.prefix or "", model=_make_model(options.model))
    print_json({"written": out, "format": form}) if options.json else print(out)


def _make_model(folder: str | None) -> Any:
    """Return the transformers model that the configuration in a folder describes, on the `meta` device."""
    if not folder:
        return None
    if not (Path(folder) / "config.json").is_file():
        raise InputError(f"--model needs the folder of a model of transformers, and {folder} has no config.json")
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise InputError("--model needs the package transformers: pip install transformers") from error
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        raise InputError(f"the config.json in {folder} does not name an architecture of transformers; it names {names}")
    with torch.device("meta"):
        return kind(config)


COMMAND = Command(
    "consolidate",
    "Creates one Lightning checkpoint from a folder that checkpoint='sharded' has written, or safetensors files from "
    "any\ncheckpoint, which from_pretrained can read. Does not start other processes.",
    [
        "lightning-pipes consolidate checkpoints/last whole.ckpt",
        "lightning-pipes consolidate last.ckpt out --format safetensors --prefix net --model base",
    ],
    run,
    positionals=("CHECKPOINT", "OUT"),
    flags={
        "--format": ("NAME", "lightning, the default, or safetensors"),
        "--prefix": ("NAME", "the attribute of the LightningModule that holds the model"),
        "--model": ("FOLDER", "with the config.json of a model of transformers: its own names, and its configuration"),
    },
)
