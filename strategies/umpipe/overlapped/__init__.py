"""Unequal micro-batches with overlapping forward and backward: what they take."""

from lightning_pipes.strategies.umpipe.overlapped.run import Merge, OverlappedRun, cut_of, run_overlapped

__all__ = ["Merge", "OverlappedRun", "cut_of", "run_overlapped"]
