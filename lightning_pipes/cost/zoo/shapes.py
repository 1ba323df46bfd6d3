"""The costs of layers, derived from shapes alone.

A layer runs on symbolic tensors, and a tape records its operations. The following assumptions match the behavior of
torch:

- Each multiplication in matrix products, convolutions and attention counts as two FLOPs. All other operations count
  only as bytes moved.
- Attention is fused, as in `scaled_dot_product_attention`. It saves its inputs, its output, and a float32 logarithm for
  each head and token. Its backward computes the scores again and therefore takes 2.5 times the FLOPs of its forward.
  Causal attention skips masked scores.
- Matrix products, convolutions, layer and batch normalization, and GELU save their input. ReLU and tanh save their
  output. Max pooling saves its input and an int64 for each output. Dropout saves a mask, embedding saves its int64
  indices, and cross entropy saves its softmax in float32.
- A tensor that is saved twice is held once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_pipes.ir import InputError

FLOAT32_BYTES = 4
INT64_BYTES = 8


@dataclass(frozen=True)
class SymbolicTensor:
    """A tensor without values, for one sample.

    Attributes:
        shape: the shape without axis 0, which is the axis of samples.
        itemsize: the bytes of an element.
        trained: whether the tensor has a gradient.
        storage: the identity of the memory, which is equal for all views of the same memory.
        whole: the bytes of the memory if the tensor is a view that may show only a part of it. 0 means that the tensor
            uses all of its memory.
    """

    shape: tuple[int, ...]
    itemsize: float
    trained: bool = True
    storage: object = field(default_factory=object, repr=False)
    whole: float = 0.0

    @property
    def n_elements(self) -> int:
        """The number of elements per sample."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        """The bytes per sample."""
        return self.n_elements * self.itemsize

    @property
    def storage_bytes(self) -> float:
        """The bytes per sample of the memory that this tensor keeps alive."""
        return self.whole or self.bytes

    def view(self, *shape: int) -> SymbolicTensor:
        """Return a tensor of another shape that shares the memory of this tensor or a part of it."""
        return replace(self, shape=shape, whole=self.storage_bytes)


SymbolicTensors = SymbolicTensor | tuple[SymbolicTensor, ...]
"""The values that are passed between layers."""
Layer = Callable[["ShapeTape", SymbolicTensors], SymbolicTensors]
"""A function that runs a layer symbolically by calling operations of the tape."""


@dataclass(frozen=True)
class Operation:
    """The work of one operation per sample: forward, gradients of the inputs, and gradients of the weights.

    Attributes:
        name: the name of the operation.
        flops: the FLOPs of each of the three parts.
        moved: the bytes that each part reads and writes, without weights.
        weights: the bytes of the weights. They are moved once, regardless of the number of samples.
        kernels: the number of kernel launches of each part.
    """

    name: str
    flops: tuple[float, float, float]
    moved: tuple[float, float, float]
    weights: float
    kernels: tuple[int, int, int]


@dataclass(frozen=True)
class LayerShape:
    """The costs of one layer. Bytes and FLOPs are per sample, except for the bytes of weights and buffers.

    Attributes:
        name: the name of the layer.
        operations: the operations of the layer.
        parameters: the number of trained parameters.
        copied: the number of parameters that belong to an earlier layer, as with tied embeddings.
        buffer_bytes: the bytes of the buffers.
        saved: the bytes kept from forward to backward, without weights and without tensors of earlier layers.
        keeps_input: whether the layer saves its input and an earlier layer saves it too.
        input: the bytes of the input.
        output: the bytes of the output.
        transients: pairs of temporary bytes (per sample, fixed) at different moments of the forward and backward.
    """

    name: str
    operations: tuple[Operation, ...]
    parameters: int
    copied: int
    buffer_bytes: int
    saved: float
    keeps_input: bool
    input: float
    output: float
    transients: tuple[tuple[float, float], ...]

    def working_bytes(self, rows: int) -> float:
        """Return the maximum number of temporary bytes while the layer runs on `rows` samples."""
        return max((rows * by_sample + fixed for by_sample, fixed in self.transients), default=0.0)


@dataclass(frozen=True)
class _TapeEntry:
    """An operation with its tensors. The lifetimes of tensors are derived from these entries."""

    operation: Operation
    inputs: tuple[SymbolicTensor, ...]
    output: SymbolicTensor
    saved: tuple[SymbolicTensor, ...]

    @property
    def passes_gradient(self) -> bool:
        """Whether the inputs receive the gradient of the output, or parts of it, unchanged."""
        return self.operation.name in ("add", "joined")


class ShapeTape:
    """A recorder of operations on symbolic tensors. Each operation returns its output and is added to the tape.

    Args:
        itemsize: the bytes of an element of activations and weights.
        mask_itemsize: the bytes of an element of a dropout mask. It is 1 on GPUs and the same as for an activation on
            CPUs.
    """

    def __init__(self, itemsize: float, mask_itemsize: float = 1) -> None:
        self.itemsize, self.mask_itemsize = itemsize, mask_itemsize
        self._held: dict[object, float] = {}
        self._start()

    def record_layer(self, name: str, run: Layer, x: SymbolicTensors) -> tuple[LayerShape, SymbolicTensors]:
        """Run a layer on the input `x`, and return its costs and its output.

        The layers of a model use the same tape in their order.
        """
        before = dict(self._held)
        self._start()
        y = run(self, x)
        entered = {t.storage for t in _as_tuple(x)}
        saved = {t.storage: t for step in self._entries for t in step.saved}
        shape = LayerShape(
            name,
            tuple(step.operation for step in self._entries),
            self._parameters,
            self._copied,
            self._buffer_bytes,
            saved=sum(size for storage, size in self._held.items() if storage not in before),
            keeps_input=any(storage in entered and storage in before for storage in saved),
            input=sum(t.bytes for t in _as_tuple(x)),
            output=sum(t.bytes for t in _as_tuple(y)),
            transients=_list_transients(self._entries, _as_tuple(y), before),
        )
        return shape, y

    def _start(self) -> None:
        self._entries: list[_TapeEntry] = []
        self._parameters = self._copied = self._buffer_bytes = 0

    # Matrix products ------------------------------------------------------------------------------------------------

    def linear(self, x: SymbolicTensor, width: int, bias: bool = True, copied: bool = False) -> SymbolicTensor:
        """Multiply `x` by a matrix of weights.

        Args:
            x: the input of shape (..., input width).
            width: the output width.
            bias: whether there is a bias.
            copied: whether the matrix belongs to an earlier layer.
        """
        y = self._new_tensor(*x.shape[:-1], width)
        parameters = x.shape[-1] * width
        self._copied += copied * parameters
        flops = 2.0 * x.n_elements * width
        return self._add_product("linear", x, y, flops, parameters, width if bias else 0)

    def conv2d(
        self, x: SymbolicTensor, channels: int, kernel: int, stride: int = 1, padding: int = 0, bias: bool = True
    ) -> SymbolicTensor:
        """Apply a convolution with a square kernel to `x` of shape (channels, height, width)."""
        before, *size = x.shape
        y = self._new_tensor(channels, *((n + 2 * padding - kernel) // stride + 1 for n in size))
        parameters = before * channels * kernel**2
        flops = 2.0 * y.n_elements * before * kernel**2
        return self._add_product("conv2d", x, y, flops, parameters, channels if bias else 0)

    def up_conv2d(self, x: SymbolicTensor, channels: int, kernel: int = 2) -> SymbolicTensor:
        """Apply a transposed convolution to `x`, with a stride equal to the kernel size.

        Height and width grow by this factor.
        """
        before, *size = x.shape
        y = self._new_tensor(channels, *(n * kernel for n in size))
        flops = 2.0 * x.n_elements * channels * kernel**2
        return self._add_product("up_conv2d", x, y, flops, before * channels * kernel**2, channels)

    def attention(self, *qkv: SymbolicTensor, heads: int, causal: bool) -> SymbolicTensor:
        """Apply fused attention.

        Args:
            qkv: one tensor of shape (tokens, 3 * width), or three tensors of shape (tokens, width).
            heads: the number of attention heads.
            causal: whether tokens attend only to themselves and earlier tokens.
        """
        tokens, width = qkv[0].shape
        y = self._new_tensor(tokens, width // (3 if len(qkv) == 1 else 1))
        seen = (tokens + 1) / 2 if causal else tokens
        flops = 4.0 * y.n_elements * seen
        logarithms = SymbolicTensor((heads, tokens), FLOAT32_BYTES)
        read = sum(t.bytes for t in qkv)
        moved = (read + y.bytes, 2 * read + 3 * y.bytes, 0.0)
        saved = (*qkv, y, logarithms)
        return self._record("attention", qkv, y, saved, (flops, 2.5 * flops, 0.0), moved, kernels=(1, 2, 0))

    def _add_product(
        self, name: str, x: SymbolicTensor, y: SymbolicTensor, flops: float, weights: int, bias: int
    ) -> SymbolicTensor:
        moved = (x.bytes + y.bytes,) * 2 + (x.bytes + y.bytes * (2 if bias else 1),)
        back = flops if x.trained else 0.0
        kernels = (1, int(x.trained), 2 if bias else 1)
        return self._record(name, (x,), y, (x,), (flops, back, flops), moved, weights + bias, kernels)

    # Other operations -----------------------------------------------------------------------------------------------

    def embedding(self, indices: SymbolicTensor, vocabulary: int, width: int) -> SymbolicTensor:
        """Look up a row of a table for each index."""
        y = self._new_tensor(*indices.shape, width)
        moved = (2 * y.bytes, 0.0, 3 * y.bytes)
        return self._record("embedding", (indices,), y, (indices,), moved=moved, weights=vocabulary * width)

    def added_weights(self, x: SymbolicTensor) -> SymbolicTensor:
        """Add trained parameters of the same shape to `x`, such as position embeddings."""
        y = self._new_tensor(*x.shape)
        return self._record("add", (x,), y, (), moved=(2 * x.bytes, 0.0, x.bytes), weights=x.n_elements)

    def layer_norm(self, x: SymbolicTensor) -> SymbolicTensor:
        """Normalize over the last axis."""
        y = self._new_tensor(*x.shape)
        statistics = SymbolicTensor((2, *x.shape[:-1]), FLOAT32_BYTES)
        moved = (2 * x.bytes, 3 * x.bytes, 2 * x.bytes)
        return self._record("layer_norm", (x,), y, (x, statistics), moved=moved, weights=2 * x.shape[-1])

    def batch_norm(self, x: SymbolicTensor) -> SymbolicTensor:
        """Normalize each channel over samples, height and width. The running mean and variance are buffers."""
        y = self._new_tensor(*x.shape)
        self._buffer_bytes += 2 * FLOAT32_BYTES * x.shape[0] + INT64_BYTES
        moved = (3 * x.bytes, 5 * x.bytes, 0.0)
        return self._record("batch_norm", (x,), y, (x,), moved=moved, weights=2 * x.shape[0], kernels=(2, 2, 0))

    def relu(self, x: SymbolicTensor) -> SymbolicTensor:
        """Apply ReLU, which saves its output."""
        y = self._new_tensor(*x.shape)
        return self._record("relu", (x,), y, (y,), moved=(2 * x.bytes, 3 * x.bytes, 0.0))

    def tanh(self, x: SymbolicTensor) -> SymbolicTensor:
        """Apply tanh, which saves its output."""
        y = self._new_tensor(*x.shape)
        return self._record("tanh", (x,), y, (y,), moved=(2 * x.bytes, 3 * x.bytes, 0.0))

    def gelu(self, x: SymbolicTensor) -> SymbolicTensor:
        """Apply GELU, which saves its input."""
        y = self._new_tensor(*x.shape)
        return self._record("gelu", (x,), y, (x,), moved=(2 * x.bytes, 3 * x.bytes, 0.0))

    def dropout(self, x: SymbolicTensor, p: float) -> SymbolicTensor:
        """Apply dropout, which saves a mask. If `p` is 0, return `x`."""
        if not p:
            return x
        y, mask = self._new_tensor(*x.shape), SymbolicTensor(x.shape, self.mask_itemsize)
        moved = 2 * x.bytes + mask.bytes
        return self._record("dropout", (x,), y, (mask,), moved=(moved, moved, 0.0))

    def add(self, x: SymbolicTensor, y: SymbolicTensor) -> SymbolicTensor:
        """Add two tensors, as at the end of a residual block.

        The backward sums the gradients of a tensor that is used twice.
        """
        z = self._new_tensor(*x.shape)
        return self._record("add", (x, y), z, (), moved=(3 * x.bytes, 3 * x.bytes, 0.0))

    def concat(self, *parts: SymbolicTensor) -> SymbolicTensor:
        """Concatenate tensors along the channels."""
        y = self._new_tensor(sum(t.shape[0] for t in parts), *parts[0].shape[1:])
        return self._record("joined", parts, y, (), moved=(2 * y.bytes, 2 * y.bytes, 0.0))

    def max_pool2d(self, x: SymbolicTensor, kernel: int, stride: int, padding: int = 0) -> SymbolicTensor:
        """Apply max pooling, which saves its input and the position of each output."""
        channels, *size = x.shape
        y = self._new_tensor(channels, *((n + 2 * padding - kernel) // stride + 1 for n in size))
        where = SymbolicTensor(y.shape, INT64_BYTES)
        moved = x.bytes + y.bytes + where.bytes
        return self._record("max_pool2d", (x,), y, (x, where), moved=(moved, moved, 0.0))

    def average_pool2d(self, x: SymbolicTensor, size: int) -> SymbolicTensor:
        """Apply average pooling to a height and width of `size`. A mean over all positions saves nothing."""
        y = self._new_tensor(x.shape[0], size, size)
        saved = () if size == 1 else (x,)
        return self._record("average_pool2d", (x,), y, saved, moved=(x.bytes + y.bytes, x.bytes + y.bytes, 0.0))

    def cross_entropy(self, scores: SymbolicTensor) -> SymbolicTensor:
        """Compute the mean cross-entropy loss of scores. The softmax is computed and saved in float32."""
        softmax = replace(scores, itemsize=FLOAT32_BYTES, storage=object())
        moved = (scores.bytes + 2 * softmax.bytes, scores.bytes + softmax.bytes, 0.0)
        return self._record("cross_entropy", (scores,), self._new_tensor(1), (softmax,), moved=moved, kernels=(2, 2, 0))

    # Recording ------------------------------------------------------------------------------------------------------

    def _new_tensor(self, *shape: int) -> SymbolicTensor:
        if min(shape) < 1:
            raise InputError(f"an operation would give a tensor of shape {shape}; its input is too small")
        return SymbolicTensor(shape, self.itemsize)

    def _record(
        self,
        name: str,
        inputs: Sequence[SymbolicTensor],
        output: SymbolicTensor,
        saved: Sequence[SymbolicTensor],
        flops: tuple[float, float, float] = (0.0, 0.0, 0.0),
        moved: tuple[float, float, float] = (0.0, 0.0, 0.0),
        weights: int = 0,
        kernels: tuple[int, int, int] | None = None,
    ) -> SymbolicTensor:
        self._parameters += weights
        if kernels is None:
            kernels = (1, int(moved[1] > 0), int(moved[2] > 0))
        operation = Operation(name, flops, moved, weights * self.itemsize, kernels)
        self._entries.append(_TapeEntry(operation, tuple(inputs), output, tuple(saved)))
        for t in saved:
            self._held[t.storage] = t.storage_bytes
        return output


def _as_tuple(x: SymbolicTensors) -> tuple[SymbolicTensor, ...]:
    return (x,) if isinstance(x, SymbolicTensor) else x


def _list_transients(
    steps: Sequence[_TapeEntry], outputs: Collection[SymbolicTensor], before: Container[object]
) -> tuple[tuple[float, float], ...]:
    """Return pairs of temporary bytes (per sample, fixed) at different moments of the forward and backward.

    In the forward, these are the live bytes besides saved tensors and outputs. In the backward, the gradients of the
    outputs are not counted either. A pair is omitted if another pair is at least as large in both values.
    """
    found = {*_forward_moments(steps, outputs), *_backward_moments(steps, outputs, before)}
    return tuple(sorted(x for x in found if not any(x != y and x[0] <= y[0] and x[1] <= y[1] for y in found)))


def _forward_moments(steps: Sequence[_TapeEntry], outputs: Iterable[SymbolicTensor]) -> Iterator[tuple[float, float]]:
    last = {t.storage: number for number, step in enumerate(steps) for t in step.inputs}
    later = {t.storage: t.storage_bytes for step in steps for t in step.saved} | {
        t.storage: t.storage_bytes for t in outputs
    }
    passing: dict[object, float] = {}
    for number, step in enumerate(steps):
        if step.output.storage not in later:
            passing[step.output.storage] = step.output.storage_bytes
        for t in (step.output, *step.saved):
            later.pop(t.storage, None)
        yield sum(passing.values()) - sum(later.values()), 0.0
        passing = {storage: size for storage, size in passing.items() if last.get(storage, 0) > number}


def _backward_moments(
    steps: Sequence[_TapeEntry], outputs: Iterable[SymbolicTensor], before: Container[object]
) -> Iterator[tuple[float, float]]:
    """Yield the live bytes at moments of the backward.

    Saved tensors are freed at their last use, except outputs and the tensors in `before`, which earlier layers saved.
    """
    kept = {t.storage for t in outputs}
    users = Counter(t.storage for step in steps for t in step.saved)
    gradients = {storage: _Gradient(0.0) for storage in kept}  # counted elsewhere
    now = 0.0
    for step in reversed(steps):
        given = gradients.pop(step.output.storage, _Gradient(0.0))
        for t in step.inputs:
            if not t.trained:
                continue
            made = given if step.passes_gradient else _Gradient(t.storage_bytes)
            now += 0.0 if step.passes_gradient else made.bytes
            earlier = gradients.get(t.storage)
            if earlier is None:
                made.users += step.passes_gradient
                gradients[t.storage] = made
                continue
            if earlier.users > 1:  # another tensor shares this gradient, so the sum needs new memory
                earlier.users -= 1
                gradients[t.storage] = _Gradient(t.storage_bytes)
                now += t.storage_bytes
            yield now, step.operation.weights
            now -= 0.0 if step.passes_gradient else made.bytes
        yield now, step.operation.weights
        given.users -= 1
        now -= given.bytes if not given.users else 0.0
        for t in step.saved:
            users[t.storage] -= 1
            if not users[t.storage] and t.storage not in before and t.storage not in kept:
                now -= t.storage_bytes


@dataclass
class _Gradient:
    """The memory of a gradient, which several tensors share if a sum passed it to them unchanged."""

    bytes: float
    users: int = 1


def record_layers(layers: Sequence[tuple[str, Layer]], x: SymbolicTensors, tape: ShapeTape) -> list[LayerShape]:
    """Return the costs of each of the named layers.

    Args:
        layers: the layers in order, each with its name.
        x: the input of the first layer.
        tape: the tape that records the operations.
    """
    found = []
    for name, run in layers:
        shape, x = tape.record_layer(name, run, x)
        found.append(shape)
    return found
