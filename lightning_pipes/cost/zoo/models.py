"""The models of the papers by name, in symbols."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pipes.cost.lookup import lookup_name
from lightning_pipes.cost.zoo import blocks
from lightning_pipes.cost.zoo.shapes import FLOAT32, INT64, Layer, LayerShape, ShapeTape, SymbolicTensor, record_layers


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
    loss: Layer = blocks.cross_entropy

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
    block = blocks.transformer_block(width, heads, causal=True, dropout=0.1)
    return ZooModel(
        name,
        f"{about}; {context} tokens",
        (context,),
        (
            ("tokens", blocks.token_embedding(vocabulary, width, dropout=0.1)),
            *((f"block {n}", block) for n in range(blocks_)),
            ("head", blocks.vocabulary_head(vocabulary, copied=True)),
        ),
    )


def _gpt1() -> ZooModel:
    block = blocks.transformer_block(768, 12, causal=True, norm_first=False, dropout=0.1)
    return ZooModel(
        "GPT-1",
        "Radford et al. 2018; 512 tokens",
        (512,),
        (
            ("tokens", blocks.token_embedding(40478, 768, dropout=0.1)),
            *((f"block {n}", block) for n in range(12)),
            ("head", blocks.vocabulary_head(40478, copied=True, norm=False)),
        ),
    )


def _bert(name: str, about: str, blocks_: int) -> ZooModel:
    block = blocks.transformer_block(1024, 16, causal=False, norm_first=False, fused=False, dropout=0.1)
    return ZooModel(
        name,
        f"{about}, with its two heads for training; 512 tokens",
        (512,),
        (
            ("tokens", blocks.token_embedding(30522, 1024, kinds=2, norm=True, dropout=0.1)),
            *((f"block {n}", block) for n in range(blocks_)),
            ("heads", blocks.bert_heads(30522, copied=True)),
        ),
    )


def _vgg(name: str, convolutions: Sequence[int]) -> ZooModel:
    """`convolutions`: how many there are at each of the five sizes."""
    layers = [
        (f"convolution {size}.{n}", blocks.conv_block(channels, pool=n == count - 1))
        for size, (count, channels) in enumerate(zip(convolutions, (64, 128, 256, 512, 512), strict=True))
        for n in range(count)
    ]
    head = ("classifier", blocks.classifier_head(4096, 4096, 1000, pooled=7, dropout=0.5))
    return ZooModel(name, "Simonyan and Zisserman 2015; 3 x 224 x 224, 1000 classes", (3, 224, 224), (*layers, head))


def _resnet(name: str, counts: Sequence[int]) -> ZooModel:
    """`counts`: blocks at each of the four sizes."""
    layers = [
        (f"block {size}.{n}", blocks.bottleneck_block(64 * 2**size, stride=2 if size and not n else 1))
        for size, count in enumerate(counts)
        for n in range(count)
    ]
    head = ("classifier", blocks.classifier_head(1000, pooled=1))
    about = "He et al. 2016, the stride in the middle convolution of a block; 3 x 224 x 224, 1000 classes"
    return ZooModel(name, about, (3, 224, 224), (("stem", blocks.resnet_stem()), *layers, head))


def _unet() -> ZooModel:
    widths = (64, 128, 256, 512)
    return ZooModel(
        "U-Net",
        "Ronneberger et al. 2015, padded, with batch norm, skips along the edges; 3 x 512 x 512, 2 classes",
        (3, 512, 512),
        (
            ("down 0", blocks.unet_down(64, pool=False)),
            *((f"down {n}", blocks.unet_down(2 * width)) for n, width in enumerate(widths, 1)),
            *((f"up {n}", blocks.unet_up(width)) for n, width in enumerate(reversed(widths), 1)),
            ("classifier", blocks.pixel_scores(2)),
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
