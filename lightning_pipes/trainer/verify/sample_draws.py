"""Random numbers for a whole batch that equal the random numbers of its micro-batches.

A pipeline uses a separate random stream for each (job, layer, batch, span); see `engine.compute.rng`. A process that
runs the whole batch draws the same numbers if it executes each random operation span by span, each with its own stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_pipes.engine.compute.rng import forked_rng, seed_all, seed_for_layer, stream_seed
from lightning_pipes.engine.private_torch import TorchDispatchMode, argument_names, works_in_place
from lightning_pipes.ir import Span

State = list[torch.Tensor]


class SampleDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Execute random operations on the samples of a batch span by span.

    The seed of torch's generator identifies the streams to draw from. Code that restores an earlier state of the
    generator, such as `torch.utils.checkpoint`, therefore draws the same numbers again.

    Args:
        device: the device of the samples.

    Attributes:
        common: operations whose random numbers do not belong to particular samples. Each micro-batch draws its own
            numbers for them.
        was_used: whether a random operation was executed span by span.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._streams: dict[int, tuple[int, Sequence[Span], list[State]]] = {}
        self._names = 0
        self.common: list[str] = []
        self.was_used = False

    def begin_batch(self, seed: int, job: int, number: int, rows: int) -> None:
        """Drop earlier streams, and start the streams of batch number `number`.

        Args:
            seed: the seed of the random streams.
            job: the job of the random streams.
            number: the number of the batch.
            rows: number of samples in the batch.
        """
        self._seed, self._job, self._number, self._rows = seed, job, number, rows
        self._streams.clear()
        self.common.clear()

    def enter(self, layer: int, spans: Sequence[Span]) -> None:
        """Draw from the streams of this layer from now on, or of the code before or after the layers.

        Args:
            layer: the number of the layer, or of the code around the layers.
            spans: the spans of the micro-batches in this code.
        """
        states = []
        for span in reversed(spans):
            seed_for_layer(layer, stream_seed(self._seed, self._job, layer, self._number, span), self._device)
            states.append(self._state())
        if len(spans) > 1:
            self._name((self._rows, spans, states[::-1]))

    def read_generators(self) -> list[torch.Tensor]:
        """Return the states of the present streams, one for each span on axis 0."""
        known = self._streams.get(torch.default_generator.initial_seed())
        states = [self._state()] if known is None else known[2]
        return [torch.stack(parts) for parts in zip(*states, strict=True)]

    def set_generators(self, states: Sequence[torch.Tensor], spans: Sequence[Span]) -> None:
        """Continue with the states that `read_generators` returned in another process, for these spans."""
        parts = ([part.clone() for part in state.cpu()] for state in states)  # torch can't restore a state from a view
        of_spans = [[*state] for state in zip(*parts, strict=True)]
        if len(of_spans) == 1:
            self._set(of_spans[0])
        else:
            self._name((self._rows, spans, of_spans))

    def enter_whole(self, layer: int) -> None:
        """Draw from the stream that a whole batch uses for this layer from now on."""
        seed_for_layer(
            layer, stream_seed(self._seed, self._job, layer, self._number, Span(0, self._rows)), self._device
        )

    @contextmanager
    def draw_by_sample(self) -> Iterator[None]:
        """Execute random operations in the block span by span. Random states are restored afterwards."""
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
        self.was_used = True
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
    """Return the axis of the samples, or None if there is none.

    A sample may have several consecutive entries on this axis.
    """
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
    """Return the part of an argument that belongs to the samples of a span. A tensor is copied."""
    tensor = isinstance(value, torch.Tensor)
    if axis is None:
        return value.clone() if tensor else value
    each = (value.shape if tensor else value)[axis] // rows
    if tensor:
        return value.narrow(axis, span.start * each, span.rows * each).clone()
    return [span.rows * each if n == axis else entries for n, entries in enumerate(value)]
