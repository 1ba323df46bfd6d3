"""Siblings of a job array that share one real GPU: the cost of the engine, and the cost of states that take turns.

A GPT over bytes is trained by a plain Trainer, by a Trainer with PipelineStrategy on one device, and as an array of
siblings. In the array, either all siblings are on the GPU, or only as many as fit into a smaller budget. In the latter
case, their states are brought to the GPU in advance or on demand. All variants take turns in one process.

The table shows the milliseconds of a batch (median, least and most), the overhead over the plain Trainer, and the loss.

    python benchmarks/gpu.py [--quick] [--json]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.harness.report import QUIET, hush, make_parser

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import GPT

from lightning_pipes import JobArray, MemorySwap, PipelineStrategy

CONTEXT, WIDTH, HEADS, BLOCKS = 1024, 1024, 16, 16
SIBLINGS, SLOTS, BATCHES, WARM = 4, 3, 16, 4
"""SLOTS siblings fit into the smaller budget. The first WARM of the BATCHES of each sibling do not count."""


class Clock(Callback):
    """Records the ends of the batches of all siblings in the queue of the GPU, without waiting for the GPU."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, torch.cuda.Event]] = []

    def of(self, number: int) -> Callback:
        """Return a callback for one sibling."""
        ends = self.ends

        class Each(Callback):
            def on_train_batch_end(self, *args: Any) -> None:
                event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                event.record()
                ends.append((number, event))

        return Each()

    def milliseconds(self, siblings: int) -> float:
        """Return the milliseconds of a batch, from when all siblings are warm until the first one ends."""
        torch.cuda.synchronize()
        seen: Counter[int] = Counter()
        begin: torch.cuda.Event | None = None
        batches = 0
        for number, when in self.ends:
            seen[number] += 1
            if begin is not None:
                batches += 1
            elif len(seen) == siblings and min(seen.values()) >= WARM:
                begin = when
            if begin is not None and max(seen.values()) == BATCHES:
                return float(begin.elapsed_time(when)) / max(1, batches)
        raise RuntimeError("no steady state")


def trainer_of(strategy: Any, callback: Callback) -> L.Trainer:
    """Return a Trainer with a strategy and a callback."""
    return L.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        strategy=strategy,
        max_steps=BATCHES,
        callbacks=[callback],
        **QUIET,
    )


def fit(strategy: Any, rows: int, callback: Callback) -> float:
    """Train once and return the last loss."""
    L.seed_everything(1, verbose=False)
    tokens = torch.randint(0, 256, (rows * BATCHES, CONTEXT))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(tokens, tokens.roll(-1, 1)), rows, pin_memory=True
    )
    trainer = trainer_of(strategy, callback)
    with torch.device("cuda"):
        module = GPT(CONTEXT, WIDTH, HEADS, BLOCKS, dropout=0.0)
    trainer.fit(module, loader)
    return float(trainer.callback_metrics["train_loss"])


def alone(strategy: Callable[[], Any]) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains a single model and returns its milliseconds and its loss."""

    def run(rows: int) -> dict[str, Any]:
        clock = Clock()
        loss = fit(strategy(), rows, clock.of(0))
        return {"ms": clock.milliseconds(1), "loss": loss}

    return run


def array(memory: Callable[[], MemorySwap | None]) -> Callable[[int], dict[str, Any]]:
    """Return a function that trains an array of siblings and returns its milliseconds, a loss and swap statistics."""

    def run(rows: int) -> dict[str, Any]:
        clock, swap = Clock(), memory()

        def job(number: int) -> Callable[[], Any]:
            return lambda: fit(PipelineStrategy("jap", microbatches=1), rows, clock.of(number))

        together: JobArray[Any] = JobArray(SIBLINGS, progress=False, memory=swap)
        found = list(together.run([job(n) for n in range(SIBLINGS)]))
        for each in found:
            if each.error is not None:
                raise each.error
        out = {"ms": clock.milliseconds(SIBLINGS), "loss": found[0].value}
        if swap is not None:
            out["statistics"] = swap.statistics
            out["switching"] = str(swap.switching)
        return out

    return run


def main() -> None:
    """Run all ways to train and print the table."""
    arguments = make_parser(__doc__, "one round of the smaller batch").parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device")
    hush()
    torch.set_float32_matmul_precision("high")
    ways: dict[str, Callable[[int], dict[str, Any]]] = {
        "plain Trainer": alone(lambda: "auto"),
        "PipelineStrategy, one device": alone(lambda: PipelineStrategy("1f1b", microbatches=1)),
        "array, room for all": array(lambda: None),
        "array, prefetched": array(lambda: MemorySwap(70 << 30, slots=SLOTS)),
        "array, on demand": array(lambda: MemorySwap(70 << 30, slots=SLOTS, prefetch=False)),
    }
    found: dict[str, float] = {}
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, lightning {L.__version__}; GPT of {BLOCKS} blocks"
    )
    for rows in (16,) if arguments.quick else (16, 32):
        times: dict[str, list[float]] = {name: [] for name in ways}
        last: dict[str, dict[str, Any]] = {}
        for _ in range(1 if arguments.quick else 3):
            for name, run in ways.items():
                last[name] = run(rows)
                times[name].append(last[name]["ms"])
        base = statistics.median(times["plain Trainer"])
        print(f"\n{rows} rows of {CONTEXT}: ms a batch, median (least to most), relative to the plain Trainer; loss")
        for name, all_ms in times.items():
            ms = statistics.median(all_ms)
            key = name.replace(",", "").replace(" ", "_")
            found[f"{key}_{rows}"] = round(ms, 2)
            print(
                f"{name:30} {ms:8.1f} ({min(all_ms):.1f} to {max(all_ms):.1f}) {100 * (ms / base - 1):+6.1f} %  "
                f"{last[name]['loss']:.4f}"
            )
            for what in ("statistics", "switching"):
                if what in last[name]:
                    print(f"    {last[name][what]}")
        torch.cuda.empty_cache()
    print("Left out: several GPUs, because only one was available.")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
