"""What Lightning's loop and our strategy cost a step, on top of the bare engine: a real GPT in two stages.

Both train the same model on the same batches with the same optimizer, in blocks that alternate in one run.

    python benchmarks/lightning_layer.py [--quick] [--json] [--blocks N]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import time
import warnings
from itertools import pairwise
from typing import Any

import torch
from engine import gpt_parts
from torch import nn

from lightning_pipes.testing.emulated import steady
from lightning_pipes.testing.ranks import run_ranks

RANKS, MICROBATCHES, ROWS, TOKENS = 2, 8, 16, 96
STEPS, WARM_UP = 12, 3


def batches() -> torch.utils.data.DataLoader[Any]:
    """The same batches for everybody."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, ((STEPS + WARM_UP) * ROWS, TOKENS + 1), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=ROWS)


def engine_block(rank: int, watch: Any) -> list[float]:
    """Seconds of each step of a plain loop around the engine."""
    from lightning_pipes.engine import Engine, Item, Stage, make_transport
    from lightning_pipes.ir import Plan, Schedule, Span
    from lightning_pipes.ir.registry import make_schedule

    parts = gpt_parts(RANKS)
    plan = Plan.even(RANKS, MICROBATCHES, ROWS)

    def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        rows = item.data[span.start : span.stop]
        out = stage.run_layers(item, span, rows[:, :-1] if received is None else received)
        if stage.number < RANKS - 1:
            return out
        return nn.functional.cross_entropy(out, rows[:, 1:]) * (span.rows / item.rows)

    schedule = make_schedule("1f1b")
    assert isinstance(schedule, Schedule)
    optimizer = torch.optim.AdamW(parts[rank].parameters(), lr=1e-3)
    transport = make_transport(plan, rank, range(RANKS), torch.device("cpu"), watch)
    stage = Stage(rank, dict(enumerate(parts[rank])), body)
    engine = Engine(plan, schedule.program(plan), [stage], transport, rank=rank, watch=watch)
    ends = [time.perf_counter()]
    for number, (x,) in enumerate(batches()):
        engine.inject(Item(number, ROWS, x))
        engine.drain()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    engine.close()
    return [b - a for a, b in pairwise(ends)][WARM_UP:]


def lightning_block() -> list[float]:
    """Seconds of each step of a Trainer, from the end of one batch to the end of the next."""
    import lightning as L

    from lightning_pipes import PipelineStrategy

    ends: list[float] = []

    class GPT(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(layer for part in gpt_parts(RANKS) for layer in part))

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            (rows,) = batch
            loss = nn.functional.cross_entropy(self.layers(rows[:, :-1]), rows[:, 1:])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Clock(L.Callback):
        def on_train_start(self, *args: Any) -> None:
            ends.append(time.perf_counter())

        def on_train_batch_end(self, *args: Any) -> None:
            ends.append(time.perf_counter())

    trainer = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=PipelineStrategy("1f1b", microbatches=MICROBATCHES, partition=[len(gpt_parts(RANKS)[0])]),
        max_epochs=1,
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(), batches())
    return [b - a for a, b in pairwise(ends)][WARM_UP:]


def rank_main(rank: int, blocks: int) -> tuple[list[float], list[float]]:
    """Median step of each block on this rank: engine alone, and through Lightning."""
    steady()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import torch.distributed as dist

    from lightning_pipes.engine import FailureWatch

    dist.init_process_group("gloo")
    plain, through = [], []
    for _ in range(blocks):
        watch = FailureWatch(dist.distributed_c10d._get_default_store(), rank)
        plain.append(statistics.median(engine_block(rank, watch)))
        watch.close()
        through.append(statistics.median(lightning_block()))
    return plain, through


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 blocks")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--blocks", type=int, default=9)
    options = parser.parse_args()
    blocks = 3 if options.quick else options.blocks
    plain, through = run_ranks(rank_main, RANKS, blocks, timeout=600)[0]
    differences = sorted(1e3 * (b - a) for a, b in zip(plain, through, strict=True))
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}; {blocks} pairs of {STEPS} steps")
    alone, whole = 1e3 * statistics.median(plain), 1e3 * statistics.median(through)
    print(f"engine alone {alone:.1f} ms, through Lightning {whole:.1f} ms")
    print(f"difference {statistics.median(differences):.2f} ms a step ({differences[0]:.2f} to {differences[-1]:.2f})")
    if options.json:
        overhead = statistics.median(differences)
        print(json.dumps({"lightning_overhead_ms": overhead, "engine_step_ms": alone}))


if __name__ == "__main__":
    main()
