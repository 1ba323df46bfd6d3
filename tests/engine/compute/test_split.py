"""Input gradients followed by weight gradients equal the gradients of one backward, without additional computation."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_pipes.engine.compute.autograd import SavedForward, backward, enter_stage, leave_stage
from lightning_pipes.engine.compute.split import WeightGradients, backward_inputs
from lightning_pipes.engine.compute.stage import Stage
from lightning_pipes.ir import Span
from tests.cases import for_each

WIDTH = 6
LAYERS: dict[str, Callable[[], nn.Module]] = {}
HOOKED = "hooks on weights and modules"
INSEPARABLE = {
    "weight and bias used twice in a row": "a weight that is used several times in a row",
    "vector used twice in a row": "a weight that is used several times in a row",
    "recurrent": "a weight that is used several times in a row",
    "function with a weight": "DoubledBackward, an autograd function in Python with weights",
    "reentrant checkpoint": "a reentrant checkpoint",
    "checkpoint": "a checkpoint, or other hooks that pack saved tensors",
}


def layer(name: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Return a decorator that adds a module class to `LAYERS`."""

    def add(kind: type[nn.Module]) -> type[nn.Module]:
        LAYERS[name] = kind
        return kind

    return add


def linear(bias: bool = True) -> nn.Linear:
    """Return a linear layer of the width of the tests."""
    return nn.Linear(WIDTH, WIDTH, bias=bias)


LAYERS["mlp"] = lambda: nn.Sequential(linear(), nn.GELU(), linear())
LAYERS["norms"] = lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.LayerNorm(WIDTH), nn.PReLU())
LAYERS["without weights"] = nn.Tanh
LAYERS["identity"] = nn.Identity
LAYERS["in place"] = lambda: nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.ReLU(inplace=True), linear())
LAYERS["frozen"] = lambda: nn.Sequential(linear().requires_grad_(False), nn.Tanh(), linear(), linear(False))
LAYERS["all frozen"] = lambda: nn.Sequential(linear(), nn.Tanh()).requires_grad_(False)
LAYERS["parametrized"] = lambda: nn.utils.parametrizations.weight_norm(linear())
LAYERS["transformer"] = lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)


class Formula(nn.Module):
    """A layer that applies `formula` to itself and its input, with `parts` as its modules and parameters."""

    def __init__(self, formula: Callable[[Any, torch.Tensor], torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.formula = formula
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(self, x)


def weight() -> nn.Parameter:
    """Return a square matrix of the width of the tests."""
    return nn.Parameter(torch.randn(WIDTH, WIDTH))


LAYERS["weight used twice in a row"] = lambda: Formula(
    lambda m, x: m.inner(m.inner(x @ m.weight).tanh()) @ m.weight.t(), inner=linear(False), weight=weight()
)
LAYERS["weight and bias used twice in a row"] = lambda: Formula(lambda m, x: m.inner(m.inner(x).tanh()), inner=linear())
LAYERS["vector used twice in a row"] = lambda: Formula(lambda m, x: m.norm(m.norm(x).exp()), norm=nn.LayerNorm(WIDTH))
LAYERS["weights used side by side"] = lambda: Formula(
    lambda m, x: m.attention(x, x + 1, x * 2)[0] + m.inner(x) * m.inner(x * 2),
    attention=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    inner=linear(),
)
LAYERS["convolution"] = lambda: Formula(
    lambda m, x: m.inner(x.reshape(-1, 1, WIDTH)).reshape(x.shape),
    inner=nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv1d(4, 1, 1)),
)
LAYERS["recurrent"] = lambda: Formula(lambda m, x: m.inner(x)[0], inner=nn.LSTM(WIDTH, WIDTH, 2, batch_first=True))


@layer("written into slices")
class Slices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = linear(), nn.Parameter(torch.randn(2, 1).expand(2, 3).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        y[..., :2, :3].mul_(self.scale)
        y[:, 0] += x[:, 1] * self.scale.sum()
        return y.unsqueeze(0).transpose(0, 1)[:, 0]  # type: ignore[no-any-return]


@layer("several outputs")
class Several(nn.Module):
    """A layer with outputs that depend only on weights, on no weights, or that receive no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.bias, self.norm = linear(), nn.Parameter(torch.randn(WIDTH)), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        a, b, c = self.norm(self.inner(x)).split(2, -1)
        return {"used": (a * c, b), "bias": self.bias * 2, "mask": torch.ones(3), "none": None, "input": x}


class Doubled(torch.autograd.Function):
    """A matrix product that counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        Doubled.calls += 1
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight.t(), (x.transpose(1, 2) @ gradients[0]).sum(0)


LAYERS["function with a weight"] = lambda: Formula(
    lambda m, x: m.inner(Doubled.apply(x, m.weight)), weight=weight(), inner=linear()
)
LAYERS["function without weights"] = lambda: Formula(
    lambda m, x: m.second(Doubled.apply(m.first(x), m.second.weight.detach())), first=linear(), second=linear()
)
LAYERS["reentrant checkpoint"] = lambda: Formula(
    lambda m, x: checkpoint(m.second, m.first(x), use_reentrant=True), first=linear(), second=linear()
)
LAYERS["checkpoint"] = lambda: Formula(
    lambda m, x: checkpoint(m.second, m.first(x), use_reentrant=False), first=linear(), second=linear()
)


@layer(HOOKED)
class Hooked(nn.Module):
    """A layer with hooks on weights and on a module, which count their calls and change gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = linear(), nn.LayerNorm(WIDTH), linear()
        self.calls: Counter[str] = Counter()
        for name, p in self.named_parameters():
            p.register_hook(lambda g, name=name: self._count(name, g * 2))  # type: ignore[misc]
            p.register_post_accumulate_grad_hook(lambda p, name=name: self._count(name + " done", None))  # type: ignore[misc,no-untyped-call]
        self.first.register_full_backward_hook(lambda m, i, o: self._count("module", (i[0] * 3,)))

    def _count(self, name: str, value: Any) -> Any:
        self.calls[name] += 1
        return value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))  # type: ignore[no-any-return]


@layer("hooks on activations")
class HookedActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda g: g * 2)
        y = self.first(x)
        y.register_hook(lambda g: g * 3)
        return self.second(y)  # type: ignore[no-any-return]


def forward(module: nn.Module, seed: int = 0) -> tuple[SavedForward, list[torch.Tensor | None]]:
    """Run a micro-batch of shape (4, 3, 6), and return its saved forward and gradients for the outputs.

    If there are several outputs, the second gradient is None.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = SavedForward(Span(0, 4), None)
    x = enter_stage(torch.randn(4, 3, WIDTH, dtype=torch.float64, generator=generator), (True,), saved)
    out, _ = leave_stage(module(x), saved)
    made = [torch.randn(t.shape, dtype=torch.float64, generator=generator) for t in tensors_wanted(out, saved)]
    return saved, [g if n != 1 or len(made) == 1 else None for n, g in enumerate(made)]


def tensors_wanted(out: Any, saved: SavedForward) -> list[torch.Tensor]:
    """Return the outputs that receive a gradient."""
    tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return [t for t in tensors if not torch.equal(t, torch.ones_like(t))][: len(saved.outputs)]


def build(name: str) -> nn.Module:
    """Return a layer of `LAYERS` with reproducible weights in double precision."""
    torch.manual_seed(1)
    return LAYERS[name]().double()


def found(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients of the parameters by name."""
    return {n: p.grad for n, p in module.named_parameters()}


@for_each("forwards", [1, 2])
@for_each("name", LAYERS)
def test_equals_one_backward(name: str, forwards: int) -> None:
    """Computed in two parts, all gradients equal the gradients of one backward, for every layer in `LAYERS`."""
    whole, parts = build(name), build(name)
    records = [forward(whole, seed) for seed in range(forwards)]
    wanted = [saved.entered[0] for saved, _ in records]
    backward(records, last=False)

    records = [forward(parts, seed) for seed in range(forwards)]
    entered = [saved.entered[0] for saved, _ in records]
    left = backward_inputs(records, last=False)
    del records
    why = "a hook on a weight that is used several times" if (name, forwards) == (HOOKED, 2) else ""
    assert left.inseparable == INSEPARABLE.get(name, why)
    for got, want in zip(entered, wanted, strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-12, atol=1e-12)
        got.grad = None
    if not left.inseparable:
        assert all(p.grad is None for p in parts.parameters())
    left.compute()
    assert all(t.grad is None for t in entered)  # the input gradients are not computed again
    for n, want in found(whole).items():
        got = found(parts)[n]
        assert (got is None) == (want is None), n
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=n)


def test_hooks_run_once() -> None:
    module = build(HOOKED)
    saved, gradients = forward(module)
    backward_inputs([(saved, gradients)], last=False).compute()
    assert isinstance(module, Hooked)
    assert set(module.calls.values()) == {1}
    assert len(module.calls) == 2 * 6 + 1


def test_a_loss() -> None:
    """On the last stage, backward starts from a scalar loss and gives the same gradients."""
    whole, parts = build("mlp"), build("mlp")
    for module in (whole, parts):
        saved = SavedForward(Span(0, 4), None)
        x = enter_stage(torch.ones(4, WIDTH, dtype=torch.float64), (True,), saved)
        leave_stage(module(x).square().mean(), saved)
        if module is whole:
            backward([(saved, ())], last=True)
            wanted = saved.entered[0].grad
        else:
            left = backward_inputs([(saved, ())], last=True)
            torch.testing.assert_close(saved.entered[0].grad, wanted)
            left.compute()
    torch.testing.assert_close(found(parts), found(whole))


def test_first_stage_leaves_everything_for_later() -> None:
    """Without an input gradient, as on the first stage, all gradients are computed in the second part."""
    whole, parts = build("mlp"), build("mlp")
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    records = []
    for module in (whole, parts):
        saved = SavedForward(Span(0, 4), None)
        out, _ = leave_stage(module(x), saved)
        records.append((saved, [torch.ones_like(out)]))
    backward(records[:1], last=False)
    left = backward_inputs(records[1:], last=False)
    assert all(p.grad is None for p in parts.parameters())
    left.compute()
    torch.testing.assert_close(found(parts), found(whole))


class Products(TorchDispatchMode):
    """A mode that counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


def products(work: Callable[[], Any]) -> tuple[int, Any]:
    """Return the number of matrix products in a call, and the result of the call."""
    with Products() as counted:
        result = work()
    return counted.count, result


@pytest.mark.parametrize(("name", "first", "second"), [("mlp", 2, 2), ("weight used twice in a row", 4, 4)])
def test_nothing_is_computed_twice(name: str, first: int, second: int) -> None:
    """The two parts together compute the same number of matrix products as one backward."""
    saved, gradients = forward(build(name))
    assert products(lambda: backward([(saved, gradients)], False))[0] == first + second
    saved, gradients = forward(build(name))
    count, left = products(lambda: backward_inputs([(saved, gradients)], False))
    assert count == first
    assert products(left.compute)[0] == second


def test_a_function_in_python_runs_once() -> None:
    Doubled.calls = 0
    saved, gradients = forward(build("function with a weight"))
    backward_inputs([(saved, gradients)], False).compute()
    assert Doubled.calls == 1


class Watched(nn.Module):
    """Two linear layers, with operations whose saved tensors only the input gradient needs.

    It stores weak references to the saved tensors, and the names of those that are alive when a gradient arrives at the
    first layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.kept: dict[str, StorageWeakRef] = {}
        self.on_arrival: list[set[str]] = []

    def watch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.kept[name] = StorageWeakRef(tensor.untyped_storage())
        return tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.watch("before gelu", self.first(x))
        a.register_hook(lambda gradient: self.on_arrival.append(self.alive()))
        b = self.watch("input of the second", nn.functional.gelu(a))
        return self.watch("before tanh", self.second(b)).sin().tanh()

    def alive(self) -> set[str]:
        return {name for name, ref in self.kept.items() if not ref.expired()}


def test_in_between_only_what_weights_need_is_held() -> None:
    """Between the two parts, only the tensors for weight gradients stay alive."""
    module = Watched().double()
    saved, gradients = forward(module)
    assert module.alive() == {"before gelu", "input of the second", "before tanh"}
    left = backward_inputs([(saved, gradients)], last=False)
    assert module.alive() == {"input of the second"}
    assert module.on_arrival[0] == {"input of the second"}  # the first half frees the others while it runs
    left.compute()
    assert module.alive() == set()


def test_it_holds_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the release of the graph, all saved tensors stay alive, which shows that the previous test can fail."""
    monkeypatch.setattr("lightning_pipes.engine.compute.split._Graph.releasing", lambda self, kept: nullcontext())
    module = Watched().double()
    saved, gradients = forward(module)
    left: WeightGradients = backward_inputs([(saved, gradients)], last=False)
    assert module.alive() >= {"before gelu", "input of the second"}
    left.compute()


def test_a_single_backward_that_is_not_split_is_not_warned_of():
    """A warning is issued once, when two backwards in a row could not be split."""
    stage = Stage(3, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for why in ("hooks", "", "hooks", ""):
            stage.note_split(why)
        stage.note_split("hooks")
    with pytest.warns(UserWarning, match=r"stage 3 computes its weight gradients .* because of hooks"):
        stage.note_split("hooks")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stage.note_split("hooks")
