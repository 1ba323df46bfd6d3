"""Compare formulas with torch: FLOPs with its counter, parameters, and bytes with our profiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_pipes.cost.zoo import named_model
from lightning_pipes.cost.zoo.models import (
    bert_heads,
    bottleneck_block,
    classifier_head,
    conv_block,
    pixel_scores,
    resnet_stem,
    token_embedding,
    transformer_block,
    unet_down,
    unet_up,
    vocabulary_head,
)
from lightning_pipes.cost.zoo.shapes import INT64_BYTES, LayerShape, ShapeTape, SymbolicTensor, record_layers
from lightning_pipes.engine.compute.profiler import profile_layers
from lightning_pipes.ir import PlanError
from tests.cost.zoo import torch_zoo as ours


def flops(layer: nn.Module, *x: torch.Tensor) -> tuple[int, int, tuple[torch.Tensor, ...]]:
    """Return the FLOPs of forward and backward, and the output, detached from its graph."""
    with FlopCounterMode(display=False) as forward:
        given = layer(x[0] if len(x) == 1 else x)
    out = given if isinstance(given, tuple) else (given,)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(out, [torch.ones_like(t) for t in out])
    return (
        forward.get_total_flops(),
        backward.get_total_flops(),
        tuple(t.detach().requires_grad_() for t in out),
    )


def check_flops(layers: list[nn.Module], found: list[LayerShape], *x: torch.Tensor) -> None:
    rows = len(x[0])
    for layer, shape in zip(layers, found, strict=True):
        forward, backward, x = flops(layer, *x)
        ahead, *back = ours.sum_flops(shape)
        assert (ahead * rows, sum(back) * rows) == (forward, backward), shape.name
        assert shape.parameters == sum(p.numel() for p in layer.parameters()), shape.name
        assert shape.buffer_bytes == sum(b.nbytes for b in layer.buffers()), shape.name
        assert shape.output == sum(t.nbytes for t in x) / rows, shape.name


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("VGG-16", lambda: ours.vgg(2, 2, 3, 3, 3)),
        ("ResNet-50", lambda: ours.resnet(3, 4, 6, 3)),
        ("U-Net", lambda: ours.unet()),
    ],
)
def test_models_of_images(name, make):
    model = named_model(name)
    with torch.device("meta"):
        check_flops(make(), model.layer_shapes()[:-1], torch.zeros(2, *model.sample))


WIDTH, HEADS, TOKENS, VOCABULARY = 64, 4, 24, 97
TEXT = SymbolicTensor((TOKENS,), INT64_BYTES, trained=False)
IMAGE = SymbolicTensor((3, 32, 32), 4, trained=False)

SMALL = {
    "GPT-2": (
        TEXT,
        [
            ("tokens", token_embedding(VOCABULARY, WIDTH)),
            ("block", transformer_block(WIDTH, HEADS, causal=True)),
            ("block", transformer_block(WIDTH, HEADS, causal=True, feed_forward=2)),
            ("head", vocabulary_head(VOCABULARY, copied=False)),
        ],
        lambda: [
            ours.Tokens(VOCABULARY, WIDTH, TOKENS),
            ours.Block(WIDTH, HEADS, causal=True),
            ours.Block(WIDTH, HEADS, causal=True, feed_forward=2),
            ours.vocabulary_head(WIDTH, VOCABULARY),
        ],
    ),
    "GPT-1 with dropout": (
        TEXT,
        [
            ("tokens", token_embedding(VOCABULARY, WIDTH, dropout=0.1)),
            *[("block", transformer_block(WIDTH, HEADS, causal=True, norm_first=False, dropout=0.1))] * 2,
            ("head", vocabulary_head(VOCABULARY, copied=False, norm=False)),
        ],
        lambda: [
            ours.Tokens(VOCABULARY, WIDTH, TOKENS, p=0.1),
            *[ours.Block(WIDTH, HEADS, causal=True, norm_first=False, p=0.1) for _ in range(2)],
            ours.vocabulary_head(WIDTH, VOCABULARY, norm=False),
        ],
    ),
    "BERT": (
        TEXT,
        [
            ("tokens", token_embedding(VOCABULARY, WIDTH, kinds=2, norm=True)),
            *[("block", transformer_block(WIDTH, HEADS, causal=False, norm_first=False, fused=False))] * 2,
            ("heads", bert_heads(VOCABULARY, copied=False)),
        ],
        lambda: [
            ours.Tokens(VOCABULARY, WIDTH, TOKENS, kinds=2, norm=True),
            *[ours.Block(WIDTH, HEADS, causal=False, norm_first=False, fused=False) for _ in range(2)],
            ours.BertHeads(WIDTH, VOCABULARY),
        ],
    ),
    "VGG": (
        IMAGE,
        [
            ("convolution", conv_block(16)),
            ("convolution", conv_block(24, norm=True, pool=True)),
            ("classifier", classifier_head(40, 10, pooled=2, dropout=0.5)),
        ],
        lambda: [
            ours.conv_block(3, 16),
            ours.conv_block(16, 24, norm=True, pool=True),
            ours.classifier(96, 40, 10, pooled=2, p=0.5),
        ],
    ),
    "ResNet": (
        IMAGE,
        [
            ("stem", resnet_stem()),
            ("block", bottleneck_block(16)),
            ("block", bottleneck_block(32, stride=2)),
            ("block", bottleneck_block(32)),
            ("classifier", classifier_head(10, pooled=1)),
        ],
        lambda: [
            ours.resnet_stem(),
            ours.Bottleneck(64, 16),
            ours.Bottleneck(64, 32, 2),
            ours.Bottleneck(128, 32),
            ours.classifier(128, 10, pooled=1),
        ],
    ),
    "U-Net": (
        IMAGE,
        [
            ("down", unet_down(8, pool=False)),
            ("down", unet_down(16)),
            ("down", unet_down(32)),
            ("up", unet_up(16)),
            ("up", unet_up(8)),
            ("scores", pixel_scores(2)),
        ],
        lambda: ours.unet((8, 16)),
    ),
}


def real(x: SymbolicTensor, rows: int) -> torch.Tensor:
    return torch.randn(rows, *x.shape) if x.itemsize == 4 else torch.randint(VOCABULARY, (rows, *x.shape))


def as_products(shape: LayerShape, causal: bool) -> LayerShape:
    """Return the shape with attention as torch computes it on the meta device.

    It uses matrix products over all pairs of tokens, and the backward does not compute the scores again.
    """
    skipped = (TOKENS + 1) / (2 * TOKENS) if causal else 1.0
    operations = (
        replace(o, flops=(o.flops[0] / skipped, 2 * o.flops[0] / skipped, 0.0)) if o.name == "attention" else o
        for o in shape.operations
    )
    return replace(shape, operations=tuple(operations))


@pytest.mark.parametrize(("name", "causal"), [("GPT-2", True), ("BERT", False)])
def test_small_transformers(name, causal):
    x, layers, make = SMALL[name]
    found = [as_products(shape, causal) for shape in record_layers(layers, x, ShapeTape(4))]
    with torch.device("meta"):
        check_flops(make(), found, torch.zeros(3, *x.shape, dtype=torch.long))


def test_fused_attention():
    def run(tape, x):
        return tape.attention(x, heads=HEADS, causal=False)

    (attention,) = record_layers([("attention", run)], SymbolicTensor((TOKENS, 3 * WIDTH), 4), ShapeTape(4))
    each = (1, HEADS, TOKENS, WIDTH // HEADS)
    assert ours.sum_flops(attention)[0] == sdpa_flop_count(each, each, each)
    assert ours.sum_flops(attention)[1] == sdpa_backward_flop_count(each, each, each, each)


@pytest.mark.parametrize("name", SMALL)
def test_bytes_are_those_that_the_profiler_measures(name):
    """Compare the bytes of the formulas with the profiler, in float32 on the CPU.

    There, a dropout mask is as wide as an activation. The formulas omit the statistics of batch normalization, which do
    not grow with the number of samples.
    """
    torch.manual_seed(0)
    x, layers, make = SMALL[name]
    found = record_layers(layers, x, ShapeTape(4, mask_itemsize=4))
    rows = 4
    profile = profile_layers(make(), {rows: real(x, rows)}, repeats=1)
    for shape, layer in zip(found, profile.layers, strict=True):
        assert rows * shape.saved == pytest.approx(layer.saved[0][1], rel=0.02), shape.name
        assert shape.keeps_input == layer.keeps_input, shape.name
        assert rows * shape.output == layer.output[0][1], shape.name
        assert shape.parameters * 4 == layer.gradient_bytes, shape.name
        assert shape.parameters * 4 + shape.buffer_bytes == layer.weight_bytes, shape.name
        if name != "U-Net":  # gradients of joined tensors are copied at the end of a layer
            assert shape.working_bytes(rows) == pytest.approx(layer.working[0][1], rel=0.02), shape.name


def test_half_the_bytes_where_numbers_are_half_as_wide():
    x, layers, _ = SMALL["VGG"]
    wide, narrow = (record_layers(layers, replace(x, itemsize=size), ShapeTape(size)) for size in (4, 2))
    assert [n.output for n in narrow] == [w.output / 2 for w in wide]
    assert narrow[0].saved == wide[0].saved / 2
    where = 24 * 16 * 16 * INT64_BYTES  # the indices of max pooling keep their size
    assert narrow[1].saved - where == (wide[1].saved - where) / 2


def test_layers_that_do_not_fit():
    with pytest.raises(PlanError, match="its input is too small"):
        record_layers([("convolution", conv_block(4, pool=True))] * 6, IMAGE, ShapeTape(4))
    with pytest.raises(PlanError, match="this layer takes one tensor, got 2"):
        record_layers([("down", unet_down(4)), ("convolution", conv_block(4))], IMAGE, ShapeTape(4))
    with pytest.raises(PlanError, match="needs the outputs of a step down"):
        record_layers([("up", unet_up(4))], IMAGE, ShapeTape(4))
