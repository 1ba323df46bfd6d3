"""Random numbers that do not depend on where a layer runs.

Every (job, layer, batch, span) has its own stream, so dropout gives the same masks on any number of stages.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lightning_pipes.ir import Span

BEFORE_LAYERS = -1
"""The layer number of user code that runs before the first layer."""
AFTER_LAYERS = -2
"""The layer number of user code that runs after the last layer."""


def stream_seed(seed: int, job: int, layer: int, number: int, span: Span) -> int:
    """A 63-bit seed that is the same on every rank and machine."""
    text = f"{seed}/{job}/{layer}/{number}/{span.start}:{span.stop}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def replica_seed(seed: int, replica: int) -> int:
    """What the streams of a replica of the pipeline start from; the first one's as if it were alone."""
    return seed if not replica else stream_seed(seed, replica, BEFORE_LAYERS, 0, Span(0, 0))


@contextmanager
def forked_rng(device: torch.device) -> Iterator[None]:
    """Leaves the generators of torch, Python and NumPy as they were before."""
    cpu = torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        random.setstate(python)
        np.random.set_state(numpy)


def seed_all(seed: int, device: torch.device, everything: bool = False) -> None:
    """Seeds torch's generators, and with `everything` those of Python and NumPy."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    if everything:
        random.seed(seed)
        np.random.seed(seed % 2**32)
