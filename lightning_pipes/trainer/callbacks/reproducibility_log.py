"""A callback that logs the information needed to compare two training runs bit by bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
import torch

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.ir import PipelineError, check_count
from lightning_pipes.sim.records.training_record import RECORD_FOLDER
from lightning_pipes.trainer.loop.host import PipelineCallback
from lightning_pipes.trainer.loop.run import StageListener


class ReproducibilityLog(PipelineCallback, StageListener):
    """Logs losses, the order of the reads and steps of layers, and hashes of weights.

    The logs of two runs show where the runs differ: `lightning-pipes compare RUN RUN` prints the first difference. For
    every `every_n_batches`-th batch, the callback hashes the parameters and buffers of the layers that the batch has
    stepped. At the end of an epoch, it hashes all layers.

    The callback is meant for schedules that do not flush, and it does not cause any waiting. A stage hashes its own
    layers when it steps them, while the batches may be anywhere in the pipeline. The training is the same with and
    without the callback.

    Args:
        directory: the directory of the run, by default the Trainer's `default_root_dir`. The files are written to its
            subdirectory `reproducibility`, one for each rank.
        every_n_batches: the interval, in batches, at which layers are hashed. With 1, the very first difference is
            found.

    Raises:
        PipelineError: `every_n_batches` is below 1. When training starts: the schedule flushes, so that batches do not
            overlap.
    """

    def __init__(self, directory: str | Path | None = None, every_n_batches: int = 50) -> None:
        self.directory = directory
        self.every_n_batches = check_count("ReproducibilityLog: every_n_batches", every_n_batches)
        self._file: IO[str] | None = None
        self._seen: set[str] = set()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = self.pipeline(trainer)
        if not strategy.current_run.is_asynchronous:
            raise PipelineError(
                "ReproducibilityLog follows batches that overlap, and schedule "
                f"{strategy.schedule.name!r} flushes after each. Take a schedule that does not flush, or leave the "
                "callback out"
            )
        run = self._run = strategy.current_run
        folder = Path(self.directory or trainer.default_root_dir) / RECORD_FOLDER
        fit = strategy.broadcast(len({path.name.partition("-")[0] for path in folder.glob("*-rank*.jsonl")}))
        folder.mkdir(parents=True, exist_ok=True)
        self._tells = strategy.global_rank == 0
        self._file = (folder / f"{fit:03d}-rank{strategy.global_rank}.jsonl").open("w", encoding="utf-8", buffering=1)
        self._write({"begins": trainer.fit_loop.total_batch_idx + 1})
        run.listeners.append(self)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        here = {str(number) for number in self._run.cut.local}
        hashes = {name: self._hash(name) for name in sorted(self._seen) if name.partition(".")[0] in here}
        self._write({"end": trainer.fit_loop.total_batch_idx, "layers": hashes})

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def before_first_forward(self, stage: Stage, item: Item) -> None:
        self._write({"F": item.number, "layers": sorted(_used(stage, item))})

    def after_optimizer_step(self, stage: Stage, item: Item) -> None:
        names = sorted(_stepped(stage, item))
        self._seen.update(names)
        if item.use is not None:  # layers that belong to this stage may be stepped by other stages
            self._seen.update(
                name for number in range(len(item.use.layers)) for name in item.use.stepped_layers(number)
            )
        chosen = item.number % self.every_n_batches == 0
        hashes = {name: hash_of(stage.named_tensors(name)) if chosen else None for name in names}
        self._write({"B": item.number, "layers": hashes})

    def after_result(self, number: int, batch: Any, out: Any) -> None:
        if self._tells:
            loss = float(out["loss"] if isinstance(out, dict) else out)
            choices = getattr(batch[-1], "choices", None) if isinstance(batch, (list, tuple)) else None
            self._write(
                {"loss": loss.hex(), "of": number, "value": loss} | ({"subnet": list(choices)} if choices else {})
            )

    def _hash(self, name: str) -> str:
        number, _, part = name.partition(".")
        layer = self._run.cut.full[int(number)].get_submodule(part)
        return hash_of({**dict(layer.named_parameters()), **dict(layer.named_buffers())})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of the parameters and buffers of a layer, which covers their names, dtypes, shapes and bits.

    Args:
        tensors: the parameters and buffers by name.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _used(stage: Stage, item: Item) -> Iterable[str]:
    return map(str, stage.layers) if item.use is None else item.use.layers[stage.number]


def _stepped(stage: Stage, item: Item) -> Iterable[str]:
    return map(str, stage.layers) if item.use is None else item.use.stepped_layers(stage.number)
