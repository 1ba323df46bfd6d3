"""The command `lightning-pipes verify`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from lightning_pipes.ir import InputError, PipelineError, check_count
from lightning_pipes.trainer.plan.settings import VERIFY_VARIABLE
from lightning_pipes.trainer.verify.comparison import FINDINGS_VARIABLE, load_findings
from lightning_pipes.tune.cli.command import Command, print_json

DEFAULT_BATCHES = 2


def run(cfg: DictConfig, words: Sequence[str], options: argparse.Namespace) -> None:
    """Run a script with verification of its first batches, and print the findings."""
    (script,) = words
    if not Path(script).is_file():
        raise InputError(f"{script}: there is no such script")
    batches = options.batches or str(DEFAULT_BATCHES)
    check_count("--batches", int(batches) if batches.isdigit() else batches)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings.jsonl"
        env = os.environ | {VERIFY_VARIABLE: batches, FINDINGS_VARIABLE: str(file)}
        status = subprocess.run([sys.executable, script, *options.arguments], env=env).returncode
        findings = load_findings(file)
    equal = bool(findings) and all(finding.equal for finding in findings)
    if options.json:
        print_json({"equal": equal, "status": status, "findings": [finding.text for finding in findings]})
    else:
        for finding in findings:
            print(finding.text)
    if not findings:
        raise PipelineError(
            f"{script} did not train a batch with a PipelineStrategy (it ended with status {status}), so there is "
            "nothing to compare; use Trainer(strategy=PipelineStrategy(...)) in it"
        )
    if not equal:
        raise SystemExit(1)


COMMAND = Command(
    "verify",
    "Runs a script that trains with a PipelineStrategy, also trains its first batches in one plain process, and "
    "names\nthe first value that differs. The script ends training after these batches. Exits with 1 if a value "
    "differs.",
    [
        "lightning-pipes verify train.py --lr 0.1",
        "lightning-pipes verify --batches 4 train.py",
    ],
    run,
    positionals=("SCRIPT",),
    flags={"--batches": ("N", f"the number of batches to compare; {DEFAULT_BATCHES} by default")},
    script=True,
)
