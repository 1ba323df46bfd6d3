"""Tests of the warnings about steps that train differently with micro-batches, for many kinds of steps.

The expected answer is computed by autograd: the gradients of the whole batch are compared with the gradients of its
micro-batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.ir import Span
from tests.cases import for_each
from tests.trainer.watchers.checks import sample_check

WIDTH, HEADS = 4, 2
SPANS = [Span(0, 2), Span(2, 4), Span(4, 6), Span(6, 8)]
UNEVEN = [Span(0, 3), Span(3, 6), Span(6, 8)]
Step = Callable[..., torch.Tensor]


class MappedFunction(nn.Module):
    """A linear map of the first tensor, followed by a function of all tensors."""

    def __init__(self, function: Step | None = None) -> None:
        super().__init__()
        self.map, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Any) -> Any:
        first, *others = x if isinstance(x, tuple) else (x,)
        first = torch.tanh(self.map(first))
        if self.function is not None:
            first = self.function(first, *others)
        return (first, *others) if others else first


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.map = nn.MultiheadAttention(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.map(x + self.attention(x, x, x, need_weights=False)[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.cell(x)[0]


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Any) -> Any:
        x, mask = x
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0], mask


class RunningNorm(nn.Module):
    """A hand-written batch normalization."""

    def forward(self, x: Any) -> Any:
        return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-3).sqrt()


class Case(NamedTuple):
    """A step: the function before the layers, the type of its two layers, and the function after them."""

    enter: Callable[[torch.Tensor], Any] = lambda x: x
    layer: Callable[[], nn.Module] = MappedFunction
    leave: Callable[[Any], torch.Tensor] = lambda y: y
    tokens: int = 2


def first(y: Any) -> torch.Tensor:
    found: torch.Tensor = y[0]
    return found


def samples_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)


def per_head(x: torch.Tensor, inner: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    length = x.size(1)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1).expand(len(x), -1, -1)
    mask = mask & (x[:, :1, :1] > 0)
    return x, mask.repeat_interleave(HEADS, 0) if inner else mask.repeat(HEADS, 1, 1)


def with_table(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, torch.arange(1.0, x.size(1) * WIDTH + 1, dtype=x.dtype).view(-1, WIDTH).sin()


def with_square(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x, torch.tril(torch.ones(x.size(1), x.size(1), dtype=x.dtype)) / 2


def views(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.flip(-1)])


def halves(y: torch.Tensor) -> torch.Tensor:
    a, b = y.chunk(2)
    return a * b


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, WIDTH)


def unflat(length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: y.view(-1, length, WIDTH)


def within(length: int) -> Callable[[], nn.Module]:
    """Return a layer for inputs of shape (B * T, C) that mixes the tokens of each sample."""

    def mix(x: torch.Tensor) -> torch.Tensor:
        tokens = x.view(-1, length, WIDTH)
        return (tokens + tokens.mean(1, keepdim=True)).reshape(-1, WIDTH)

    return lambda: MappedFunction(mix)


def function(of: Callable[..., torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: MappedFunction(of)


def quiet_cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    # the number of samples of a micro-batch, another number, and the number of samples of a batch
    for tokens in (2, 3, 8):
        found |= {
            f"sequence first, {tokens}": Case(samples_first, SequenceFirst, samples_first, tokens),
            f"recurrent, sequence first, {tokens}": Case(samples_first, Recurrent, samples_first, tokens),
            f"linear, sequence first, {tokens}": Case(samples_first, MappedFunction, samples_first, tokens),
            f"flattened tokens, {tokens}": Case(flat, MappedFunction, unflat(tokens), tokens),
            f"flattened tokens of a sample meet, {tokens}": Case(flat, within(tokens), unflat(tokens), tokens),
            f"flattened and sequence first, {tokens}": Case(
                lambda x: flat(x.transpose(0, 1)),
                MappedFunction,
                lambda y, tokens=tokens: y.view(tokens, -1, WIDTH).transpose(0, 1),  # type: ignore[misc]
                tokens,
            ),
            f"two views, {tokens}": Case(views, MappedFunction, halves, tokens),
            f"two views of flattened tokens, {tokens}": Case(
                lambda x: flat(views(x)),
                MappedFunction,
                lambda y, tokens=tokens: halves(y.view(-1, tokens, WIDTH)),
                tokens,  # type: ignore[misc]
            ),
            f"views, sequence first, {tokens}": Case(
                lambda x: samples_first(views(x)), SequenceFirst, lambda y: halves(samples_first(y)), tokens
            ),
            f"mask of each head, {tokens}": Case(per_head, MaskedAttention, first, tokens),
            f"rotary table, {tokens}": Case(with_table, function(lambda x, table: x * table), first, tokens),
            f"square mask, {tokens}": Case(with_square, function(lambda x, mask: mask @ x), first, tokens),
            f"samples first within the layer, {tokens}": Case(
                layer=function(lambda x: x.transpose(0, 1).cumsum(0).transpose(0, 1)), tokens=tokens
            ),
            f"softmax over tokens, {tokens}": Case(layer=function(lambda x: x.softmax(1)), tokens=tokens),
            f"layer norm, {tokens}": Case(layer=function(lambda x: F.layer_norm(x, x.shape[1:])), tokens=tokens),
            f"softmax over tokens, sequence first, {tokens}": Case(
                samples_first, function(lambda x: x.softmax(0)), samples_first, tokens
            ),
            f"cumulative over tokens, sequence first, {tokens}": Case(
                samples_first, function(lambda x: x.cumsum(0)), samples_first, tokens
            ),
            f"auxiliary mean, {tokens}": Case(
                lambda x: (x, x.new_zeros(())),
                Auxiliary,
                first,
                tokens,
            ),
        }
    return found


class Auxiliary(nn.Module):
    """Adds a mean over samples to a number that is passed along."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x, extra = x
        x = self.map(x)
        return x, extra + x.pow(2).mean()


def attend_over_samples(x: torch.Tensor) -> torch.Tensor:
    tokens = x.flatten(1)
    return ((tokens @ tokens.T).softmax(1) @ tokens).view_as(x)


def mixing_cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for tokens in (2, 3, 8):
        found |= {
            f"batch norm by hand, {tokens}": Case(
                layer=lambda: nn.Sequential(MappedFunction(), RunningNorm()), tokens=tokens
            ),
            f"softmax over samples, {tokens}": Case(layer=function(lambda x: x.softmax(0)), tokens=tokens),
            f"mean of samples taken away, {tokens}": Case(layer=function(lambda x: x - x.mean(0)), tokens=tokens),
            f"scaled by the largest sample, {tokens}": Case(
                layer=function(lambda x: x / x.abs().amax(0, keepdim=True).detach()), tokens=tokens
            ),
            f"scaled by the norm of the batch, {tokens}": Case(layer=function(lambda x: x / x.norm()), tokens=tokens),
            f"cumulative sum of samples, {tokens}": Case(layer=function(lambda x: x.cumsum(0)), tokens=tokens),
            f"difference from the next sample, {tokens}": Case(
                layer=function(lambda x: x - x.roll(1, 0)), tokens=tokens
            ),
            f"sorted over samples, {tokens}": Case(layer=function(lambda x: x.sort(0).values), tokens=tokens),
            f"reversed samples, {tokens}": Case(layer=function(lambda x: x * x.flip(0)), tokens=tokens),
            f"attention over samples, {tokens}": Case(layer=function(attend_over_samples), tokens=tokens),
            f"similarity of all pairs leaves the layers, {tokens}": Case(layer=Pairs, leave=lambda y: y, tokens=tokens),
            f"mean before the layers, {tokens}": Case(lambda x: x - x.mean(0), tokens=tokens),
            f"sorted before the layers, {tokens}": Case(lambda x: x[x.sum((1, 2)).argsort()], tokens=tokens),
            f"batch norm before the layers, {tokens}": Case(lambda x: RunningNorm()(x), tokens=tokens),
            f"first sample everywhere, {tokens}": Case(lambda x: x + x[:1], tokens=tokens),
            f"table of the batch, {tokens}": Case(
                lambda x: (x, x.mean(0)), function(lambda x, table: x * table), first, tokens
            ),
            f"samples meet, sequence first, {tokens}": Case(
                samples_first, function(lambda x: x - x.mean(1, keepdim=True)), samples_first, tokens
            ),
            f"samples meet in flattened tokens, {tokens}": Case(
                flat, function(lambda x: x.softmax(0)), unflat(tokens), tokens
            ),
            f"samples meet in one view, {tokens}": Case(
                views, function(lambda x: torch.cat([x[: len(x) // 2].cumsum(0), x[len(x) // 2 :]])), halves, tokens
            ),
            f"samples meet through a swapped view, {tokens}": Case(
                lambda x: views(x.cumsum(0)), MappedFunction, halves, tokens
            ),
        }
    return found


class Pairs(nn.Module):
    """A layer that turns samples into a matrix of all pairs of samples, and returns such a matrix unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        if x.ndim == 2:
            return x
        rows = self.map(x).flatten(1)
        return (rows @ rows.T).softmax(1)


class Net(nn.Module):
    """A module that contains the layers of a step."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing. This step never runs, because the input of the layers is given."""


def find_gradients(case: Case, layers: Sequence[nn.Module], x: torch.Tensor, y: torch.Tensor, spans: Any) -> Any:
    """Return the gradients of the mean over samples, summed over the given micro-batches."""
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    for span in spans:
        out = case.enter(x[span.start : span.stop])
        for layer in layers:
            out = layer(out)
        per_sample = case.leave(out).flatten(1).sin().sum(1) * y[span.start : span.stop]
        (per_sample.sum() / len(x)).backward()
    return torch.cat([p.grad.flatten() for layer in layers for p in layer.parameters() if p.grad is not None])


def find_warnings(case: Case, layers: Sequence[nn.Module], x: torch.Tensor, spans: list[Span], **settings: Any) -> Any:
    """Return the warnings of a check of two stages, and the check."""
    module = Net(layers)
    parts: dict[int, dict[Span, Any]] = {0: {s: case.enter(x[s.start : s.stop]) for s in spans}}
    parts[1] = {s: layers[0](part) for s, part in parts[0].items()}
    stages = {n: SimpleNamespace(number=n, layers={n: layers[n]}, offload=None) for n in range(2)}
    check = sample_check(
        spans,
        cut=SimpleNamespace(full=module.net, path="net", module=module, proxy=module.net),
        control=SimpleNamespace(all_gather=lambda mine: [deepcopy(mine)]),
        stages=stages,
        **settings,
    )
    check._pipeline.engine.plan.n_stages = 2
    steps: Any = check._steps
    steps.left.add_whole_values = lambda values: None
    steps.capture_input = lambda step, item, batch, arguments, draws: case.enter(batch)
    step: Any = SimpleNamespace(batch=x, rows=len(x), arguments=(0,), samples=frozenset(), token_cut=None)
    check.around_batch(step)
    step.stage_inputs, step.item = parts, Item(0, len(x), data=step)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        check.before_optimizer_step(step)
    # The garbage of earlier tests may be collected here, with warnings of files that were not closed.
    return [str(each.message) for each in caught if not issubclass(each.category, ResourceWarning)], check


def compare(case: Case, spans: list[Span], **settings: Any) -> tuple[bool, list[str]]:
    """Return whether micro-batches give the gradients of the whole batch, and the warnings of the check."""
    torch.manual_seed(0)
    layers = [case.layer().double(), case.layer().double()]
    x, y = torch.randn(8, case.tokens, WIDTH).double(), torch.randn(8).double()
    whole = find_gradients(case, layers, x, y, [Span(0, 8)]).clone()
    cut = find_gradients(case, layers, x, y, spans)
    return bool((whole - cut).abs().max() < 1e-12), find_warnings(case, layers, x, spans, **settings)[0]


@for_each(("name", "case"), quiet_cases().items())
@for_each("spans", [SPANS, UNEVEN])
def test_steps_of_each_sample_are_not_warned_of(name, case, spans):
    same, warned = compare(case, spans)
    assert same
    assert warned == []


@for_each(("name", "case"), mixing_cases().items())
@for_each("spans", [SPANS, UNEVEN])
def test_steps_that_mix_samples_are_warned_of(name, case, spans):
    same, warned = compare(case, spans)
    assert not same
    assert warned
    assert all("from several samples together" in each for each in warned)


@for_each(("name", "case"), quiet_cases().items())
def test_a_stage_that_compares_alone_is_as_quiet(name, case):
    """Check that a stage of an asynchronous schedule, which compares alone, does not warn of these steps either."""
    assert compare(case, SPANS, is_asynchronous=True)[1] == []


def test_a_stage_that_compares_alone_warns_of_steps_that_mix_samples():
    cases = mixing_cases()
    silent = [name for name, case in cases.items() if not compare(case, SPANS, is_asynchronous=True)[1]]
    assert silent == []
