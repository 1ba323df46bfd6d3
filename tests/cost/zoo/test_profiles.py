"""Compare named models with published sizes and with another library, and check that profiles are plausible."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from lightning_pipes.cost import Cluster
from lightning_pipes.cost.layer import at_rows, per_row
from lightning_pipes.cost.zoo import MODELS, named_model, named_profile
from lightning_pipes.cost.zoo.profiles import CHIPS
from lightning_pipes.ir import Kind, Plan, PlanError
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.fit import fit_layers
from tests.cost.zoo.torch_zoo import sum_flops

PUBLISHED = {
    "VGG-16": 138_357_544,
    "VGG-19": 143_667_240,
    "ResNet-50": 25_557_032,
    "ResNet-152": 60_192_808,
    "U-Net": 31_037_698,  # with three input channels, two classes and batch norm
    "BERT-large": 336_226_108,  # with both heads and a tied matrix; 335,141,888 without heads
    "BERT-48": 669_790_012 - 30522 * 1024,  # published with an untied matrix
    "GPT-1": 116_534_784,
    "GPT-2": 124_439_808,
    "GPT-2-345M": 354_823_168,
    "GPT-2-762M": 774_030_080,
    "GPT-2-1.3B": 1_389_327_360 - 50257 * 1280,  # likewise
    "GPT-2-1.5B": 1_557_611_200,
    "GPT-2-1.7B": 1_650_057_984,  # 12 l h^2 (1 + 13 / 12h) + (V + s) h + 2h
}


@pytest.mark.parametrize("name", MODELS)
def test_published_parameters(name):
    assert named_model(name).parameters == PUBLISHED[name]


def test_bert_without_its_heads():
    layers = named_model("BERT-large").layer_shapes()
    pooler = 1024 * 1024 + 1024
    assert sum(layer.parameters for layer in layers[:-2]) + pooler == 335_141_888


def other(name: str) -> tuple[transformers.PreTrainedModel, dict[str, torch.Tensor]]:
    """Return the model from the transformers library, and one sample."""
    kind = {"attn_implementation": "sdpa", "use_cache": False}
    if name == "BERT-large":
        shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        model = transformers.BertForPreTraining(transformers.BertConfig(**shape, **kind))
        return model, {"input_ids": torch.zeros(1, 512, dtype=torch.long)}
    blocks, width, heads = {"GPT-2": (12, 768, 12), "GPT-2-762M": (36, 1280, 20)}[name]
    config = transformers.GPT2Config(n_layer=blocks, n_embd=width, n_head=heads, **kind)
    return transformers.GPT2LMHeadModel(config), {
        "input_ids": torch.zeros(1, 1024, dtype=torch.long),
        "attention_mask": torch.zeros(1, 1, 1024, 1024),
    }


@pytest.mark.parametrize("name", ["GPT-2", "GPT-2-762M", "BERT-large"])
def test_another_librarys_models(name):
    """Compare parameters and FLOPs with the transformers library.

    On the meta device, torch computes attention by matrix products over all pairs of tokens, and its backward does not
    compute the scores again.
    """
    ours = named_model(name)
    with torch.device("meta"):
        model, sample = other(name)
        assert sum(p.numel() for p in model.parameters()) == ours.parameters
        with FlopCounterMode(display=False) as forward:
            out = [t for t in model(**sample).values() if t.requires_grad]
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(out, [torch.ones_like(t) for t in out])
    found = ours.layer_shapes()
    attention = sum(o.flops[0] for layer in found for o in layer.operations if o.name == "attention")
    pairs = attention if name == "BERT-large" else attention * 2 * 1024 / 1025
    assert forward.get_total_flops() == sum(sum_flops(layer)[0] for layer in found) + pairs - attention
    counted = sum(sum(sum_flops(layer)[1:]) for layer in found) + 2 * pairs - 2.5 * attention
    assert backward.get_total_flops() == counted


def test_times_by_hand():
    """Check the first convolution of VGG-16 on a V100 in float16 with 8 samples, which is limited by memory."""
    layer = named_profile("VGG-16", "V100-16G", rows=(1, 8), dtype="fp16").layers[0]
    inputs, outputs, weights = 3 * 224 * 224 * 2, 64 * 224 * 224 * 2, (64 * 27 + 64) * 2
    flops = 8 * 2 * 64 * 224 * 224 * 27
    product = max(8 * (inputs + outputs) + weights, 0) / (0.8 * 900e9)
    assert (flops + 2e9) / (0.6 * 125e12) < product
    relu = 8 * 2 * outputs / (0.8 * 900e9)
    assert layer.forward[1] == (8, pytest.approx(10e-6 + product + relu, rel=1e-12))
    gradients = (8 * (inputs + 2 * outputs) + 4 * weights) / (0.8 * 900e9)
    assert layer.weight_backward[1] == (8, pytest.approx(10e-6 + gradients, rel=1e-12))
    # the gradient of the image is not needed
    assert layer.input_backward[1] == (8, pytest.approx(5e-6 + 1.5 * relu, rel=1e-12))
    parameters = 64 * 27 + 64
    assert (layer.weight_bytes, layer.gradient_bytes, layer.optimizer_bytes) == tuple(
        parameters * n for n in (2, 2, 12)
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_profile_of_every_model(name):
    profile = named_profile(name, rows=(1, 4, 16))
    assert len(profile.layers) == len(named_model(name).layers)
    assert profile.has_split
    for number, layer in enumerate(profile.layers):
        one, four, sixteen = (profile.seconds(Kind.F, number, rows) for rows in (1, 4, 16))
        assert one < four < 4 * one, layer.name
        assert four < sixteen <= 4 * four * (1 + 1e-12), layer.name
        both = profile.seconds(Kind.I, number, 4) + profile.seconds(Kind.W, number, 4)
        assert profile.seconds(Kind.B, number, 4) == pytest.approx(both, rel=1e-12), layer.name
    assert sum(layer.gradient_bytes for layer in profile.layers) >= 2 * named_model(name).parameters


def test_training_speeds_are_plausible():
    """Compare training speeds with published runs.

    GPT-2 XL reaches 40 to 60 % of the peak of an A100, and ResNet-50 processes 500 to 1500 images per second on a V100.
    """
    model, profile = named_model("GPT-2-1.5B"), named_profile("GPT-2-1.5B", "A100-80G")
    parts = (*profile.layers, profile.after)
    seconds = sum(at_rows(table, 8) for layer in parts for table in (layer.forward, layer.backward))
    useful = 6 * model.parameters * 8 * 1024
    assert 0.4 < useful / seconds / CHIPS["A100-80G"].flops["bfloat16"] < 0.6
    profile = named_profile("ResNet-50", "V100-16G", dtype="float16")
    seconds = sum(at_rows(table, 64) for layer in profile.layers for table in (layer.forward, layer.backward))
    assert 500 < 64 / seconds < 1500


def test_recomputed_layers_keep_their_input():
    plain, again = (named_profile("GPT-2", rows=(4,), recompute=on) for on in (False, True))
    before, after = plain.layers[5], again.layers[5]
    assert per_row(after.saved) == per_row(plain.layers[4].output) == 1024 * 768 * 2
    assert after.backward[0][1] == pytest.approx(before.backward[0][1] + before.forward[0][1])
    assert after.input_backward[0][1] == pytest.approx(before.input_backward[0][1] + before.forward[0][1])
    assert after.weight_backward == before.weight_backward
    assert per_row(after.working) == pytest.approx(per_row(before.working) + per_row(before.saved))
    assert again.after == plain.after


def test_a_model_that_does_not_fit_here_is_planned():
    profile = named_profile("GPT-2-1.7B", "V100-16G", dtype="float16")
    cluster = Cluster.from_counts(2, 4, 14 * 2**30)
    fit = fit_layers(profile, make_schedule("1f1b"), Plan.even(8, 16), cluster, trials=8)
    assert max(fit.peak_bytes) < 14 * 2**30
    assert sum(fit.peak_bytes) > 16 * 1_650_057_984


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "BERT-lrge"},
            "there is no model called 'BERT-lrge'. Did you mean 'BERT-large'\\? Choose from: VGG-16, VGG",
        ),
        ({"name": "GPT-2", "device": "TPU"}, "there is no device called 'TPU'. Choose from: A100-40G, A100-80G"),
        (
            {"name": "GPT-2", "device": "V100-16G"},
            "V100-16G has no figures for dtype 'bfloat16'; it has float32, float16",
        ),
        (
            {"name": "GPT-2", "optimizer": "lamb"},
            "there is no optimizer called 'lamb'. Choose from: sgd, momentum, adam",
        ),
        ({"name": "GPT-2", "rows": (4, 2)}, r"rows ascend from 1 or more, got \(4, 2\)"),
    ],
)
def test_unknown_names_are_answered_with_what_there_is(arguments, message):
    with pytest.raises(PlanError, match=message):
        named_profile(**arguments)
