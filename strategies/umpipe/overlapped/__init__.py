"""Unequal micro-batches whose forward and backward overlap: what they take, the best ones, and what they hold."""

from lightning_pipes.strategies.umpipe.overlapped.lockstep import Results, lockstep
from lightning_pipes.strategies.umpipe.overlapped.memory import Point, RowBytes, front, within
from lightning_pipes.strategies.umpipe.overlapped.partition import Joint, Layers, joint
from lightning_pipes.strategies.umpipe.overlapped.run import Merge, Run, cut_of, overlapped
from lightning_pipes.strategies.umpipe.overlapped.search import Effort, Found, search

__all__ = [
    "Effort",
    "Found",
    "Joint",
    "Layers",
    "Merge",
    "Point",
    "Results",
    "RowBytes",
    "Run",
    "cut_of",
    "front",
    "joint",
    "lockstep",
    "overlapped",
    "search",
    "within",
]
