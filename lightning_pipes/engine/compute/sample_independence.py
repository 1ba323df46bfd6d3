"""Checks a forward that will run again on some of its samples at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_pipes.engine.compute.rng import random_state, same_random_state
from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.ir import PlanError, Span

MIXING = (BatchNorm,)
"""Layers in which a sample's output depends on the others, while they train."""


class SampleIndependenceCheck:
    """Checks one such forward: each sample's output must not depend on the other samples.

    Otherwise its gradient would belong to an output that the next stage never received.

    Args:
        stage: the number of the stage.
        span: the samples of the forward.
    """

    def __init__(self, stage: int, span: Span, device: torch.device) -> None:
        self._where = f"stage {stage} runs the forward of samples {span.start}:{span.stop} in one piece"
        self._device = device
        self._seeded_for = ""
        self._seeded: dict[str, Any] | None = None

    def note_seeded(self, seeded_for: str, everything: bool) -> None:
        """Note that the random generators were seeded for `seeded_for`, which must draw no numbers; with `everything`
        those of Python and NumPy count too."""
        state = random_state(self._device)
        self._seeded_for, self._seeded = (
            seeded_for,
            state if everything else {name: state[name] for name in state.keys() & _TORCH},
        )

    def check_drawn(self) -> None:
        """Refuse code that drew random numbers since the last seeding.

        Raises:
            PlanError: random numbers were drawn.
        """
        if self._seeded is not None and not same_random_state(self._seeded, random_state(self._device)):
            self._refuse(f"{self._seeded_for} draws random numbers")

    def check_layer(self, number: int, layer: nn.Module) -> None:
        """Refuse layers that are known to mix samples.

        Raises:
            PlanError: it is one.
        """
        for part in layer.modules():
            if isinstance(part, MIXING) and part.training:
                self._refuse(f"layer {number} holds a {type(part).__name__}, which looks at all samples at once")

    @contextmanager
    def check_buffers(self, number: int, layer: nn.Module) -> Iterator[None]:
        """Refuse a layer that changes its buffers in the block: a forward in parts would read other values.

        Raises:
            PlanError: it changes one.
        """
        before = {name: (buffer, buffer._version) for name, buffer in layer.named_buffers()}
        yield
        for name, buffer in layer.named_buffers():
            if name in before and (buffer is not before[name][0] or buffer._version != before[name][1]):
                self._refuse(f"layer {number} changes its buffer {name!r}")

    def _refuse(self, why: str) -> None:
        raise PlanError(
            f"{self._where}, and again in parts for its backwards, which would give something else: {why}. Split this "
            "stage's forward too, by a plan without whole_forward for it, or cut forward and backward equally"
        )


_TORCH = {"torch", "cuda"}
