"""The module's own random generators, of which every rank has a copy.

In one process, the code before the layers, the layers, and the code after them draw from a generator one after another.
In a pipeline they are on different ranks. Therefore the state of a generator is sent with each micro-batch from stage
to stage. After a batch, all ranks adopt the state at the end of the first micro-batch:

    one micro-batch      draws the same numbers as one process
    several of them      the first one begins with the state of the batch, and the others with states derived from it:
                         all draw different numbers, as with torch's own generator
    overlapping batches  each batch begins with its own state, which depends on its number
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pipes.engine.compute.rng import BEFORE_LAYERS, stream_seed
from lightning_pipes.engine.watch import plain
from lightning_pipes.ir import Span
from lightning_pipes.trainer.user.unchanged import find_generators, set_state, state_of

States = Mapping[int, bytes]
"""The states of some of the generators, in a form that can be sent and compared.

The keys are the positions of the generators in the list of all generators.
"""


class ModuleGenerators:
    """The generators of a module and its layers, in the same order on all ranks.

    Args:
        module: the module.
        layers: the layers that are distributed; None if the module is cut by units.
        proxy: the module in place of the layers, which contains the layers of this rank.

    Attributes:
        last: the states that the latest micro-batch has changed.
    """

    def __init__(self, module: nn.Module, layers: nn.Module | None = None, proxy: nn.Module | None = None) -> None:
        self._module, self._layers, self._proxy = module, layers, proxy
        self._overlapping = False
        self._is_alone = False
        self._begun: States = {}
        self.last: States = {}
        self._ended: States = {}
        self.find()

    def __bool__(self) -> bool:
        return bool(self._generators)

    def expect_overlap(self, alone: bool) -> None:
        """Give each batch its own states, because batches overlap.

        Args:
            alone: whether this rank is the only one of its pipeline. In this case batches draw one after another.
        """
        self._overlapping, self._is_alone = not alone, alone

    def find(self) -> None:
        """Find the generators again, because hooks may have created others."""
        inside = [] if self._layers is None else find_generators(self._layers)
        found = {id(each): each for each in (*find_generators(self._module, self._proxy), *inside)}
        self._generators = [*found.values()]

    def read_states(self) -> States:
        """Return the present states of all generators."""
        return {place: _pack(generator) for place, generator in enumerate(self._generators)}

    def read_changes(self, before: States | None = None) -> States:
        """Return the present states of the generators that have changed.

        Args:
            before: the earlier states; by default, the states at the start of the micro-batch.
        """
        before = self._begun if before is None else before
        return {place: state for place, state in self.read_states().items() if before.get(place) != state}

    def set_states(self, states: States) -> None:
        """Set states that any rank has read."""
        for place, state in states.items():
            _set(self._generators[place], state)

    @contextmanager
    def microbatch(self, number: int, span: Span) -> Iterator[None]:
        """Set the states of a micro-batch for the block, and restore the earlier states afterwards.

        If this rank is the only one of its pipeline and batches overlap, the states are not restored.

        Args:
            number: the number of the batch.
            span: the samples of the micro-batch.
        """
        if not self:
            yield
            return
        before, outer = self.read_states(), self._begun
        if self._overlapping or span.start:
            for place, generator in enumerate(self._generators):
                digest = hashlib.blake2b(before[place], digest_size=8).digest()
                one = Span(span.start, span.start + 1)  # stages may divide a batch differently
                _seed(generator, stream_seed(int.from_bytes(digest, "little"), place, BEFORE_LAYERS, number, one))
        self._begun = self.read_states()
        try:
            yield
        finally:
            self.last, self._begun = self.read_changes(), outer
            if not self._is_alone:
                self.set_states({place: before[place] for place in self.read_changes(before)})

    def note_microbatch(self, span: Span) -> None:
        """Record the states after the latest micro-batch, on the last stage."""
        if not span.start:
            self._ended = self.last

    def discard_batch(self) -> None:
        """Forget the states of a batch, after the caller has restored the earlier states."""
        self._ended = {}

    def end_batch(self) -> States:
        """Set the states after the batch, on the last stage, and return them for the other ranks."""
        ended, self._ended = self._ended, {}
        self.set_states(ended)
        return ended


def _pack(generator: Any) -> bytes:
    """Return the state as bytes.

    Serializing Python numbers would take a hundred times as long as serializing their bytes.
    """
    state = state_of(generator)
    if isinstance(generator, torch.Generator):
        state = state.numpy().tobytes()
    elif isinstance(generator, random.Random):
        version, words, rest = state
        state = version, np.array(words, np.uint32).tobytes(), rest
    return plain.dumps(state)


def _set(generator: Any, packed: bytes) -> None:
    state = plain.loads(packed)
    if isinstance(generator, torch.Generator):
        state = torch.from_numpy(np.frombuffer(state, np.uint8).copy())
    elif isinstance(generator, random.Random):
        version, words, rest = state
        state = version, tuple(np.frombuffer(words, np.uint32).tolist()), rest
    set_state(generator, state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed if isinstance(generator, random.Random) else seed % 2**32)
