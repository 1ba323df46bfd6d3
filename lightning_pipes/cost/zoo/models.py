"""The models of the papers by name, and the blocks that they are made of, in symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pipes.cost.zoo.shapes import (
    FLOAT32,
    INT64,
    Layer,
    LayerShape,
    ShapeTape,
    SymbolicTensor,
    SymbolicTensors,
    record_layers,
)
from lightning_pipes.ir import InputError
from lightning_pipes.ir.checks import lookup_name


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


@dataclass(frozen=True)
class ZooModel:
    """A model in symbols.

    Attributes:
        about: where it is from, and the size of a sample.
        sample: what a sample is: tokens, or (channels, height, width).
        layers: by name, in order; between any two of them a stage may end.
        loss: what the last stage runs after them.
    """

    name: str
    about: str
    sample: tuple[int, ...]
    layers: tuple[tuple[str, Layer], ...]
    loss: Layer = cross_entropy

    def layer_shapes(self, itemsize: float = FLOAT32, mask_itemsize: float = 1) -> list[LayerShape]:
        """Return the cost of each layer, and of the loss at the end."""
        indices = len(self.sample) == 1
        x = SymbolicTensor(self.sample, INT64 if indices else itemsize, trained=False)
        return record_layers([*self.layers, ("loss", self.loss)], x, ShapeTape(itemsize, mask_itemsize))

    @property
    def parameters(self) -> int:
        """Number of trained parameters; tied layers count once."""
        return sum(layer.parameters - layer.copied for layer in self.layer_shapes())


def named_model(name: str) -> ZooModel:
    """Return a model by its name.

    Raises:
        InputError: there is none; lists all names.
    """
    return lookup_name(MODELS, name, "model")


def _gpt2(name: str, about: str, blocks_: int, width: int, heads: int, context: int = 1024) -> ZooModel:
    vocabulary = 50257
    block = transformer_block(width, heads, causal=True, dropout=0.1)
    return ZooModel(
        name,
        f"{about}; {context} tokens",
        (context,),
        (
            ("tokens", token_embedding(vocabulary, width, dropout=0.1)),
            *((f"block {n}", block) for n in range(blocks_)),
            ("head", vocabulary_head(vocabulary, copied=True)),
        ),
    )


def _gpt1() -> ZooModel:
    block = transformer_block(768, 12, causal=True, norm_first=False, dropout=0.1)
    return ZooModel(
        "GPT-1",
        "Radford et al. 2018; 512 tokens",
        (512,),
        (
            ("tokens", token_embedding(40478, 768, dropout=0.1)),
            *((f"block {n}", block) for n in range(12)),
            ("head", vocabulary_head(40478, copied=True, norm=False)),
        ),
    )


def _bert(name: str, about: str, blocks_: int) -> ZooModel:
    block = transformer_block(1024, 16, causal=False, norm_first=False, fused=False, dropout=0.1)
    return ZooModel(
        name,
        f"{about}, with its two heads for training; 512 tokens",
        (512,),
        (
            ("tokens", token_embedding(30522, 1024, kinds=2, norm=True, dropout=0.1)),
            *((f"block {n}", block) for n in range(blocks_)),
            ("heads", bert_heads(30522, copied=True)),
        ),
    )


def _vgg(name: str, convolutions: Sequence[int]) -> ZooModel:
    """`convolutions`: how many there are at each of the five sizes."""
    layers = [
        (f"convolution {size}.{n}", conv_block(channels, pool=n == count - 1))
        for size, (count, channels) in enumerate(zip(convolutions, (64, 128, 256, 512, 512), strict=True))
        for n in range(count)
    ]
    head = ("classifier", classifier_head(4096, 4096, 1000, pooled=7, dropout=0.5))
    return ZooModel(name, "Simonyan and Zisserman 2015; 3 x 224 x 224, 1000 classes", (3, 224, 224), (*layers, head))


def _resnet(name: str, counts: Sequence[int]) -> ZooModel:
    """`counts`: blocks at each of the four sizes."""
    layers = [
        (f"block {size}.{n}", bottleneck_block(64 * 2**size, stride=2 if size and not n else 1))
        for size, count in enumerate(counts)
        for n in range(count)
    ]
    head = ("classifier", classifier_head(1000, pooled=1))
    about = "He et al. 2016, the stride in the middle convolution of a block; 3 x 224 x 224, 1000 classes"
    return ZooModel(name, about, (3, 224, 224), (("stem", resnet_stem()), *layers, head))


def _unet() -> ZooModel:
    widths = (64, 128, 256, 512)
    return ZooModel(
        "U-Net",
        "Ronneberger et al. 2015, padded, with batch norm, skips along the edges; 3 x 512 x 512, 2 classes",
        (3, 512, 512),
        (
            ("down 0", unet_down(64, pool=False)),
            *((f"down {n}", unet_down(2 * width)) for n, width in enumerate(widths, 1)),
            *((f"up {n}", unet_up(width)) for n, width in enumerate(reversed(widths), 1)),
            ("classifier", pixel_scores(2)),
        ),
    )


MODELS: Mapping[str, ZooModel] = {
    model.name: model
    for model in (
        _vgg("VGG-16", (2, 2, 3, 3, 3)),
        _vgg("VGG-19", (2, 2, 4, 4, 4)),
        _resnet("ResNet-50", (3, 4, 6, 3)),
        _resnet("ResNet-152", (3, 8, 36, 3)),
        _unet(),
        _bert("BERT-large", "Devlin et al. 2019", 24),
        _bert("BERT-48", "BERT-large with 48 blocks, as in Chimera (Li and Hoefler 2021)", 48),
        _gpt1(),
        _gpt2("GPT-2", "Radford et al. 2019, small", 12, 768, 12),
        _gpt2("GPT-2-345M", "Radford et al. 2019, medium", 24, 1024, 16),
        _gpt2("GPT-2-762M", "Radford et al. 2019, large", 36, 1280, 20),
        _gpt2("GPT-2-1.3B", "64 blocks, as in Chimera (Li and Hoefler 2021)", 64, 1280, 20),
        _gpt2("GPT-2-1.5B", "Radford et al. 2019, XL", 48, 1600, 25),
        _gpt2("GPT-2-1.7B", "24 wide blocks, as in Megatron-LM (Narayanan et al. 2021, table 1)", 24, 2304, 24, 2048),
    )
}
