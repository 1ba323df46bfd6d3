"""Simulation of batches with unequal micro-batches and overlapping forward and backward."""

from lightning_pipes.strategies.umpipe.overlapped.run import Merge, OverlappedRun, cut_of, run_overlapped

__all__ = ["Merge", "OverlappedRun", "cut_of", "run_overlapped"]
