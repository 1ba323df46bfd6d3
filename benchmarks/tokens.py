"""Micro-batches of equal numbers of tokens against equal numbers of samples, on paragraphs of text of uneven lengths.

A language model of bytes trains on paragraphs of the source text of Python's standard library, on two processes. A
batch is padded to its longest paragraph. `tokens_gain` is the time of a step with equal numbers of samples in each
micro-batch, divided by the time with `microbatches_by="tokens"`. Both runs train the same batches, and their last
losses agree.

    python -m benchmarks.tokens [--quick] [--json]
"""

from __future__ import annotations

import json
import statistics
import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness.memory import count_tensor_bytes
from benchmarks.harness.report import QUIET, Report, hush, make_parser, run_parts
from benchmarks.harness.timing import MAX_RANGE, StepTimer, explain_noise, measure_load, relative_range
from lightning_pipes import PipelineStrategy
from lightning_pipes.ir.instruction import even_spans
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.data.token_cut import MicrobatchesBy, TokenCutter

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from models import GPT

MOST_BYTES = 256
"""The length to which paragraphs are truncated."""
ROWS, MICROBATCHES, RANKS = 32, 8, 2
WARM_UP_STEPS = 2
"""The number of first steps that are not measured."""
KINDS: tuple[MicrobatchesBy, MicrobatchesBy] = ("samples", "tokens")


def read_paragraphs(count: int) -> list[Tensor]:
    """Return paragraphs of the standard library's source text as bytes, in an order that does not depend on files."""
    root, found = Path(sysconfig.get_path("stdlib")), list[bytes]()
    for path in sorted(root.glob("*.py")):
        found += [text.strip() for text in path.read_bytes().split(b"\n\n") if text.strip()]
        if len(found) > 4 * count:
            break
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count].tolist()
    return [torch.tensor([*found[n][:MOST_BYTES]], dtype=torch.int64) for n in order]


def collate(lines: list[Tensor]) -> dict[str, Tensor]:
    """Return a batch in the form of the collators of transformers."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    mask = pad([torch.ones_like(line) for line in lines])
    return {"input_ids": pad(lines), "attention_mask": mask, "labels": pad(lines, padding_value=-100)}


class Lines(GPT):
    """Predicts the next byte of paragraphs of different lengths."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self(batch["input_ids"])[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten())

    def microbatch_weight(self, batch: Any) -> float:
        return float((batch["labels"][:, 1:] != -100).sum())


def train(by: MicrobatchesBy, steps: int, width: int, counts_memory: bool = False) -> tuple[list[float], float, int]:
    """Return the seconds of the measured steps, the last loss, and the largest number of bytes of tensors or 0."""
    L.seed_everything(0, verbose=False)
    timer, model = StepTimer(), Lines(MOST_BYTES, width, 4, 6, dropout=0.0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=PipelineStrategy("1f1b", MICROBATCHES, microbatches_by=by, partition="parameters", check_loss=False),
        max_steps=steps + WARM_UP_STEPS,
        max_epochs=1,
        callbacks=[timer],
        **QUIET,
    )
    lines = read_paragraphs(ROWS * (steps + WARM_UP_STEPS))
    fit = partial(trainer.fit, model, DataLoader(lines, batch_size=ROWS, collate_fn=collate))  # type: ignore[arg-type]
    peak = count_tensor_bytes(fit).peak if counts_memory else fit() or 0
    return timer.seconds[WARM_UP_STEPS:], timer.losses[-1], peak


def take_turns(
    rank: int, steps: int, width: int, rounds: int, counts_memory: bool
) -> tuple[dict[str, list[list[float]]], dict[str, float], dict[str, int]]:
    """Train with both kinds of micro-batches in turn.

    Returns:
        The seconds of the steps of each training, the last losses, and the largest numbers of bytes of tensors, all by
        the kind of micro-batches. The bytes are those of separate trainings, and are missing without `counts_memory`.
    """
    hush()
    dist.init_process_group("gloo")
    seconds: dict[str, list[list[float]]] = {by: [] for by in KINDS}
    losses: dict[str, float] = {}
    for number in range(rounds):
        for by in KINDS[:: -1 if number % 2 else 1]:
            took, losses[by], _ = train(by, steps, width)
            seconds[by].append(took)
    return seconds, losses, {by: train(by, 2, width, True)[2] for by in KINDS if counts_memory}


def measure_padding(steps: int) -> tuple[float, float]:
    """Return the share of padding in the measured batches, and in micro-batches by tokens."""
    lines, cutter, counts = read_paragraphs(ROWS * (steps + WARM_UP_STEPS)), TokenCutter(RANKS), [0, 0, 0]
    for start in range(WARM_UP_STEPS * ROWS, len(lines), ROWS):
        batch = collate(lines[start : start + ROWS])
        made = cutter.cut(batch, ROWS, even_spans(ROWS, MICROBATCHES), ())
        assert made is not None, "lines have different lengths"
        cropped = sum(span.rows * width for span, width in made.widths.items())
        for n, tokens in enumerate((int(batch["attention_mask"].sum()), batch["input_ids"].numel(), cropped)):
            counts[n] += tokens
    return 1 - counts[0] / counts[1], 1 - counts[0] / counts[2]


def compare_tokens(quick: bool) -> Report:
    """Measure the padding, the seconds of a step and the memory of both kinds of micro-batches."""
    steps, width, rounds = (4, 64, 2) if quick else (12, 192, 4)
    load = measure_load()
    ranks = run_ranks(take_turns, RANKS, steps, width, rounds, not quick, timeout=1800)
    losses = ranks[0][1]
    if abs(losses["samples"] - losses["tokens"]) > 1e-3 * losses["samples"]:
        raise SystemExit(
            f"the last losses differ: {losses['samples']:.6g} by samples, {losses['tokens']:.6g} by tokens"
        )
    seconds = {
        by: [
            statistics.median(map(max, *(found[0][by][number] for found in ranks)))  # of the slowest rank
            for number in range(rounds)
        ]
        for by in KINDS
    }
    padding = measure_padding(steps)
    keys = {"tokens_padding": padding[1], "samples_padding": padding[0]}
    lines = [
        f"batches of {ROWS} paragraphs of up to {MOST_BYTES} bytes, {MICROBATCHES} micro-batches, {RANKS} ranks; "
        f"padding is {padding[0]:.0%} of the tokens by samples, and {padding[1]:.0%} by tokens"
    ]
    if not quick:
        peaks = {by: max(found[2][by] for found in ranks) for by in KINDS}
        lines.append(
            "tensors of the largest rank: " + ", ".join(f"{by} {b / 2**20:.0f} MiB" for by, b in peaks.items())
        )
        keys["tokens_memory"] = peaks["tokens"] / peaks["samples"]
    gains = sorted(a / b for a, b in zip(seconds["samples"], seconds["tokens"], strict=True))
    if reason := explain_noise(load, relative_range(gains), MAX_RANGE):
        return Report([*lines, f"the measured steps are {reason}"], keys)
    lines.append(
        "median steps: "
        + ", ".join(f"by {by} {1e3 * statistics.median(took):.0f} ms" for by, took in seconds.items())
        + f"; by tokens, a step is {gains[0]:.2f} to {gains[-1]:.2f} times as fast"
    )
    return Report(lines, {**keys, "tokens_gain": statistics.median(gains)})


def main() -> None:
    """Run the comparison and print its table."""
    options = make_parser(__doc__, "a narrow model with few steps, without memory").parse_args()
    keys = run_parts({"tokens": compare_tokens}, ["tokens"], options.quick)
    if options.json:
        print(json.dumps({name: round(value, 3) for name, value in keys.items()}))


if __name__ == "__main__":
    main()
