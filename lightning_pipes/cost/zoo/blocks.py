"""Layers of the zoo's models, in symbols; see `zoo.shapes`."""

from __future__ import annotations

from lightning_pipes.cost.zoo.shapes import Layer, ShapeTape, SymbolicTensor, SymbolicTensors
from lightning_pipes.ir import InputError


def token_embedding(vocabulary: int, width: int, *, kinds: int = 0, norm: bool = False, dropout: float = 0.0) -> Layer:
    """Return embeddings of tokens and of their positions, and of `kinds` of tokens, such as BERT's two sentences."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        indices = _single_tensor(x)
        y = tape.added_weights(tape.embedding(indices, vocabulary, width))
        if kinds:
            y = tape.add(
                y, tape.embedding(SymbolicTensor(indices.shape, indices.itemsize, trained=False), kinds, width)
            )
        return tape.dropout(tape.layer_norm(y) if norm else y, dropout)

    return run


def transformer_block(
    width: int,
    heads: int,
    *,
    causal: bool,
    feed_forward: int = 4,
    norm_first: bool = True,
    fused: bool = True,
    dropout: float = 0.0,
) -> Layer:
    """Return attention and two matrix products with GELU between them, each with a residual connection and a norm.

    Args:
        feed_forward: width between the two matrix products, in widths.
        norm_first: the norm stands before each part, as in GPT-2, or after the sum, as in GPT-1 and BERT.
        fused: queries, keys and values come from one matrix product, or from three.
    """

    def attend(tape: ShapeTape, x: SymbolicTensor) -> SymbolicTensor:
        qkv = (tape.linear(x, 3 * width),) if fused else tuple(tape.linear(x, width) for _ in range(3))
        return tape.dropout(tape.linear(tape.attention(*qkv, heads=heads, causal=causal), width), dropout)

    def feed(tape: ShapeTape, x: SymbolicTensor) -> SymbolicTensor:
        return tape.dropout(tape.linear(tape.gelu(tape.linear(x, feed_forward * width)), width), dropout)

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = _single_tensor(x)
        for part in (attend, feed):
            if norm_first:
                y = tape.add(y, part(tape, tape.layer_norm(y)))
            else:
                y = tape.layer_norm(tape.add(y, part(tape, y)))
        return y

    return run


def vocabulary_head(vocabulary: int, *, copied: bool, norm: bool = True) -> Layer:
    """Return a norm, and the scores of all tokens of the vocabulary; with `copied` the matrix is that of the
    embedding."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = _single_tensor(x)
        return tape.linear(tape.layer_norm(y) if norm else y, vocabulary, bias=False, copied=copied)

    return run


def bert_heads(vocabulary: int, *, copied: bool) -> Layer:
    """Return the scores of masked tokens, and the score of the second sentence following the first."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = _single_tensor(x)
        width = y.shape[-1]
        pooled = tape.tanh(tape.linear(y.view(width), width))
        follows = tape.linear(pooled, 2)
        hidden = tape.layer_norm(tape.gelu(tape.linear(y, width)))
        return tape.linear(hidden, vocabulary, copied=copied), follows

    return run


def conv_block(channels: int, kernel: int = 3, *, norm: bool = False, pool: bool = False) -> Layer:
    """Return a convolution that keeps height and width, an optional batch norm, ReLU, and optional pooling to half the
    size."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = tape.conv2d(_single_tensor(x), channels, kernel, padding=kernel // 2, bias=not norm)
        y = tape.relu(tape.batch_norm(y) if norm else y)
        return tape.max_pool2d(y, 2, 2) if pool else y

    return run


def classifier_head(*widths: int, pooled: int, dropout: float = 0.0) -> Layer:
    """Return average pooling to `pooled` by `pooled`, and matrix products with ReLU and dropout between them."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = tape.average_pool2d(_single_tensor(x), pooled)
        y = y.view(y.n_elements)
        for width in widths[:-1]:
            y = tape.dropout(tape.relu(tape.linear(y, width)), dropout)
        return tape.linear(y, widths[-1])

    return run


def resnet_stem(channels: int = 64) -> Layer:
    """Return a 7 by 7 convolution and pooling, to a quarter of height and width."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = tape.relu(tape.batch_norm(tape.conv2d(_single_tensor(x), channels, 7, stride=2, padding=3, bias=False)))
        return tape.max_pool2d(y, 3, 2, padding=1)

    return run


def bottleneck_block(channels: int, *, stride: int = 1, expansion: int = 4) -> Layer:
    """Return a residual block of three convolutions; the middle one is 3 by 3 and has the stride. The shortcut has a
    convolution too where the shape changes."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = start = _single_tensor(x)
        y = tape.relu(tape.batch_norm(tape.conv2d(y, channels, 1, bias=False)))
        y = tape.relu(tape.batch_norm(tape.conv2d(y, channels, 3, stride, padding=1, bias=False)))
        y = tape.batch_norm(tape.conv2d(y, expansion * channels, 1, bias=False))
        if y.shape != start.shape:
            start = tape.batch_norm(tape.conv2d(start, expansion * channels, 1, stride, bias=False))
        return tape.relu(tape.add(y, start))

    return run


def unet_down(channels: int, *, pool: bool = True) -> Layer:
    """Return one step down of a U-Net. It passes its inputs on beside its output, so that skip connections travel along
    the edges between stages."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        if not pool:
            return _two_convolutions(tape, _single_tensor(x), channels)
        inputs = (x,) if isinstance(x, SymbolicTensor) else x
        return (*inputs, _two_convolutions(tape, tape.max_pool2d(inputs[-1], 2, 2), channels))

    return run


def unet_up(channels: int) -> Layer:
    """Return one step up of a U-Net; it consumes the last skip connection of its inputs."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        if isinstance(x, SymbolicTensor):
            raise InputError("a step up of a U-Net needs the outputs of a step down; got one tensor")
        *skips, skip, y = x
        z = _two_convolutions(tape, tape.concat(skip, tape.up_conv2d(y, channels)), channels)
        return (*skips, z) if skips else z

    return run


def pixel_scores(classes: int) -> Layer:
    """Return a score of every class for each pixel."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        return tape.conv2d(_single_tensor(x), classes, 1)

    return run


def cross_entropy(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
    """Return the loss of all input scores."""
    scores = (x,) if isinstance(x, SymbolicTensor) else x
    return tuple(tape.cross_entropy(each) for each in scores)


def _two_convolutions(tape: ShapeTape, x: SymbolicTensor, channels: int) -> SymbolicTensor:
    for _ in range(2):
        x = tape.relu(tape.batch_norm(tape.conv2d(x, channels, 3, padding=1, bias=False)))
    return x


def _single_tensor(x: SymbolicTensors) -> SymbolicTensor:
    if not isinstance(x, SymbolicTensor):
        raise InputError(f"this layer takes one tensor, got {len(x)}")
    return x
