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
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.harness.memory import count_tensor_bytes
from benchmarks.harness.report import QUIET, Report, describe_machine, hush, make_parser, run_parts
from examples.models import GPT
from lightning_pipes import PipelineStrategy
from lightning_pipes.ir.instruction import even_spans
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.data.token_cut import MicrobatchesBy, TokenCutter

MOST_BYTES = 256
"""The length to which paragraphs are truncated."""
ROWS, MICROBATCHES, RANKS = 32, 8, 2
WARM_UP_STEPS = 6
"""The number of first steps that are not measured. Some of them are compared with whole batches."""


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


class Clock(L.Callback):
    """Records the seconds of each step and the last loss."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.loss = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.loss = float(outputs["loss"])


def train(rank: int, by: MicrobatchesBy, steps: int, width: int, counts_memory: bool) -> tuple[list[float], float, int]:
    """Return the seconds of the measured steps, the last loss, and the largest number of bytes of tensors or 0."""
    hush()
    L.seed_everything(0, verbose=False)
    clock, model = Clock(), Lines(MOST_BYTES, width, 4, 6, dropout=0.0)
    strategy = PipelineStrategy("1f1b", MICROBATCHES, microbatches_by=by, partition="parameters")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy,
        max_steps=steps + WARM_UP_STEPS,
        max_epochs=1,
        callbacks=[clock],
        **QUIET,
    )
    lines = read_paragraphs(ROWS * (steps + WARM_UP_STEPS))
    fit = partial(trainer.fit, model, DataLoader(lines, batch_size=ROWS, collate_fn=collate))  # type: ignore[arg-type]
    peak = count_tensor_bytes(fit).peak if counts_memory else fit() or 0
    return clock.seconds[WARM_UP_STEPS:], clock.loss, peak


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
    steps, width = (8, 64) if quick else (30, 192)
    kinds: tuple[MicrobatchesBy, MicrobatchesBy] = ("samples", "tokens")
    seconds, losses, peaks = list[float](), list[float](), list[int]()
    for by in kinds:
        ranks = run_ranks(train, RANKS, by, steps, width, False, timeout=1800)
        seconds.append(statistics.median(max(each) for each in zip(*(found[0] for found in ranks), strict=True)))
        losses.append(ranks[0][1])
        if not quick:
            peaks.append(max(found[2] for found in run_ranks(train, RANKS, by, 4, width, True, timeout=1800)))
    if abs(losses[0] - losses[1]) > 1e-3 * losses[0]:
        raise SystemExit(f"the last losses differ: {losses[0]:.6g} by samples, {losses[1]:.6g} by tokens")
    padding = measure_padding(steps)
    lines = [
        f"Batches of {ROWS} paragraphs of up to {MOST_BYTES} bytes, {MICROBATCHES} micro-batches, {RANKS} processes "
        f"({describe_machine()})",
        "",
        "| micro-batches by | padding | seconds of a step | MiB of tensors |",
        "| --- | --- | --- | --- |",
        *(
            f"| {by} | {100 * share:.0f} % | {took:.3f} | {f'{peak / 2**20:.0f}' if peak else ''} |"
            for by, share, took, peak in zip(kinds, padding, seconds, peaks or (0, 0), strict=True)
        ),
    ]
    keys = {"tokens_gain": seconds[0] / seconds[1], "tokens_padding": padding[1], "samples_padding": padding[0]}
    return Report(lines, keys if quick else {**keys, "tokens_memory": peaks[1] / peaks[0]})


def main() -> None:
    """Run the comparison and print its table."""
    options = make_parser(__doc__, "8 steps of a narrow model, without memory").parse_args()
    keys = run_parts({"tokens": compare_tokens}, ["tokens"], options.quick)
    if options.json:
        print(json.dumps({name: round(value, 3) for name, value in keys.items()}))


if __name__ == "__main__":
    main()
