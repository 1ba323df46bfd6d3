"""Unequal micro-batches whose forward and backward overlap: what they take."""

from lightning_pipes.strategies.umpipe.overlapped.run import Merge, Run, cut_of, overlapped

__all__ = ["Merge", "Run", "cut_of", "overlapped"]
