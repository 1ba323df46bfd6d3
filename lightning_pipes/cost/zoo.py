"""The models of the papers by name, and profiles of them on devices by name: for plans beyond what is at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_pipes.cost import blocks
from lightning_pipes.cost.chips import ITEMSIZE, Chip, chip_named, dtype_named
from lightning_pipes.cost.model import Table
from lightning_pipes.cost.named import known
from lightning_pipes.cost.profile import LayerProfile, ModelProfile, added
from lightning_pipes.cost.shapes import FLOAT32, INT64, Layer, LayerShape, Tape, Tensor, shapes
from lightning_pipes.ir import InputError, check_type, shown

ROWS = (1, 2, 4, 8, 16, 32, 64)
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}
"""Numbers of float32 that each keeps for a parameter."""


@dataclass(frozen=True)
class Model:
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

    def shapes(self, itemsize: float = FLOAT32, mask_itemsize: float = 1) -> list[LayerShape]:
        """The cost of each layer, and in the end of the loss."""
        indices = len(self.sample) == 1
        x = Tensor(self.sample, INT64 if indices else itemsize, trained=False)
        return shapes([*self.layers, ("loss", self.loss)], x, Tape(itemsize, mask_itemsize))

    @property
    def parameters(self) -> int:
        """Numbers that are trained; those of tied layers count once."""
        return sum(layer.parameters - layer.copied for layer in self.shapes())


def named_model(name: str) -> Model:
    """A model by its name.

    Raises:
        InputError: there is none; lists those that there are.
    """
    return known(MODELS, name, "model")


def named_profile(
    name: str,
    device: str | Chip = "A100-80G",
    rows: Sequence[int] = ROWS,
    dtype: str = "bfloat16",
    optimizer: str = "adam",
    recompute: bool = False,
) -> ModelProfile:
    """The costs of the layers of the model `name` on `device`, by formula: see `cost.shapes` and `cost.chips`.

    Weights, gradients and activations are of type `dtype`; what the optimizer keeps is float32, with a copy of the
    weights where they are smaller.

    Args:
        rows: numbers of samples for which times are given; linear between them.
        dtype: "float32", "bfloat16" or "float16".
        optimizer: "sgd", "momentum" or "adam".
        recompute: each layer keeps its input only and runs forward again before its backward, as with
            `torch.utils.checkpoint` around every layer. A plan's own recompute is of whole stages.

    Raises:
        InputError: a name that nobody knows; lists what there is.
    """
    model = named_model(name)
    chip = device if isinstance(device, Chip) else chip_named(device)
    dtype = dtype_named(dtype, chip)
    kept = FLOAT32 * (known(OPTIMIZERS, optimizer, "optimizer") + (ITEMSIZE[dtype] < FLOAT32))
    check_type("recompute", recompute, bool)
    check_type("rows", rows, Sequence[int])
    if not rows or sorted(set(rows)) != list(rows) or rows[0] < 1:
        raise InputError(f"rows ascend from 1 or more, got {shown(rows)}")
    given = model.shapes(ITEMSIZE[dtype], 1 if chip.byte_masks else ITEMSIZE[dtype])
    *layers, loss = (_profile(shape, chip, rows, dtype, kept) for shape in given)
    if recompute:
        layers = [_recomputed(layer, shape) for layer, shape in zip(layers, given, strict=False)]
    again = ", each layer recomputed" if recompute else ""
    return ModelProfile(
        tuple(layers),
        after=loss,
        widened=FLOAT32 / ITEMSIZE[dtype],
        device=chip.name,
        source=f"formula: {model.name}, {model.about}, {dtype}, {optimizer}{again}",
    )


def _profile(shape: LayerShape, chip: Chip, rows: Sequence[int], dtype: str, kept: int) -> LayerProfile:
    def seconds(*parts: int) -> Table:
        return tuple((r, sum(chip.seconds(o, p, r, dtype) for o in shape.operations for p in parts)) for r in rows)

    def bytes_of(by_sample: float) -> Table:
        return tuple((r, r * by_sample) for r in rows)

    weights = shape.parameters * ITEMSIZE[dtype]
    state = shape.parameters * kept
    return LayerProfile(
        shape.name,
        forward=seconds(0),
        backward=seconds(1, 2),
        input_backward=seconds(1),
        weight_backward=seconds(2),
        step=chip.moving(3 * weights + 2 * state),  # a gradient is read, a weight and the state are read and written
        weight_bytes=weights + shape.buffer_bytes,
        gradient_bytes=weights,
        optimizer_bytes=state,
        saved=bytes_of(shape.saved),
        keeps_input=shape.keeps_input,
        output=bytes_of(shape.output),
        working=tuple((r, shape.working(r)) for r in rows),
    )


def _recomputed(layer: LayerProfile, shape: LayerShape) -> LayerProfile:
    """The same layer where it keeps its input only, and has the rest for the time of its backward."""
    return replace(
        layer,
        backward=added((layer.forward, layer.backward)),
        input_backward=added((layer.forward, layer.input_backward)),
        saved=tuple((r, r * shape.input) for r, _ in layer.saved),
        keeps_input=False,  # what came in is nobody else's
        working=added((layer.working, layer.saved)),
    )


def _gpt2(name: str, about: str, blocks_: int, width: int, heads: int, context: int = 1024) -> Model:
    vocabulary = 50257
    block = blocks.transformer_block(width, heads, causal=True, dropout=0.1)
    return Model(
        name,
        f"{about}; {context} tokens",
        (context,),
        (
            ("tokens", blocks.tokens(vocabulary, width, dropout=0.1)),
            *((f"block {n}", block) for n in range(blocks_)),
            ("head", blocks.vocabulary_head(vocabulary, copied=True)),
        ),
    )


def _gpt1() -> Model:
    block = blocks.transformer_block(768, 12, causal=True, norm_first=False, dropout=0.1)
    return Model(
        "GPT-1",
        "Radford et al. 2018; 512 tokens",
        (512,),
        (
            ("tokens", blocks.tokens(40478, 768, dropout=0.1)),
            *((f"block {n}", block) for n in range(12)),
            ("head", blocks.vocabulary_head(40478, copied=True, norm=False)),
        ),
    )


def _bert(name: str, about: str, blocks_: int) -> Model:
    block = blocks.transformer_block(1024, 16, causal=False, norm_first=False, fused=False, dropout=0.1)
    return Model(
        name,
        f"{about}, with its two heads for training; 512 tokens",
        (512,),
        (
            ("tokens", blocks.tokens(30522, 1024, kinds=2, norm=True, dropout=0.1)),
            *((f"block {n}", block) for n in range(blocks_)),
            ("heads", blocks.bert_heads(30522, copied=True)),
        ),
    )


def _vgg(name: str, convolutions: Sequence[int]) -> Model:
    """`convolutions`: how many there are at each of the five sizes."""
    layers = [
        (f"convolution {size}.{n}", blocks.conv_block(channels, pool=n == count - 1))
        for size, (count, channels) in enumerate(zip(convolutions, (64, 128, 256, 512, 512), strict=True))
        for n in range(count)
    ]
    head = ("classifier", blocks.classifier(4096, 4096, 1000, pooled=7, dropout=0.5))
    return Model(name, "Simonyan and Zisserman 2015; 3 x 224 x 224, 1000 classes", (3, 224, 224), (*layers, head))


def _resnet(name: str, counts: Sequence[int]) -> Model:
    """`counts`: blocks at each of the four sizes."""
    layers = [
        (f"block {size}.{n}", blocks.bottleneck(64 * 2**size, stride=2 if size and not n else 1))
        for size, count in enumerate(counts)
        for n in range(count)
    ]
    head = ("classifier", blocks.classifier(1000, pooled=1))
    about = "He et al. 2016, the stride in the middle convolution of a block; 3 x 224 x 224, 1000 classes"
    return Model(name, about, (3, 224, 224), (("stem", blocks.resnet_stem()), *layers, head))


def _unet() -> Model:
    widths = (64, 128, 256, 512)
    return Model(
        "U-Net",
        "Ronneberger et al. 2015, padded, with batch norm, skips along the edges; 3 x 512 x 512, 2 classes",
        (3, 512, 512),
        (
            ("down 0", blocks.down(64, pool=False)),
            *((f"down {n}", blocks.down(2 * width)) for n, width in enumerate(widths, 1)),
            *((f"up {n}", blocks.up(width)) for n, width in enumerate(reversed(widths), 1)),
            ("classifier", blocks.pixel_scores(2)),
        ),
    )


MODELS: Mapping[str, Model] = {
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
