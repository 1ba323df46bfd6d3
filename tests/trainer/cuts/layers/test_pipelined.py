"""Tests of modules that contain only the layers of one rank."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch

from lightning_pipes.trainer.cuts.layers.capture import Interceptor
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut
from tests.trainer.lit import Lit, LitTied, restore


class TestContainerCut:
    def cut(self, module: pl.LightningModule, local: list[int]) -> ContainerCut:
        return ContainerCut(module, "model", local, Interceptor("self.model"))

    def test_only_local_layers_are_registered_under_their_names(self):
        module = Lit()
        whole = dict(module.state_dict())
        cut = self.cut(module, [2, 8])
        assert list(module.state_dict()) == ["model.2.0.weight", "model.2.0.bias", "model.8.weight", "model.8.bias"]
        assert cut.keys == list(whole)
        assert len(module.model) == 9
        assert module.model[0][0].weight.is_meta
        assert module.model[0][0].weight.shape == whole["model.0.0.weight"].shape
        assert [m is module.model[n] for n, m in enumerate(module.model)] == [True] * 9
        assert "(0): on another rank" in repr(module.model)

    def test_memory_of_other_ranks_layers_is_released(self):
        module = Lit()
        foreign = module.model[0][0].weight
        self.cut(module, [2])
        assert foreign.is_meta

    def test_restore_brings_the_same_objects_back(self):
        module = LitTied()
        before = dict(module.named_parameters(remove_duplicate=False))
        values = {k: v.clone() for k, v in module.state_dict().items()}
        full = module.model
        cut = self.cut(module, [2])
        restore(cut, values)
        after = dict(module.named_parameters(remove_duplicate=False))
        assert module.model is full
        assert all(after[name] is before[name] for name in before)
        assert all(torch.equal(v, values[k]) for k, v in module.state_dict().items())

    def test_tied_weights_stay_where_one_of_them_is_local(self):
        module = LitTied()
        cut = self.cut(module, [4])
        assert not module.model[4].weight.is_meta
        assert module.model[0].weight is module.model[4].weight
        assert not cut.is_foreign(module.model[4].weight)

    def test_buffers_that_are_not_saved_stay(self):
        module = Lit()
        module.model[0].register_buffer("table", torch.arange(3), persistent=False)
        module.model[0].register_buffer("count", torch.arange(4))
        values = copy.deepcopy(module.state_dict())
        cut = self.cut(module, [2])
        assert module.model[0].count.is_meta
        restore(cut, values)
        assert module.model[0].table.tolist() == [0, 1, 2]
        assert module.model[0].count.tolist() == [0, 1, 2, 3]

    def test_attributes_of_the_whole_are_reachable(self):
        module = Lit()
        module.model.note = "hello"
        self.cut(module, [0])
        assert module.model.note == "hello"
        with pytest.raises(AttributeError):
            module.model.missing  # noqa: B018
