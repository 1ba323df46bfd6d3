"""Simulation of a batch with overlapping forward and backward, in which each process has its own chunk size.

The paper calls this UMPipeDream and does not define its semantics (section V-E says "by recursion"). Here, they are as
follows. A process runs its chunks in the order of samples. A chunk starts when its stage or link is free and all of its
rows are finished in the process before. For the first backward process, this is the last forward process. A stage
computes one chunk at a time, forward or backward, without preemption. A link transfers one chunk at a time in each
direction. If a stage could start a forward and a backward, a policy decides between them. No rank idles to wait for a
better chunk.
"""

from enum import IntEnum

from lightning_pipes.strategies.umpipe.overlapped import kernel

__all__ = ["Merge"]


class Merge(IntEnum):
    """The policy of a stage that could start a forward and a backward."""

    BACKWARD_FIRST = kernel.BACKWARD_FIRST
    """The backward, as in 1F1B."""
    FORWARD_FIRST = kernel.FORWARD_FIRST
    """The forward, if the caps allow it."""
    ALL_FORWARDS_FIRST = kernel.ALL_FORWARDS_FIRST
    """No backward before the last forward, as in GPipe. The time is E4 of the paper."""
