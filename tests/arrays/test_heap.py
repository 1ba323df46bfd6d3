"""Tests that siblings, which are threads, allocate from one heap that keeps its memory between batches."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.report import describe_allocator
from lightning_pipes import JobArray, PipelineStrategy
from lightning_pipes.engine import allocator
from lightning_pipes.testing.ranks import run_ranks

SIBLINGS, BATCHES, ROWS, WIDTH = 3, 8, 16, 1 << 17


class Scale(nn.Module):
    """A layer with a small weight, whose input and output are blocks of 8 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.expand(-1, WIDTH) * self.scale)


class Wide(L.LightningModule):
    """A module whose batches need more than 64 MiB, which is the maximum size of a thread's heap in glibc."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Scale() for _ in range(8)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        out: torch.Tensor = self.layers(batch[0])
        return out.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class HeapInfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`, whose first field is the size of all heaps in bytes."""

    _fields_: ClassVar = [("arena", ctypes.c_size_t), ("other", ctypes.c_size_t * 9)]


class RecordHeap(L.Callback):
    """A callback that records the size of all heaps of this process after each batch of any sibling.

    The record ends with the first sibling that ends.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ended = False
        self._read = ctypes.CDLL(None).mallinfo2
        self._read.restype = HeapInfo

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.ended:
            self.sizes.append(self._read().arena)

    def on_train_end(self, *_: Any) -> None:
        self.ended = True


def train(recording: L.Callback) -> None:
    """Train a module as a sibling."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy("jap", microbatches=1, partition="parameters"),
        max_epochs=1,
        callbacks=[recording],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    L.seed_everything(0, verbose=False)
    trainer.fit(Wide(), DataLoader(TensorDataset(torch.randn(ROWS * BATCHES, 1)), ROWS))


def record_heap(rank: int) -> list[int]:
    """Return the sizes of all heaps after each batch of the siblings of an array, in bytes."""
    recording = RecordHeap()
    jobs: JobArray[None] = JobArray(SIBLINGS, progress=False)
    outcomes = list(jobs.run([partial(train, recording)] * SIBLINGS))
    assert not any(outcome.error for outcome in outcomes), outcomes
    assert len(recording.sizes) > BATCHES
    return recording.sizes


needs_glibc = pytest.mark.skipif(allocator.load_libc() is None, reason="only glibc's allocator has the options")


@needs_glibc
def test_memory_stays_with_the_array_from_batch_to_batch() -> None:
    """Check that no heap shrinks between batches.

    Without the setting, each thread has its own heap, which shrinks after a batch and causes page faults in the next.
    """
    for sizes in run_ranks(record_heap, 2):
        assert sizes == sorted(sizes)


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record the options for glibc instead of setting them, and clear the environment of such options."""
    told: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda *option: told.append(option), malloc_trim=lambda _: told.append((0, 0)))
    monkeypatch.setattr(allocator, "load_libc", lambda: libc)
    for name in (allocator.KEEP_HEAP_VARIABLE, *allocator.VARIABLES_OF_GLIBC):
        monkeypatch.delenv(name, raising=False)
    return told


def test_options_hold_while_the_array_runs(options: list[tuple[int, int]]) -> None:
    """Check the options for glibc during an array, and after it."""
    with allocator.kept_heap():
        assert dict(options) == {-8: 1, -3: 32 << 20, -1: (2 << 30) - 1, -2: 64 << 20}
        options.clear()
        allocator.release_free_memory()
        assert not options, "a sibling that starts keeps the free memory of the others"
        allocator.trim_heap(kept=True)
        assert options == [(0, 0)]
        options.clear()
    assert dict(options) == {-3: 32 << 20, -1: 64 << 20, -2: 128 << 10, 0: 0}, "free memory goes back in the end"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (allocator.KEEP_HEAP_VARIABLE, "0"),
        ("MALLOC_ARENA_MAX", "4"),
        ("MALLOC_TRIM_THRESHOLD_", "1000000"),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2"),
    ],
)
def test_settings_of_the_user_stay(
    name: str, value: str, options: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that no options are set if the user has set any of them."""
    monkeypatch.setenv(name, value)
    with allocator.kept_heap():
        allocator.share_heap()
    assert not options


@needs_glibc
def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no options are set for another allocator, such as jemalloc loaded by LD_PRELOAD."""
    find = allocator.find_library
    monkeypatch.setattr(allocator, "find_library", lambda f: "/lib/libjemalloc.so.2" if f == "malloc" else find(f))
    allocator.load_libc.cache_clear()
    try:
        assert allocator.load_libc() is None
        assert describe_allocator() == "libjemalloc.so.2"
    finally:
        allocator.load_libc.cache_clear()


@needs_glibc
def test_benchmarks_name_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the description of the allocator with and without the setting."""
    for name in (allocator.KEEP_HEAP_VARIABLE, *allocator.VARIABLES_OF_GLIBC):
        monkeypatch.delenv(name, raising=False)
    assert describe_allocator() == "libc.so.6, one heap in arrays"
    monkeypatch.setenv(allocator.KEEP_HEAP_VARIABLE, "0")
    assert describe_allocator() == "libc.so.6"
