"""The bytes of tensors that are alive while a function runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile


class TensorBytes(NamedTuple):
    """Bytes of tensors that one thread created while a function ran, without tensors from before.

    Attributes:
        peak: the largest number of bytes at the same time.
        rest: the bytes that were left at the end. The number is negative if the thread freed tensors that existed
            before, or that other threads created.
    """

    peak: int
    rest: int


def count_tensor_bytes(work: Callable[[], object]) -> TensorBytes:
    """Run a function and return the bytes of the tensors that it created, without the tensors of other threads."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    recorded: Any = profiler.profiler
    events = (e for e in recorded.kineto_results.events() if e.name() == "[memory]")
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return TensorBytes(int(max(accumulate(changes))), int(sum(changes)))
