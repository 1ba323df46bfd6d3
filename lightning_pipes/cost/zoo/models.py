"""Named models from papers and the blocks that they consist of, as functions of symbolic tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pipes.cost.zoo.shapes import (
    FLOAT32_BYTES,
    INT64_BYTES,
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
    """Return a layer of token and position embeddings.

    Args:
        vocabulary: the number of tokens in the vocabulary.
        width: the width of the embeddings.
        kinds: the number of kinds of tokens with an embedding, such as the two sentences of BERT. 0 means none.
        norm: whether a layer norm follows.
        dropout: the dropout probability.
    """

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
    """Return a transformer block.

    It consists of attention and a feed-forward part, which has two matrix products with GELU between them. Each part
    has a residual connection and a layer norm.

    Args:
        width: the width of the block.
        heads: the number of attention heads.
        causal: whether tokens attend only to themselves and earlier tokens.
        feed_forward: the width between the two matrix products, as a multiple of `width`.
        norm_first: whether the norm comes before each part, as in GPT-2, or after the residual sum, as in GPT-1 and
            BERT.
        fused: whether queries, keys and values are computed by one matrix product instead of three.
        dropout: the dropout probability.
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
    """Return a layer that computes the scores of all tokens in the vocabulary.

    Args:
        vocabulary: the number of tokens in the vocabulary.
        copied: whether the matrix is tied to the embedding.
        norm: whether a layer norm comes first.
    """

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = _single_tensor(x)
        return tape.linear(tape.layer_norm(y) if norm else y, vocabulary, bias=False, copied=copied)

    return run


def bert_heads(vocabulary: int, *, copied: bool) -> Layer:
    """Return the two heads of BERT: the scores of masked tokens, and the scores of next-sentence prediction.

    Args:
        vocabulary: the number of tokens in the vocabulary.
        copied: whether the matrix of the first head is tied to the embedding.
    """

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = _single_tensor(x)
        width = y.shape[-1]
        pooled = tape.tanh(tape.linear(y.view(width), width))
        follows = tape.linear(pooled, 2)
        hidden = tape.layer_norm(tape.gelu(tape.linear(y, width)))
        return tape.linear(hidden, vocabulary, copied=copied), follows

    return run


def conv_block(channels: int, kernel: int = 3, *, norm: bool = False, pool: bool = False) -> Layer:
    """Return a convolution that keeps height and width, followed by ReLU.

    Args:
        channels: the number of output channels.
        kernel: the height and width of the kernel.
        norm: whether a batch norm comes before the ReLU.
        pool: whether max pooling to half the height and width comes last.
    """

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = tape.conv2d(_single_tensor(x), channels, kernel, padding=kernel // 2, bias=not norm)
        y = tape.relu(tape.batch_norm(y) if norm else y)
        return tape.max_pool2d(y, 2, 2) if pool else y

    return run


def classifier_head(*widths: int, pooled: int, dropout: float = 0.0) -> Layer:
    """Return average pooling followed by matrix products, with ReLU and dropout between them.

    Args:
        widths: the output width of each matrix product.
        pooled: the height and width after pooling.
        dropout: the dropout probability.
    """

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = tape.average_pool2d(_single_tensor(x), pooled)
        y = y.view(y.n_elements)
        for width in widths[:-1]:
            y = tape.dropout(tape.relu(tape.linear(y, width)), dropout)
        return tape.linear(y, widths[-1])

    return run


def resnet_stem(channels: int = 64) -> Layer:
    """Return a 7 by 7 convolution and max pooling, which together reduce height and width to a quarter."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        y = tape.relu(tape.batch_norm(tape.conv2d(_single_tensor(x), channels, 7, stride=2, padding=3, bias=False)))
        return tape.max_pool2d(y, 3, 2, padding=1)

    return run


def bottleneck_block(channels: int, *, stride: int = 1, expansion: int = 4) -> Layer:
    """Return a residual block of three convolutions.

    The second convolution is 3 by 3 and has the stride. The shortcut has a convolution if the block changes the shape.

    Args:
        channels: the number of channels between the convolutions.
        stride: the stride of the block.
        expansion: the number of output channels, as a multiple of `channels`.
    """

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
    """Return one step down of a U-Net.

    It returns its inputs in addition to its output, so that skip connections travel along the edges between stages.

    Args:
        channels: the number of output channels.
        pool: whether max pooling comes first.
    """

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        if not pool:
            return _two_convolutions(tape, _single_tensor(x), channels)
        inputs = (x,) if isinstance(x, SymbolicTensor) else x
        return (*inputs, _two_convolutions(tape, tape.max_pool2d(inputs[-1], 2, 2), channels))

    return run


def unet_up(channels: int) -> Layer:
    """Return one step up of a U-Net, which consumes the last skip connection among its inputs."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        if isinstance(x, SymbolicTensor):
            raise InputError("a step up of a U-Net needs the outputs of a step down; got one tensor")
        *skips, skip, y = x
        z = _two_convolutions(tape, tape.concat(skip, tape.up_conv2d(y, channels)), channels)
        return (*skips, z) if skips else z

    return run


def pixel_scores(classes: int) -> Layer:
    """Return a layer that computes the score of each class for each pixel."""

    def run(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
        return tape.conv2d(_single_tensor(x), classes, 1)

    return run


def cross_entropy(tape: ShapeTape, x: SymbolicTensors) -> SymbolicTensors:
    """Return the cross-entropy losses of all inputs."""
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
    """A model as layers that run on symbolic tensors.

    Attributes:
        name: the name of the model.
        about: the source of the model and the size of a sample.
        sample: the shape of a sample: (tokens,), or (channels, height, width).
        layers: the layers in order, each with its name. A stage may end between any two of them.
        loss: the layer that the last stage runs at the end.
    """

    name: str
    about: str
    sample: tuple[int, ...]
    layers: tuple[tuple[str, Layer], ...]
    loss: Layer = cross_entropy

    def layer_shapes(self, itemsize: float = FLOAT32_BYTES, mask_itemsize: float = 1) -> list[LayerShape]:
        """Return the costs of each layer, followed by the costs of the loss.

        Args:
            itemsize: the bytes of an element of weights and activations.
            mask_itemsize: the bytes of an element of a dropout mask.
        """
        indices = len(self.sample) == 1
        x = SymbolicTensor(self.sample, INT64_BYTES if indices else itemsize, trained=False)
        return record_layers([*self.layers, ("loss", self.loss)], x, ShapeTape(itemsize, mask_itemsize))

    @property
    def parameters(self) -> int:
        """The number of trained parameters. Tied parameters count once."""
        return sum(layer.parameters - layer.copied for layer in self.layer_shapes())


def named_model(name: str) -> ZooModel:
    """Return a model by its name.

    Raises:
        InputError: if there is no such model. The message lists all names.
    """
    return lookup_name(MODELS, name, "model")


def _make_gpt2(name: str, about: str, blocks_: int, width: int, heads: int, context: int = 1024) -> ZooModel:
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


def _make_gpt1() -> ZooModel:
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


def _make_bert(name: str, about: str, blocks_: int) -> ZooModel:
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


def _make_vgg(name: str, convolutions: Sequence[int]) -> ZooModel:
    """Return a VGG network with the given number of convolutions at each of its five sizes."""
    layers = [
        (f"convolution {size}.{n}", conv_block(channels, pool=n == count - 1))
        for size, (count, channels) in enumerate(zip(convolutions, (64, 128, 256, 512, 512), strict=True))
        for n in range(count)
    ]
    head = ("classifier", classifier_head(4096, 4096, 1000, pooled=7, dropout=0.5))
    return ZooModel(name, "Simonyan and Zisserman 2015; 3 x 224 x 224, 1000 classes", (3, 224, 224), (*layers, head))


def _make_resnet(name: str, counts: Sequence[int]) -> ZooModel:
    """Return a ResNet with the given number of blocks at each of its four sizes."""
    layers = [
        (f"block {size}.{n}", bottleneck_block(64 * 2**size, stride=2 if size and not n else 1))
        for size, count in enumerate(counts)
        for n in range(count)
    ]
    head = ("classifier", classifier_head(1000, pooled=1))
    about = "He et al. 2016, the stride in the middle convolution of a block; 3 x 224 x 224, 1000 classes"
    return ZooModel(name, about, (3, 224, 224), (("stem", resnet_stem()), *layers, head))


def _make_unet() -> ZooModel:
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
        _make_vgg("VGG-16", (2, 2, 3, 3, 3)),
        _make_vgg("VGG-19", (2, 2, 4, 4, 4)),
        _make_resnet("ResNet-50", (3, 4, 6, 3)),
        _make_resnet("ResNet-152", (3, 8, 36, 3)),
        _make_unet(),
        _make_bert("BERT-large", "Devlin et al. 2019", 24),
        _make_bert("BERT-48", "BERT-large with 48 blocks, as in Chimera (Li and Hoefler 2021)", 48),
        _make_gpt1(),
        _make_gpt2("GPT-2", "Radford et al. 2019, small", 12, 768, 12),
        _make_gpt2("GPT-2-345M", "Radford et al. 2019, medium", 24, 1024, 16),
        _make_gpt2("GPT-2-762M", "Radford et al. 2019, large", 36, 1280, 20),
        _make_gpt2("GPT-2-1.3B", "64 blocks, as in Chimera (Li and Hoefler 2021)", 64, 1280, 20),
        _make_gpt2("GPT-2-1.5B", "Radford et al. 2019, XL", 48, 1600, 25),
        _make_gpt2(
            "GPT-2-1.7B", "24 wide blocks, as in Megatron-LM (Narayanan et al. 2021, table 1)", 24, 2304, 24, 2048
        ),
    )
}
