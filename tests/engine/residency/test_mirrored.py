"""Batches that divide the layers among ranks differently, so that layers are copied between ranks.

The weights are compared bit by bit with training on one batch after another.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes import MemorySwap
from lightning_pipes.engine import Item, Stage
from lightning_pipes.engine.compute.rng import seed_all, stream_seed
from lightning_pipes.engine.compute.stage import RankResources
from lightning_pipes.engine.messages.packed_trees import TreeDescription, pack_tree
from lightning_pipes.engine.residency.layer_memory import LayerMemory
from lightning_pipes.engine.residency.mirrors import Mirrors
from lightning_pipes.ir import Kind, LayerUse, Plan, PlanError, Policy, Span
from lightning_pipes.testing.reference import Loopback
from tests.engine.jumbled import Jumbled
from tests.engine.pipes import ROWS, WIDTH, assert_close, divide_evenly, squared_error
from tests.engine.pipes import batch as float64_batch

BATCHES, DEPTH, CANDIDATES = 24, 8, 3
planned = partial(divide_evenly, DEPTH)
batch = partial(float64_batch, dtype=torch.float32)


class Short(torch.autograd.Function):
    """A function that raises an out-of-memory error in every `every`-th forward and in every `every`-th backward.

    Runs count only if each device contains layers that could be evicted.
    """

    every = 0
    runs = [0, 0]
    memories: list[MemorySwap] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Short.run(0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Short.run(1)
        return gradient

    @staticmethod
    def run(backward: int) -> None:
        swaps = [memory.states(torch.device("cpu")) for memory in Short.memories if Short.every]
        if all(any(not swap.is_leased(key) for key in swap.resident_keys) for swap in swaps):
            Short.runs[backward] += bool(swaps)
            if swaps and Short.runs[backward] % Short.every == 0:
                raise torch.OutOfMemoryError("emulated")


class Counting(nn.Module):
    """A layer that replaces a buffer in its forward, and counts forwards in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count += 1
        return Short.apply(self.lin(self.drop(x)) + self.mean)  # type: ignore[no-any-return]


class Block(nn.Module):
    """A block of several candidate layers, of which each batch uses one."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        norm = nn.BatchNorm1d if number % 2 else nn.LayerNorm
        self.nets = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Dropout(0.2), nn.Tanh()), Counting(), nn.ReLU()]
        )

    def forward(self, given: Any) -> Any:
        x, choices = given
        return x + self.nets[choices[self.number]](x), choices


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(n) for n in range(DEPTH)]


def choices(number: int) -> tuple[int, ...]:
    """Return the candidate of each block that a batch uses."""
    rng = random.Random(number)
    return tuple(rng.randrange(CANDIDATES) for _ in range(DEPTH))


def chosen(item: Item) -> tuple[int, ...]:
    """Return the candidate of each block, derived from the layer names of a batch. The last candidate has no name."""
    assert item.use is not None
    names = {name for names in item.use.layers for name in names}
    return tuple(next((c for c in range(2) if f"{n}.nets.{c}" in names), 2) for n in range(DEPTH))


def use_of(number: int, plan: Plan, own_cut: bool = True) -> LayerUse:
    """Return the layer use of a batch.

    Every fourth batch leaves up to two of its layers without an update. Every seventh batch uses the cut of the plan.
    """
    names = [f"{n}.nets.{c}" for n, c in enumerate(choices(number)) if c < 2]
    still = [name for name in names if name.endswith(".0") and int(name[0]) % 2 == 0][:2] if number % 4 == 3 else []
    rng = random.Random(-number)
    ends = [0, *sorted(rng.choices(range(DEPTH + 1), k=plan.n_stages - 1)), DEPTH]
    cut = None if number % 7 == 6 or not own_cut else [Span(a, b) for a, b in pairwise(ends)]
    return LayerUse.from_names(names, plan.layers, [n for n in names if n not in still] if still else None, cut=cut)


def rows_of(number: int) -> int:
    """Return the number of samples in a batch. Every fifth batch is shorter."""
    return 6 if number % 5 == 4 else ROWS


def item(number: int, plan: Plan) -> Item:
    rows = rows_of(number)
    return Item(number, rows, batch(number, rows), use=use_of(number, plan))


def two(parameters: Mapping[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return Adam with two groups for weights, and SGD with momentum for biases."""
    found = [[p for n, p in parameters.items() if _kind(n) == kind] for kind in range(3)]
    adam = torch.optim.Adam([{"params": found[0]}, {"params": found[1], "lr": 0.01}], 0.02, weight_decay=0.1)
    return [adam, torch.optim.SGD([{"params": found[2]}], 0.05, momentum=0.9)]


def _kind(name: str) -> int:
    """Return the group of a parameter, counted over both optimizers."""
    return 2 if name.endswith("bias") else int("lin" in name)


@cache
def one_after_another(spans: tuple[Span, ...], batches: int = BATCHES) -> dict[str, torch.Tensor]:
    """Train on one batch after another without a pipeline, and return the parameters and buffers."""
    layers = model()
    optimizers = two({n: p for layer in layers for n, p in _unique(layer, layers)})
    for number in range(batches):
        rows = rows_of(number)
        x, target = batch(number, rows)
        for span in spans:
            part = span.clip_to(rows)
            out: Any = x[part.start : part.stop], choices(number)
            for n, layer in enumerate(layers):
                seed_all(stream_seed(0, 0, n, number, part), torch.device("cpu"))
                out = layer(out)
            loss = squared_error(out[0], target[part.start : part.stop]) * part.rows / rows
            if loss.requires_grad:
                loss.backward()
        plan = Plan.even(1, 1, layers=(Span(0, DEPTH),))
        use = replace(use_of(number, plan, own_cut=False))
        mine = {id(p) for name in use.stepped_layers(0) for p in nn.ModuleList(layers).get_submodule(name).parameters()}
        for p in nn.ModuleList(layers).parameters():
            p.grad = p.grad if id(p) in mine else None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return tensors(layers)


def _unique(layer: nn.Module, layers: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [(f"{layers.index(layer)}.{n}", p) for n, p in layer.named_parameters()]


def tensors(layers: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return copies of the parameters and all buffers by name."""
    modules = nn.ModuleList(layers)
    return {n: t.detach().clone() for n, t in (*modules.named_parameters(), *modules.named_buffers())}


class Letters:
    """The messages between ranks in one process, which are delivered later."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int, Any], Any] = {}
        self.count = 0


class Letter:
    """A message that may not have been sent yet."""

    def __init__(self, letters: Letters, key: Any) -> None:
        self.letters, self.key = letters, key

    def is_done(self) -> bool:
        return self.key in self.letters.sent

    @property
    def content(self) -> Any:
        return self.letters.sent.pop(self.key)


class LocalPost:
    """The transport of one rank. Receivers are notified when the test calls `tell`."""

    def __init__(self, letters: Letters, rank: int) -> None:
        self.letters, self.rank = letters, rank
        self.waiting: list[Any] = []

    def send(self, rank: int, key: Any, content: Any) -> None:
        description, found = pack_tree(content, None)
        arrived = TreeDescription(description, None).fill([t.detach().clone() for t in found])
        self.letters.sent[self.rank, rank, key] = arrived
        self.letters.count += 1

    def receive(self, rank: int, key: Any, on_arrival: Any) -> Letter:
        self.waiting.append(on_arrival)
        return Letter(self.letters, (rank, self.rank, key))

    def tell(self) -> None:
        for told in self.waiting:
            told()


@dataclass
class Ranks:
    """All ranks of a pipeline in one process, with separate `layers` for each rank.

    On each rank, the layers of other ranks are NaN and therefore unusable.
    """

    layers: list[list[nn.Module]]
    pipe: Loopback
    letters: Letters
    mirrors: list[Mirrors]
    memories: list[MemorySwap]

    @property
    def cleared(self) -> int:
        """The number of times that layers were evicted because a task ran out of memory."""
        return sum(memory.statistics.cleared for memory in self.memories)

    def whole(self, plan: Plan) -> list[nn.Module]:
        """Return each layer from the rank that owns it."""
        homes = {n: plan.ranks[s] for s, span in enumerate(plan.layers) for n in range(*span)}
        return [self.layers[homes[n]][n] for n in range(DEPTH)]


def ranks_of(plan: Plan, policy: Policy, device_bytes: int = 0) -> Ranks:
    """Return all ranks of a pipeline. With `device_bytes`, layers are swapped on a device of this size."""
    letters, all_layers, all_mirrors, posts = Letters(), [], [], []
    made: dict[int, list[Stage]] = {}
    memories: list[MemorySwap] = []
    resources: list[RankResources] = []
    for rank in range(plan.n_ranks):
        layers = copy.deepcopy(model())
        home = {n for s in plan.stages[rank] for n in range(*plan.layers[s])}
        for n, layer in enumerate(layers):
            for t in (*layer.parameters(), *layer.buffers()) if n not in home else ():
                t.data = t.data * torch.nan
        optimizers = two({f"{n}.{at}": p for n in sorted(home) for at, p in layers[n].named_parameters()})
        post = LocalPost(letters, rank)
        memory = None
        if device_bytes:
            memories.append(MemorySwap(device_bytes))
            memories[-1]._poison = True
            memory = LayerMemory(memories[-1], torch.device("cpu"), lambda optimizers=optimizers: optimizers)  # type: ignore[misc]
        mirrors = Mirrors(
            dict(enumerate(layers)),
            home.__contains__,
            post,
            lambda optimizers=optimizers: optimizers,  # type: ignore[misc]
            lambda optimizer, layer, name: {(0, 0): 0, (0, 1): 1, (1, 2): 0}.get((optimizer, _kind(name))),
            memory=memory,
        )
        resources.append(RankResources(mirrors, dict(enumerate(layers)), memory))
        made[rank] = [stage_of(s, plan, layers, resources[rank], optimizers) for s in plan.stages[rank]]
        all_layers.append(layers)
        all_mirrors.append(mirrors)
        posts.append(post)
    pipe = Loopback(plan, policy, made.__getitem__, resources.__getitem__)
    for rank, engine in enumerate(pipe.engines):
        original = engine.progress

        def progress(wait: bool = True, original: Any = original, post: LocalPost = posts[rank]) -> bool:
            post.tell()
            return bool(original(wait))

        engine.progress = progress  # type: ignore[method-assign]
    return Ranks(all_layers, pipe, letters, all_mirrors, memories)


def stage_of(
    number: int,
    plan: Plan,
    layers: Sequence[nn.Module],
    resources: RankResources,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Stage:
    """Return a stage whose step updates only the layers that a batch steps, including copies of other ranks' layers."""

    def body(stage: Stage, item: Item, span: Span, received: Any) -> Any:
        x, target = item.data
        given = (x[span.start : span.stop], chosen(item)) if received is None else received
        out = stage.run_layers(item, span, given)
        if number < plan.n_stages - 1:
            return out
        return squared_error(out[0], target[span.start : span.stop]) * span.rows / item.rows

    def step(item: Item) -> None:
        assert item.use is not None
        mirrors = resources.mirrors
        assert mirrors is not None
        mine = {id(p) for p in stage.stepped_parameters(item)}
        with mirrors.in_optimizers(item.use.stepped_layers(number)):
            every = [p for o in optimizers for g in o.param_groups for p in g["params"]]
            others = {p: p.grad for p in every if id(p) not in mine}
            for p in others:
                p.grad = None
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for p, gradient in others.items():
                p.grad = gradient

    own = {n: layers[n] for n in range(*plan.layers[number])}
    stage = Stage(number, own, body, step, resources=resources)
    return stage


PLANS = {
    "1 stage": planned(1, 2),
    "2 stages": planned(2, 2),
    "4 stages": planned(4, 2),
    "2 stages a rank": planned(4, 2, ranks=(0, 1, 0, 1)),
    "recomputed": planned(4, 2, recompute=True),
    "split backward": replace(planned(4, 2), split_backward=True),
}


@pytest.mark.parametrize(
    ("what", "device_bytes", "short"),
    [*((what, 0, 0) for what in PLANS), ("recomputed", 35_000, 0), ("recomputed", 80_000, 6)],
)
def test_weights_equal_one_after_another(
    what: str, device_bytes: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights equal the weights of sequential training bit by bit.

    This also holds if layers are swapped on the device, and if tasks run out of memory there.
    """
    plan = PLANS[what]
    for batches in (16, BATCHES):
        one_after_another(plan.spans(Kind.F, 0), batches)
    monkeypatch.setattr(Short, "every", short)
    ranks = ranks_of(plan, Jumbled(len(what)), device_bytes)
    monkeypatch.setattr(Short, "memories", ranks.memories)
    monkeypatch.setattr(Short, "runs", [0, 0])
    for number in range(BATCHES):
        ranks.pipe.inject(lambda n=number: item(n, plan))  # type: ignore[misc]
        if number % 6 == 5:
            ranks.pipe.progress()
        if number == 15:  # in the middle, all layers return to their ranks
            ranks.pipe.drain()
            assert_close(tensors(ranks.whole(plan)), one_after_another(plan.spans(Kind.F, 0), 16), exact=True)
            assert not any(mirrors.copies for mirrors in ranks.mirrors)
    ranks.pipe.drain()
    assert_close(tensors(ranks.whole(plan)), one_after_another(plan.spans(Kind.F, 0)), exact=True)
    assert not ranks.letters.sent
    for mirrors in ranks.mirrors:
        for optimizer in mirrors.optimizers():
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            assert {id(p) for p in optimizer.state} <= mine
    assert (ranks.letters.count > 40) == (plan.n_ranks > 1)
    for memory in ranks.memories:
        assert memory.statistics.bytes_out > (35_000 if short else 2 * device_bytes)
        assert memory.statistics.hits > memory.statistics.misses
    assert ranks.cleared == sum(runs // max(1, short) for runs in Short.runs)
    assert all((runs > 4 * short) == bool(short) for runs in Short.runs)


def round_and_round(number: int, plan: Plan, steps: Sequence[str] | None = None) -> Item:
    """Return a batch with one layer, which runs on the next rank for each batch."""
    ends = [0, *[DEPTH if number % 4 <= s else 0 for s in range(3)], DEPTH]
    use = LayerUse.from_names(["0.nets.0"], plan.layers, steps, cut=[Span(a, b) for a, b in pairwise(ends)])
    return Item(number, ROWS, batch(number, ROWS), use=use)


@pytest.mark.parametrize("at_once", [True, False])
def test_unneeded_copies_are_forgotten(at_once: bool) -> None:
    """A copy of a layer is dropped when its rank does not need it any more."""
    plan = PLANS["4 stages"]
    ranks = ranks_of(plan, Jumbled(depth=20))
    for number in range(12):
        ranks.pipe.inject(lambda n=number: round_and_round(n, plan))  # type: ignore[misc]
        if not at_once or number == 11:
            ranks.pipe.progress()
            assert [len(mirrors.copies) for mirrors in ranks.mirrors] == [0, *[int(number % 4 == r) for r in (1, 2, 3)]]
    ranks.pipe.drain()


def test_layers_that_are_only_read_get_no_gradients() -> None:
    """A copy that a batch uses without stepping it has no gradients afterwards."""
    plan = PLANS["4 stages"]
    ranks = ranks_of(plan, Jumbled())
    ranks.pipe.inject(lambda: round_and_round(1, plan, steps=[]))
    ranks.pipe.progress()
    [mirror] = ranks.mirrors[1].copies.values()
    assert all(p.grad is None and p.requires_grad for p in mirror.parameters.values())
    ranks.pipe.drain()


def test_refuses_cuts_that_are_not_followed() -> None:
    """A batch with a separate cut is refused without mirrors."""
    plan, layers = PLANS["2 stages"], model()
    pipe = Loopback(plan, Jumbled(), lambda r: [Stage(r, {n: layers[n] for n in range(*plan.layers[r])})])
    with pytest.raises(PlanError, match="a cut of its own, and layers do not move between batches here"):
        pipe.inject(lambda: item(0, plan))
