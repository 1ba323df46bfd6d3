"""Tests of the private interfaces of transformers that the package uses, which name what a new version lacks."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from lightning_pipes.trainer.weights import private_transformers as private

transformers = pytest.importorskip("transformers")


def make() -> nn.Module:
    """Return a small Llama model."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    return transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_hidden_layers=1))


def test_init_weights_initializes_a_part_and_its_buffers():
    model = make()
    rotary, linear = model.rotary_emb, model.layers[0].mlp.up_proj
    expected = rotary.inv_freq.clone()
    with torch.no_grad():
        rotary.inv_freq.fill_(7)
        linear.weight.fill_(7)
    private.initialize(model, rotary)
    private.initialize(model, linear)
    assert torch.equal(rotary.inv_freq, expected)
    assert 0 < linear.weight.std() < 0.1


def test_ignored_keys_are_patterns():
    model = make()
    model._keys_to_ignore_on_load_unexpected = {"old"}
    assert private.ignored_keys(model) == ("old", r"rotary_emb\.inv_freq$")
    assert private.ignored_keys(nn.Linear(1, 1)) == ()


def test_names_of_the_library():
    """The functions of transformers that convert checkpoints have the expected names and arguments."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import rename_source_key, revert_weight_conversion

    assert list(inspect.signature(rename_source_key).parameters)[:5] == [
        "source_key",
        "weight_renamings",
        "weight_converters",
        "base_model_prefix",
        "meta_state_dict",
    ]
    assert list(inspect.signature(revert_weight_conversion).parameters)[:2] == ["model", "state_dict"]
    assert isinstance(get_model_conversion_mapping(make()), list)


def test_modules_of_others_keep_their_names():
    layer = nn.Linear(1, 1)
    assert not private.is_pretrained_model(layer)
    assert private.rename_keys(layer, ["weight"]) == {"weight": ("weight", False)}
    assert private.revert_weights(layer, {"weight": layer.weight}) == {"weight": layer.weight}
