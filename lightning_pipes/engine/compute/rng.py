"""Random numbers that do not depend on the rank of a layer.

Each combination of job, layer, batch and span has its own stream, so dropout uses the same masks for any number of
stages.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lightning_pipes.ir import Span

BEFORE_LAYERS = -1
"""The layer number of user code that runs before the first layer."""
AFTER_LAYERS = -2
"""The layer number of user code that runs after the last layer.

For stages that do not continue with the random state of the previous stage, the number of the code behind the first n
units of a step is `AFTER_LAYERS - n`.
"""

_COMPARABLE_TYPES = {int, float, str, type(None)}
"""The types in generator states that `==` can compare."""


@lru_cache(maxsize=4096)
def stream_seed(seed: int, job: int, layer: int, number: int, span: Span) -> int:
    """Return a 63-bit seed that is the same on every rank and machine.

    Args:
        seed: the seed of the run.
        job: the number of the job.
        layer: the number of the layer, or `BEFORE_LAYERS` or `AFTER_LAYERS`.
        number: the number of the batch since training began.
        span: the samples of the micro-batch.
    """
    text = f"{seed}/{job}/{layer}/{number}/{span.start}:{span.stop}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def replica_seed(seed: int, replica: int) -> int:
    """Return the seed of a replica of the pipeline. The first replica has the seed of a pipeline without replicas."""
    return seed if not replica else stream_seed(seed, replica, BEFORE_LAYERS, 0, Span(0, 0))


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of torch, Python and NumPy, and of the GPU if `device` is one."""
    state = {"torch": torch.default_generator.get_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states that `random_state` returned. A GPU's generator is not changed if the state is from a CPU."""
    torch.default_generator.set_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def read_generators(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's generators, for the CPU and for `device` if it is a GPU."""
    states = [torch.default_generator.get_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_generators(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """Restore the states that `read_generators` returned."""
    torch.default_generator.set_state(states[0].cpu().clone())  # torch can't restore a state from a view
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1].cpu().clone(), device)


class RngUse:
    """Detects whether code draws random numbers between calls of `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self.was_used = False
        self._device = device
        self._state: Any = None

    def start(self) -> None:
        """Start to watch the generators."""
        self._state = self._now()

    def stop(self) -> None:
        """Stop watching the generators, and update `was_used`."""
        self.was_used = self.was_used or self._now() != self._state

    def _now(self) -> Any:
        return comparable_state(random_state(self._device))


def comparable_state(state: Any) -> Any:
    """Return the state of generators in a form that `==` can compare."""
    if isinstance(state, dict):
        return {name: comparable_state(part) for name, part in state.items()}
    if isinstance(state, tuple):  # the state of Python's generator has 625 numbers
        return state if _COMPARABLE_TYPES.issuperset(map(type, state)) else [comparable_state(part) for part in state]
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    return state.tobytes() if isinstance(state, np.ndarray) else state


def same_random_state(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two results of `random_state` are equal for all generators that are in both of them."""
    return all(comparable_state(a[name]) == comparable_state(b[name]) for name in a.keys() & b.keys())


@contextmanager
def forked_rng(device: torch.device) -> Iterator[None]:
    """Restore the generators of torch, Python and NumPy after the block."""
    state = random_state(device)
    try:
        yield
    finally:
        set_random_state(state, device)


def seed_all(seed: int, device: torch.device, everything: bool = False) -> None:
    """Seed the generators of torch. If `everything` is true, seed the generators of Python and NumPy, too."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    if everything:
        random.seed(seed)
        np.random.seed(seed % 2**32)


def seed_for_layer(layer: int, seed: int, device: torch.device) -> None:
    """Seed the generators for a layer, or for user code around the layers.

    The generators of torch are always seeded. The generators of Python and NumPy are seeded only before the layers.
    They continue in code after the layers, because layers do not seed them.
    """
    seed_all(seed, device, everything=layer == BEFORE_LAYERS)
