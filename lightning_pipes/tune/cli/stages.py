"""The command `lightning-pipes stages`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from lightning_pipes.ir import InputError, check_count, short_repr
from lightning_pipes.ir.registry import schedule_factory
from lightning_pipes.planning.formatting import hydra_overrides, strategy_line
from lightning_pipes.tune.cli.command import Command, print_json
from lightning_pipes.tune.cli.sources import (
    cluster_from_settings,
    parse_numbers,
    require_profile,
)

CONVERGENCE_OPTIONS = ("loss", "lipschitz", "noise", "lr", "target")


def run(cfg: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    """Choose the number of stages, and print the choice."""
    profile = require_profile(cfg, "stages")
    check_count("batch", cfg.batch, "; samples")
    microbatches = parse_numbers(cfg.microbatches, "microbatches") or [1]
    if len(microbatches) > 1:
        raise InputError(f"microbatches={microbatches}: stages takes one number; 1 by default, as in the paper")
    choice = schedule_factory("dynpipe").choose_stages(
        profile,
        cluster_from_settings(cfg, cfg.ranks * cfg.replicas),
        cfg.batch,
        microbatches[0],
        batches=_batches(options.batches),
        theory=_theory(options.theory),
        executable=not options.all_shapes,
        sharded=options.sharded,
        cached=options.cached,
    )
    best = choice.best
    arguments: dict[str, Any] = {"schedule": "dynpipe", **({"partition": best.best.cuts} if best.best.cuts else {})}
    arguments |= {"data_parallel": best.best.data_parallel} if best.best.data_parallel != 1 else {}
    arguments |= {"tensor_parallel": best.best.tensor_parallel} if best.best.tensor_parallel > 1 else {}
    arguments |= {"microbatches": microbatches[0]} if cfg.microbatches is not None else {}
    line = strategy_line(arguments) if best.best.is_executable else ""
    if options.json:
        print_json({"stages": best.n_stages, "strategy": line, "options": [_row(each) for each in choice.options]})
        return
    print(choice)
    if line:
        print(f"\n    {line}\n    {hydra_overrides(arguments)}")
        if options.cached:
            print("    Trainer(callbacks=[MemorySwap(device_bytes=...)]) with room for the cached weight versions")


def _row(option: Any) -> dict[str, Any]:
    """Return the result for one number of stages in its JSON form. A number that is not finite becomes null."""
    found = option.best
    return {
        "stages": option.n_stages,
        "batches": option.iterations if math.isfinite(option.iterations) else None,
        "seconds_a_batch": found and found.iteration,
        "seconds": option.seconds if math.isfinite(option.seconds) else None,
        "partition": found and found.cuts,
        "devices": found and [list(mesh) for mesh in found.meshes],
        "why_not": option.why_not,
    }


def _batches(text: str | None) -> dict[int, float]:
    """Parse a text such as `1:196,4:222`."""
    if text is None:
        return {}
    try:
        return {int(stages): float(batches) for stages, batches in (each.split(":") for each in text.split(","))}
    except ValueError as error:
        raise InputError(f"--batches {short_repr(text)}: give stages:batches pairs, as in 1:196,4:222") from error


def _theory(text: str | None) -> dict[str, float]:
    """Parse a text such as `loss=10,lipschitz=5,noise=0.04,lr=0.01,target=0.1`."""
    if text is None:
        return {}
    try:
        found = {name.strip(): float(value) for name, value in (each.split("=") for each in text.split(","))}
    except ValueError:
        found = {}
    if set(found) != set(CONVERGENCE_OPTIONS):
        example = "loss=10,lipschitz=5,noise=0.04,lr=0.01,target=0.1"
        raise InputError(f"--theory {short_repr(text)}: give {', '.join(CONVERGENCE_OPTIONS)}, as in {example}")
    return found


COMMAND = Command(
    "stages",
    "Chooses the number of stages of a training without flushes, and the number of replicas of each stage (DynPipe,\n"
    "Algorithm 1). It minimizes the seconds until the target, which are the number of batches times the seconds per\n"
    "batch. The number of batches rises with the staleness of gradients. It is fitted to measured runs (--batches) or\n"
    "computed from the theory (--theory, with constants that the callback GradientProbe measures). Without either, it\n"
    "is the same for all options. There are ranks x replicas devices, and batch is the number of samples of all\n"
    "replicas together.",
    [
        "lightning-pipes stages profile=profile.json ranks=8 batch=64 --batches 1:196,4:222",
        "lightning-pipes stages model=BERT-48 device=A100-40G ranks=8 batch=32 memory=40GiB "
        "--theory loss=10,lipschitz=5,noise=0.04,lr=0.01,target=0.1",
    ],
    run,
    config="plan",
    flags={
        "--batches": ("S:N,...", "measured batches until the target, for at least two numbers of stages"),
        "--theory": ("NAME=X,...", "loss, lipschitz, noise, lr and target of Theorem 1"),
        "--sharded": ("", "also shards of layers, equal on all stages, for modules whose configure_model creates them"),
        "--cached": ("", "devices keep two weight versions, as with MemorySwap; by default stage s of p keeps p - s"),
        "--all-shapes": ("", "also shards of layers that differ between stages, which can be planned but not run"),
    },
    defaults=frozenset({"schedule=auto", "schedule=null", "cluster=null"}),
)
