"""Random numbers of a whole batch as micro-batches draw them.

A pipeline gives each (job, layer, batch, span) a random stream of its own, see `engine.compute.rng`. One process that
runs a batch whole draws the same numbers if each random operation is done span by span, each from its own stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_pipes.engine.compute.rng import forked_rng, seed_all, seed_for_layer, stream_seed
from lightning_pipes.engine.private_torch import TorchDispatchMode, argument_names, works_in_place
from lightning_pipes.ir import Span

State = list[torch.Tensor]


class SampleDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does random operations on the samples of a batch span by span.

    The seed of torch's generator names the streams that are drawn from: code that puts an earlier state of the
    generator back, as `torch.utils.checkpoint` does, draws the same numbers again.

    Args:
        device: of the samples.

    Attributes:
        common: operations that drew numbers for no sample in particular; each micro-batch draws its own.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._streams: dict[int, tuple[int, Sequence[Span], list[State]]] = {}
        self._names = 0
        self.common: list[str] = []

    def begin_batch(self, seed: int, job: int, number: int, rows: int, spans: Mapping[int, Sequence[Span]]) -> None:
        """Forget earlier streams; from now on batch `number` is drawn for, whose spans are given by layer."""
        self._seed, self._job, self._number, self._rows, self._spans = seed, job, number, rows, spans
        self._streams.clear()
        self.common.clear()

    def enter(self, layer: int) -> None:
        """Draw from the streams of that layer, or of the code before or after the layers, from now on."""
        states, spans = [], self._spans[layer]
        for span in reversed(spans):
            seed_for_layer(layer, stream_seed(self._seed, self._job, layer, self._number, span), self._device)
            states.append(self._state())
        if len(spans) > 1:
            self._name((self._rows, spans, states[::-1]))

    def enter_whole(self, layer: int) -> None:
        """Draw from now on from the stream that a whole batch has for that layer."""
        seed_for_layer(
            layer, stream_seed(self._seed, self._job, layer, self._number, Span(0, self._rows)), self._device
        )

    @contextmanager
    def draw_by_sample(self) -> Iterator[None]:
        """Have operations in the block draw so; random states are those of before afterwards."""
        with forked_rng(self._device), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        streams = self._streams.get(torch.default_generator.initial_seed())
        return func(*args, **kwargs) if streams is None else self._draw(func, args, kwargs, *streams)

    def _draw(
        self, func: Any, args: Any, kwargs: Any, rows: int, spans: Sequence[Span], states: Sequence[State]
    ) -> Any:
        names = argument_names(func)
        given = dict(zip(names, args, strict=False)) | kwargs
        axes = {name: sample_axis(_shape(name, value), rows) for name, value in given.items()}
        axis = next((axis for axis in axes.values() if axis is not None), None)
        if axis is None:
            self.common.append(str(func))
        results, after = [], []
        for span, state in zip(spans, states, strict=True):
            self._set(state)
            part = {name: _cut(name, value, axes[name], span, rows) for name, value in given.items()}
            mine = [part[name] for name in names[: len(args)]]
            results.append(func(*mine, **{name: part[name] for name in kwargs}))
            after.append(self._state())
        self._name((rows, spans, after))
        if works_in_place(func):
            whole = args[0]
            whole.copy_(results[0] if axis is None else torch.cat(results, axis))
            return whole
        if axis is None:
            return results[0]
        if isinstance(results[0], tuple):
            return tuple(torch.cat(list(parts), axis) for parts in zip(*results, strict=True))
        return torch.cat(results, axis)

    def _name(self, streams: tuple[int, Sequence[Span], list[State]]) -> None:
        self._names += 1
        seed_all(self._names, self._device)
        self._streams[self._names] = streams

    def _state(self) -> State:
        states = [torch.default_generator.get_state()]
        return [*states, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else states

    def _set(self, state: State) -> None:
        torch.default_generator.set_state(state[0])
        if len(state) > 1:
            torch.cuda.set_rng_state(state[1], self._device)


def sample_axis(shape: Sequence[int] | None, rows: int) -> int | None:
    """Return the axis that counts samples, each of which may have several entries in a row; None if there is none."""
    if not shape:
        return None
    if shape[0] and shape[0] % rows == 0:
        return 0
    return next((axis for axis, entries in enumerate(shape) if entries == rows), None)


def _shape(name: str, value: Any) -> Sequence[int] | None:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return value if name == "size" and isinstance(value, (list, tuple)) else None


def _cut(name: str, value: Any, axis: int | None, span: Span, rows: int) -> Any:
    """Return the part of an argument that belongs to the samples of a span; of a tensor a copy."""
    tensor = isinstance(value, torch.Tensor)
    if axis is None:
        return value.clone() if tensor else value
    each = (value.shape if tensor else value)[axis] // rows
    if tensor:
        return value.narrow(axis, span.start * each, span.rows * each).clone()
    return [span.rows * each if n == axis else entries for n, entries in enumerate(value)]
