"""Tests of loops over layers in the user's code: how they are recorded, and which loops are refused."""

from __future__ import annotations

import pickle
from collections import UserDict
from functools import cache
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.cuts.layers import pipelined
from lightning_pipes.trainer.cuts.layers.capture import CacheSwitch, Interceptor
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut, find_pipelined, log_choice
from lightning_pipes.trainer.cuts.layers.tape import TapedLayer
from tests.compat.models import LitGPT2
from tests.trainer.lit import Case, differences, train_cases


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, h: Any, *args: Any, **kwargs: Any) -> Any:
        return self.linear(h)


def run(parts: ContainerCut, number: int, x: Any) -> Any:
    """Run a layer as its stage does."""
    return TapedLayer(parts.full[number], number)(x)


class LitLoop(pl.LightningModule):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))


def cut(layers: int = 4) -> tuple[LitLoop, Interceptor, ContainerCut]:
    """Return a module, its interceptor, and the cut module that holds all of its layers."""
    module = LitLoop(layers)
    interceptor = Interceptor("self.layers", loop=True)
    return module, interceptor, ContainerCut(module, "layers", range(layers), interceptor)


def test_values_travel_no_further_than_they_are_needed():
    module, interceptor, parts = cut()
    early, late, unused = torch.ones(1), torch.ones(2), torch.ones(3)

    def step() -> Any:
        h = torch.zeros(5, 3)
        first = h = module.layers[0](h, early, unused)
        h = module.layers[1](h, early)
        h = module.layers[2](h, first, late)
        return module.layers[3](h, late)

    x = interceptor.capture(step)
    held = []
    for number in range(3):
        x = run(parts, number, x)
        held.append(sorted(tuple(v.shape) for v in x[1].values()))
    h = (5, 3)
    assert held == [[(1,), (2,), h], [(2,), h, h], [(2,), h]]
    assert torch.equal(run(parts, 3, x), step_by_hand(module, torch.zeros(5, 3)))


def step_by_hand(module: LitLoop, h: torch.Tensor) -> torch.Tensor:
    for number in range(4):
        h = module.layers[number].linear(h)
    return h


def test_equal_calls_take_little_space():
    module, interceptor, _ = cut(100)
    mask = torch.ones(1)

    def step() -> Any:
        h = torch.zeros(1)
        for layer in module.layers:
            h = layer(h, mask, None, scale=0.5, flag=True, name="of the layer")

    tape, values = interceptor.capture(step)
    assert len(values) == 2
    assert len(pickle.dumps(tape)) < 3000


def test_unpacking_and_entries():
    """Check that steps can unpack the results of layers, read their entries, and pass them on."""

    class Returning(nn.Module):
        def forward(self, h: Any, more: Any = None) -> Any:
            return h + 1, {"all": [h, 2 * h]}

    def step(module: LitLoop, x: Any) -> Any:
        h, more = module.layers[0](x)
        (h, more), again = module.layers[1](h, more=more["all"][1]), more
        out = module.layers[2](h, [more["all"], (again, None)])
        return module.layers[3](out[0])[0]

    module, interceptor, parts = cut()
    for number in range(4):
        parts.full[number] = Returning()
    x = interceptor.capture(step, module, torch.ones(2))
    for number in range(4):
        x = run(parts, number, x)
    assert interceptor.run_with_answer(step, lambda _: x, module, torch.ones(2)).tolist() == [5.0, 5.0]


class Notes(UserDict):
    """A dict as a library may use it to share keys and values between layers."""


@pytest.mark.parametrize("made", [dict, Notes])
def test_a_dict_that_layers_fill_travels_with_what_is_in_it(made):
    class Noting(Layer):
        def forward(self, h: Any, notes: Any = None) -> Any:
            out = self.linear(h) + sum(a + b for a, b in notes.values())
            notes[f"{len(notes) % 3}"] = (h, out)
            return out

    def step(module: LitLoop, x: Any) -> Any:
        h, notes = x, made()
        for layer in module.layers:
            h = layer(h, notes=notes)
        return h

    module, interceptor, parts = cut()
    torch.manual_seed(0)
    for number in range(4):
        parts.full[number] = Noting()
    plain, x = LitLoop(), torch.ones(2, 3)
    plain.layers = nn.ModuleList(parts.full)
    travels = interceptor.capture(step, module, x)
    for number in range(4):
        before = pytree.tree_map(lambda t: t, travels)
        run(parts, number, travels)  # a second run, as with recompute=True, finds the same values as the first
        assert pytree.tree_structure(travels) == pytree.tree_structure(before)
        travels = run(parts, number, travels)
        if number < 3:
            assert sorted(travels[1][1]) == ["0", "1", "2"][: number + 1]
    assert torch.equal(travels, step(plain, x))


def test_a_dict_for_each_layer_is_not_shared():
    class Filling(Layer):
        def forward(self, h: Any, notes: Any) -> Any:
            assert not notes
            notes["h"] = h
            return self.linear(h)

    def step(module: LitLoop) -> Any:
        h = torch.ones(2, 3)
        for layer in module.layers:
            h = layer(h, {})
        return h

    module, interceptor, parts = cut()
    for number in range(4):
        parts.full[number] = Filling()
    x = interceptor.capture(step, module)
    for number in range(4):
        x = run(parts, number, x)


def test_use_cache_is_off_while_a_step_runs():
    module = LitGPT2(use_cache=True)
    config, seen = module.net.config, []
    interceptor = Interceptor("self.net.transformer.h", loop=True, around=CacheSwitch(module))
    ContainerCut(module, "net.transformer.h", range(4), interceptor)

    def step(tokens: torch.Tensor) -> Any:
        seen.append(config.use_cache)
        out = module.net(tokens)
        seen.append(out.past_key_values)
        return out.logits

    tokens = torch.zeros(2, 5, dtype=torch.long)
    interceptor.capture(step, tokens)
    assert config.use_cache
    interceptor.run_with_answer(step, lambda x: torch.zeros(2, 5, 8), tokens)
    assert config.use_cache
    with pytest.raises(PipelineError, match=r"layer 0 of .* holds a DynamicCache; .* set use_cache=False"):
        interceptor.capture(lambda: module.net(tokens, use_cache=True))
    assert config.use_cache
    assert seen == [False, False, None]
    config.use_cache = False
    interceptor.capture(step, tokens)
    assert not config.use_cache


def loop(change: Any = lambda h: h, **kwargs: Any) -> Any:
    """Return a step that calls the layers in order, and changes what each one returns."""

    def step(module: LitLoop) -> Any:
        h = torch.zeros(2, 3)
        for layer in module.layers:
            h = change(layer(h, **kwargs))
        return h

    return step


def skipping(module: LitLoop) -> Any:
    h = torch.zeros(2, 3)
    for layer in module.layers[::2]:
        h = layer(h)


def stopping_early(module: LitLoop) -> Any:
    h = torch.zeros(2, 3)
    for layer in module.layers[:2]:
        h = layer(h)
    return h.sum()


def collecting(module: LitLoop) -> Any:
    h, found = torch.zeros(2, 3), []
    for layer in module.layers:
        h = layer(h)
        found.append(h)
    return torch.stack(found)


class Cache:
    pass


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (loop(torch.tanh), r"what layer 0 of self.layers returns was used in tanh before"),
        (loop(lambda h: h + 1), r"was used in add before the last layer had run"),
        (loop(lambda h: 2 * h), r"was used in rmul before"),
        (loop(lambda h: torch.ones(3) * h), r"was used in .*mul.* before"),
        (loop(lambda h: h.to(torch.float16)), r"was used in .to before"),
        (loop(lambda h: h[:, None]), r"was used in .* before"),
        (loop(lambda h: list(h)), r"was used in a loop or a call before"),
        (stopping_early, r"what layer 1 of self.layers returns was used in .sum .* call all of them in order"),
        (collecting, r"was used in stack before .*output_hidden_states=False"),
        (
            skipping,
            r"layer 2 of self.layers was called after layer 0; .* all 4 layers must be called once and in order",
        ),
        (loop(cache=Cache()), r"cache of layer 0 of self.layers holds a Cache; .* set use_cache=False"),
        (loop(many=[{"a": (Cache(), 1)}]), r"many of layer 0 of self.layers holds a Cache"),
        (lambda module: module.layers(1), r'Module \[ModuleList\] is missing the required "forward"'),
    ],
)
def test_loops_that_are_refused(step, message):
    module, interceptor, _ = cut()
    with pytest.raises((PipelineError, NotImplementedError), match=message):
        interceptor.run_with_answer(step, lambda x: torch.zeros(2, 3), module)


def test_a_second_loop_is_refused():
    module, interceptor, _ = cut()

    def twice(module: LitLoop) -> Any:
        return loop()(module) + loop()(module)

    with pytest.raises(PipelineError, match=r"twice calls the layers of self.layers more than once for one batch"):
        interceptor.run_with_answer(twice, lambda x: torch.zeros(2, 3), module)


def test_layers_outside_of_steps():
    module, interceptor, _ = cut()
    kept = interceptor.run_with_answer(lambda m: (list(m.layers), loop()(m))[0], lambda x: torch.zeros(2, 3), module)
    with pytest.raises(PipelineError, match=r"layer 1 of self.layers was called outside .*recompute=True"):
        kept[1](torch.zeros(2, 3))
    assert [type(layer) for layer in module.layers] == [Layer] * 4
    assert kept[1].linear is module.layers[1].linear
    assert hasattr(kept[1], "linear")
    assert isinstance(kept[1], Layer)
    assert bool(kept[1])


def test_layers_of_layers():
    module = pl.LightningModule()
    module.model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Linear(1, 1))
    interceptor = Interceptor("self.model")
    ContainerCut(module, "model", [0, 1], interceptor)

    def step() -> Any:
        assert len(module.model[0]) == 2
        assert [type(part) for part in module.model[0]] == [nn.Linear, nn.ReLU]
        return module.model(module.model[0][0].weight)

    assert interceptor.capture(step).shape == (1, 1)


def test_a_layer_that_returns_what_no_other_rank_understands():
    class Bad(nn.Module):
        def forward(self, h: Any) -> Any:
            return h, Cache()

    module, interceptor, parts = cut()

    def step() -> Any:
        h, cache = module.layers[0](torch.zeros(2, 3))
        for layer in module.layers[1:]:
            h = layer(h, cache)

    parts.full[0] = Bad()
    with pytest.raises(PipelineError, match=r"what Bad returns as layer 0 holds a Cache"):
        run(parts, 0, interceptor.capture(step))


class TestFindPipelined:
    def module(self, **parts: nn.Module) -> pl.LightningModule:
        module = pl.LightningModule()
        inner = nn.Module()
        for name, part in parts.items():
            inner.add_module(name, part)
        module.net = inner
        return module

    def linears(self, n: int) -> list[nn.Module]:
        return [nn.Linear(2, 2) for _ in range(n)]

    def test_the_largest_list_deeper_inside(self):
        module = self.module(few=nn.Sequential(*self.linears(2)), many=nn.ModuleList(self.linears(5)))
        assert find_pipelined(module, None) == "net.many"
        module.head = nn.Sequential(*self.linears(2))  # although it is nearer to the module
        assert find_pipelined(module, None) == "net.many"
        module.own = nn.Sequential(*self.linears(4))  # nearly as large, and nearer
        assert find_pipelined(module, None) == "own"
        module.alone = nn.Sequential(nn.Linear(50, 50))  # cannot be cut
        assert find_pipelined(module, None) == "own"

    def test_no_clear_one(self):
        module = self.module(encoder=nn.ModuleList(self.linears(4)), decoder=nn.ModuleList(self.linears(5)))
        with pytest.raises(
            PipelineError, match=r"no .* clearly the largest. Name one: .* 'net.decoder' \(30 .*'net.encoder' \(24"
        ):
            find_pipelined(module, None)
        with pytest.raises(PipelineError, match=r"Put the layers into one and call them in order"):
            find_pipelined(self.module(), None)

    def test_a_pipeline_plan_decides_between_several(self, monkeypatch):
        said: list[str] = []
        monkeypatch.setattr(pipelined, "rank_zero_info", said.append)
        module = self.module(encoder=nn.ModuleList(self.linears(4)), decoder=nn.ModuleList(self.linears(5)))
        module.net.inner = nn.ModuleList(self.linears(1))
        module.net.pp_plan = {"encoder": ([], []), "inner": ([], []), "norm": ([], [])}
        assert find_pipelined(module, None) == "net.encoder"
        log_choice(module, "net.encoder")
        assert said == [
            "The pipeline is cut from self.net.encoder, which the model's pp_plan names. Set "
            "PipelineStrategy(module=...) to cut another container"
        ]
        module.net.pp_plan["decoder"] = ([], [])
        assert find_pipelined(module, None) == "net.decoder"
        module.net.third = nn.ModuleList(self.linears(20))  # clearly the largest, but it may not run
        assert find_pipelined(module, None) == "net.decoder"
        ran = {"net.decoder": 0.0, "net.third": 0.0}
        assert find_pipelined(module, None, ran) == "net.third"
        log_choice(module, "net.third")
        assert "pp_plan" not in said[-1]
        assert find_pipelined(module, None, {"net.third": 0.0}) == "net.third"
        module.own = nn.ModuleList(self.linears(40))  # outside of the model that has a plan
        assert find_pipelined(module, None) == "own"

    def test_modules_that_can_not_be_cut(self):
        class Own(nn.ModuleList):
            def forward(self, x: Any) -> Any:
                return x

        module = self.module(own=Own(self.linears(2)), pairs=nn.ModuleList([nn.ModuleList(self.linears(2))]))
        with pytest.raises(PipelineError, match=r"net.own is a Own with a forward of its own, .* nn.ModuleList inside"):
            find_pipelined(module, "net.own")
        with pytest.raises(PipelineError, match=r"net.pairs.0 is a ModuleList, which has no forward"):
            find_pipelined(module, "net.pairs")
        with pytest.raises(PipelineError, match=r"net is a Module; only an nn.Sequential, or .* there are 'net"):
            find_pipelined(module, "net")

    @pytest.mark.parametrize("path", ["net", "net.layers"])
    def test_compiled_as_a_whole(self, path):
        module = self.module(layers=nn.Sequential(*self.linears(2)))
        module.get_submodule(path).compile(backend="eager")
        with pytest.raises(PipelineError, match=rf"LightningModule.{path} is compiled as a whole, .* layer.compile"):
            find_pipelined(module, None)

    def test_compiled_by_a_wrapper(self):
        module = self.module(layers=torch.compile(nn.Sequential(*self.linears(2)), backend="eager"))
        with pytest.raises(PipelineError, match=r"net.layers is compiled as a whole"):
            find_pipelined(module, None)
        with pytest.raises(PipelineError, match=r"net.layers is compiled as a whole"):
            find_pipelined(module, "net.layers")


@cache
def with_dropout(ranks: int) -> list[Any]:
    cases = [
        Case(LitGPT2, {"dropout": p}, {"module": "net.transformer.h", "microbatches": 4, "seed": 2}) for p in (0.3, 0.0)
    ]
    return [run["weights"] for run in run_ranks(train_cases, ranks, cases, ranks, mkdtemp(), timeout=90)[0]]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_dropout_does_not_depend_on_the_number_of_stages(ranks):
    one, without = with_dropout(1)
    assert differences(with_dropout(ranks)[0], one) == []
    assert differences(without, one) != []
