"""Tests of the hooks of the user's module on every stage."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from lightning_pipes.trainer.cuts.layers.capture import Interceptor
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut
from lightning_pipes.trainer.user.clipping import HookClipping
from lightning_pipes.trainer.user.hooks import track_hooks, wrap_module_hooks
from lightning_pipes.trainer.user.patches import Patches
from lightning_pipes.trainer.user.remote_tensors import RemoteTensor
from tests.trainer.lit import Case, Lit, LitOutside, differences, plain_values, restore, train_cases


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("here", [True, False])
def test_missing_values_of_other_stages_in_a_hook_are_explained(here, overlaps):
    class Storing(Lit):
        def on_train_batch_end(self, *args: Any) -> None:
            self.last_loss.item()

    module = Storing()
    patches = Patches()
    wrap_module_hooks(module, patches, lambda hook: hook, here, overlaps, lambda: None, lambda: None)
    with pytest.raises(AttributeError, match="last_loss") as caught:
        module.on_train_batch_end(None, None, 0)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("on_train_batch_end runs on every rank" in notes) is not here
    assert ("after a flush" in notes) is (overlaps and not here)
    assert ("after the batch, if it can be sent" in notes) is not (overlaps or here)
    patches.close()
    assert not [name for name in vars(module) if name.startswith("on_")]


@pytest.mark.parametrize("name", ["on_validation_end", "on_test_end", "on_predict_end"])
def test_ranks_have_the_same_state_after_the_last_hook_of_an_evaluation(name):
    module, called = Lit(), []
    setattr(module, name, lambda: called.append("hook"))

    def synchronise(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (hook(*args), called.append("synchronised"))

    with Patches() as patches:
        wrap_module_hooks(module, patches, synchronise, True, False, lambda: None, lambda: None)
        getattr(module, name)()
    assert called == ["hook", "synchronised"]


def test_a_hook_on_the_module_itself_comes_back():
    module, called = Lit(), []
    own: Any = lambda *_: called.append("hook")  # noqa: E731
    vars(module)["on_train_batch_end"] = own
    with Patches() as patches:
        track_hooks(module, [], ContainerCut(module, "model", [0], Interceptor("self.model")).scope, patches)
        wrap_module_hooks(module, patches, lambda hook: hook, True, False, lambda: called.append("agree"), lambda: None)
        module.on_train_batch_end(None, None, 0)
    assert called == ["hook", "agree"]
    assert vars(module)["on_train_batch_end"] is own


@contextmanager
def in_hook(module: Lit, on_all_ranks: bool = True) -> Iterator[ContainerCut]:
    """Cut the module to its first three layers, and run a hook in the block."""
    cut = ContainerCut(module, "model", [0, 1, 2], Interceptor("self.model"))
    with cut.scope.running("Lit.on_hook", on_all_ranks):
        yield cut


def test_parameters_and_state_equal_the_whole_module():
    whole, module = LitOutside(), LitOutside()
    with in_hook(module) as cut:
        assert [n for n, _ in module.named_parameters()] == [n for n, _ in whole.named_parameters()]
        assert [n for n, _ in module.named_modules()] == [n for n, _ in whole.named_modules()]
        assert list(module.state_dict()) == list(whole.state_dict())
        assert [p.shape for p in module.parameters()] == [p.shape for p in whole.parameters()]
        assert sum(p.numel() for p in module.parameters()) == sum(p.numel() for p in whole.parameters())
        assert all(isinstance(p, nn.Parameter) and p.device.type == "cpu" for p in module.parameters())
        here = {n for n, p in module.named_parameters() if not p.is_meta}
        module.load_state_dict(whole.state_dict())
        assert all(torch.equal(p, whole.get_parameter(n)) for n, p in module.named_parameters() if n in here)
    assert {n for n, _ in module.named_parameters()} == here < {n for n, _ in whole.named_parameters()}
    restore(cut, whole.state_dict())
    assert not any(isinstance(p, RemoteTensor) for p in module.parameters())
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), whole.parameters(), strict=True))


def test_changes_of_weights_happen_on_their_ranks():
    """Check that the same code on both parts of a module gives the results of the whole module."""

    def work(module: nn.Module) -> dict[str, torch.Tensor]:
        average = {n: p.detach().cpu().clone().double() for n, p in module.named_parameters()}
        for p in module.parameters():
            p.data.mul_(0.5).clamp_(-0.2, 0.2)
            p.data = p.data + 1
        for n, p in module.named_parameters():
            average[n] = average[n] * 0.9 + 0.1 * p.detach()
            average[n].lerp_(p.detach().double(), 0.3)
        torch._foreach_lerp_([*average.values()], [p.detach().double() for p in module.parameters()], 0.1)
        saved = copy.deepcopy(dict(module.named_parameters()))
        with torch.no_grad():
            for n, p in module.named_parameters():
                p.copy_(average[n])
                p.copy_(saved[n])
        return average

    torch.manual_seed(0)
    whole = Lit()
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    wanted, found = work(whole), {}
    for module, local in ((first, [0, 1, 2]), (second, range(3, 9))):
        cut = ContainerCut(module, "model", local, Interceptor("self.model"))
        with cut.scope.running("Lit.on_hook", True):
            values = {n: t for n, t in work(module).items() if not t.is_meta}
            values |= {f"{n} itself": p for n, p in module.named_parameters() if not p.is_meta}
        assert not found.keys() & values.keys()
        found |= values
    wanted |= {f"{n} itself": p for n, p in whole.named_parameters()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_parameters_that_code_has_kept_are_those_of_the_whole_module():
    whole, module = LitOutside(), LitOutside()
    kept = list(module.parameters())
    module.model[8].register_buffer("scale", torch.ones(3))
    buffer = module.model[8].scale
    with in_hook(module) as cut:
        assert [p.shape for p in kept] == [p.shape for p in whole.parameters()]
        assert [p.is_meta for p in kept] == [p.is_meta for p in module.parameters()]
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in kept)
        before = [p.detach().clone() for p in kept]
        with torch.no_grad():
            for p in kept:
                p.mul_(2.0)
        assert all(p.is_meta or torch.equal(p, 2 * q) for p, q in zip(kept, before, strict=True))
        for use in (lambda: sum(p.norm() for p in kept).item(), lambda: float(buffer.sum())):
            with pytest.raises(PipelineError, match=r"Lit.on_hook takes the value of self.model\.\d"):
                use()
        other = torch.zeros(3)
        with pytest.raises(PipelineError, match=r"copies into .* the values of self\.model\.8\.scale"):
            other.add_(buffer)
    restore(cut, {**whole.state_dict(), "model.8.scale": torch.ones(3)})
    assert {id(p) for p in kept} == {id(p) for p in module.parameters()}
    assert all(type(p) is nn.Parameter for p in kept)
    assert type(buffer) is torch.Tensor
    assert all(
        torch.equal(p, q) for p, q in zip(module.model[3:].parameters(), whole.model[3:].parameters(), strict=True)
    )


def initialise(module: nn.Module) -> None:
    """Initialize the weights of a module in several ways that draw random numbers."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                nn.init.xavier_normal_(p)
                nn.init.trunc_normal_(p)
                nn.init.orthogonal_(p)
                p.mul_(torch.bernoulli(torch.full_like(p, 0.7)))
            nn.init.normal_(p, 1.0)
            p.add_(torch.randn_like(p)).add_(torch.nn.functional.dropout(p, 0.3))


def test_random_numbers_for_weights_elsewhere_are_drawn_here_too():
    torch.manual_seed(0)
    whole, found = Lit(), {}
    parts = copy.deepcopy(whole), copy.deepcopy(whole)
    torch.manual_seed(1)
    initialise(whole)
    last = torch.rand(3)
    for module, local in zip(parts, ([0, 1, 2], range(3, 9)), strict=True):
        cut = ContainerCut(module, "model", local, Interceptor("self.model"))
        torch.manual_seed(1)
        with cut.scope.running("Lit.on_hook", True):
            initialise(module)
            found |= {n: p for n, p in module.named_parameters() if not p.is_meta}
        assert torch.equal(torch.rand(3), last)
    assert all(torch.equal(found[n], p) for n, p in whole.named_parameters())


def norm(module: Lit) -> Any:
    return float(sum(p.norm() ** 2 for p in module.parameters()) ** 0.5)


def stacked_norm(module: Lit) -> Any:
    return torch.stack([p.detach().norm() for p in module.parameters()]).norm().item()


def vector_norm(module: Lit) -> Any:
    return np.asarray(torch.cat([p.detach().flatten() for p in module.parameters()]).norm())


def save(module: Lit) -> Any:
    torch.save({"state": module.state_dict()}, io.BytesIO())


def save_on_host(module: Lit) -> Any:
    torch.save({n: t.detach().cpu().clone() for n, t in module.state_dict().items()}, io.BytesIO())


def to_target(module: Lit) -> Any:
    for target, p in zip(Lit().model.parameters(), module.model.parameters(), strict=True):
        target.data.lerp_(p.data, 0.1)


def to_target_at_once(module: Lit) -> Any:
    target = Lit().model
    torch._foreach_lerp_([t.data for t in target.parameters()], [p.data for p in module.model.parameters()], 0.1)


def to_target_by_state(module: Lit) -> Any:
    Lit().load_state_dict(module.state_dict())


def gathered(module: Lit) -> Any:
    torch.add(module.model[8].weight.detach(), 1, out=torch.zeros(3, 6))


USES = [norm, stacked_norm, vector_norm, save, save_on_host]
USES += [to_target, to_target_at_once, to_target_by_state, gathered]


@pytest.mark.parametrize("use", USES)
def test_code_that_needs_the_values_of_all_layers_is_refused(use: Callable[[Lit], Any]):
    use(Lit())  # this works with the whole module
    module = Lit()
    refused = pytest.raises((PipelineError, RuntimeError), match=r"Lit.on_hook .*self.model.*save_checkpoint")
    with in_hook(module), refused:
        use(module)


def hand_written_norm(module: Lit) -> Any:
    total = 0.0
    for p in module.parameters():
        if p.grad is not None:
            total += p.grad.data.norm(2).item() ** 2
    return total**0.5


def finite(module: Lit) -> Any:
    return all(torch.isfinite(p.grad).all() for p in module.parameters() if p.grad is not None)


def clipped_by_hand(module: Lit) -> Any:
    grads = [p.grad.detach() for p in module.parameters() if p.grad is not None]
    nn.utils.get_total_norm(grads)
    torch._foreach_mul_(grads, 1 / torch.stack([g.norm() for g in grads]).norm())


@pytest.mark.parametrize("use", [hand_written_norm, finite, clipped_by_hand])
def test_gradients_of_other_ranks_are_not_left_out(use: Callable[[Lit], Any]):
    module = Lit()
    module(torch.ones(2, 6)).sum().backward()
    use(module)
    cut = ContainerCut(module, "model", [0, 1, 2], Interceptor("self.model"))
    own = list(module.parameters())
    patches = Patches()
    HookClipping(lambda: own, cut.scope, All(), None, patches)  # type: ignore[arg-type]
    refused = pytest.raises(PipelineError, match=r"Lit.on_hook .*(gradient of self.model|other tensors)")
    with cut.scope.running("Lit.on_hook", True):
        with refused:
            use(module)
        assert [n for n, p in module.named_parameters() if p.grad is not None] == [
            n for n, _ in Lit().named_parameters()
        ]
        module.zero_grad(set_to_none=False)
        module.zero_grad()
        assert all(p.grad is None for p in module.parameters())
    patches.close()


class All:
    """A replacement for the ownership of parameters, in which this rank owns all of its parameters."""

    def is_owner(self, parameter: torch.Tensor) -> bool:
        return True


def test_norms_where_stages_step_apart_and_where_no_hook_runs():
    """Check which norms over parameters are refused in a training whose stages step independently.

    In a hook, a norm over the layers of all stages is refused. Outside of hooks, a norm covers the layers of this rank.
    """
    module, other = Lit(), Lit()
    for one in (module, other):
        one(torch.ones(2, 6)).sum().backward()
    whole = [p.grad for p in other.parameters() if p.grad is not None]
    cut = ContainerCut(module, "model", [0, 1, 2], Interceptor("self.model"))
    own = list(module.parameters())
    patches = Patches()
    HookClipping(lambda: own, cut.scope, All(), None, patches)  # type: ignore[arg-type]
    alone = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    with cut.scope.running("Lit.on_hook", True):
        with pytest.raises(PipelineError, match=r"Lit.on_hook takes a norm over the layers of all stages, which step"):
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        assert nn.utils.clip_grad_norm_(other.parameters(), 1.0) > alone  # a norm over another module
        with pytest.raises(PipelineError, match="one norm over weights or gradients of the module and over other"):
            nn.utils.get_total_norm([*whole, *module.parameters()])
    with cut.scope.running("Lit.on_train_epoch_end", False), pytest.raises(PipelineError, match="runs on rank 0 only"):
        nn.utils.get_total_norm(module.parameters())
    nn.utils.clip_grad_value_([], 1.0)  # for a stage without weights, where torch itself would raise an error
    patches.close()


def clip(module: Lit) -> None:
    for p in module.parameters():
        p.data.clamp_(-1, 1)


def test_weights_may_not_be_changed_where_one_rank_alone_does_it():
    module = Lit()
    with (
        in_hook(module, on_all_ranks=False),
        pytest.raises(PipelineError, match=r"on one rank only.*runs on rank 0 only"),
    ):
        clip(module)


def test_a_new_target_of_weights_is_explained():
    """Check that the error of an assignment to `.data` has a note that explains it.

    Torch also raises an error, but its message does not name the cause.
    """

    class Hooked(Lit):
        def on_train_batch_end(self, *_: Any) -> None:
            for target, p in zip(Lit().model.parameters(), self.model.parameters(), strict=True):
                target.data = target.data * 0.9 + p.data * 0.1

    module = Hooked()
    cut = ContainerCut(module, "model", [0, 1, 2], Interceptor("self.model"))
    track_hooks(module, [], cut.scope, Patches())
    with pytest.raises(RuntimeError) as raised:
        module.on_train_batch_end()
    assert "Hooked.on_train_batch_end gives a tensor of this rank" in raised.value.__notes__[0]


def test_only_hooks_of_the_users_own_are_told_and_they_come_back():
    class Own(Callback):
        def on_train_start(self, *_: Any) -> None:
            seen.append(scope.hook)

    class Hooked(Lit):
        def on_train_start(self) -> None:
            seen.append((scope.hook, scope.on_all_ranks))

        def on_train_epoch_end(self) -> None:
            seen.append((scope.hook, scope.on_all_ranks))

        def on_validation_epoch_end(self) -> None:
            seen.append((scope.hook, scope.on_all_ranks))

    seen: list[Any] = []
    scope: Any = ContainerCut(Lit(), "model", [0], Interceptor("self.model")).scope
    module, own, theirs = Hooked(), Own(), ModelCheckpoint()
    function = LambdaCallback(on_fit_start=lambda *_: seen.append(scope.hook))
    before = function.on_fit_start
    patches = Patches()
    track_hooks(module, [own, theirs, function], scope, patches)
    assert "on_train_start" not in vars(theirs)
    calls: Any = [module.on_train_start, module.on_train_epoch_end, module.on_validation_epoch_end]
    for call in (*calls, own.on_train_start):
        call()
    function.on_fit_start(None, None)  # type: ignore[arg-type]
    hooks = [
        ("Hooked.on_train_start", True),
        ("Hooked.on_train_epoch_end", True),
        ("Hooked.on_validation_epoch_end", True),
    ]
    assert seen == [*hooks, "Own.on_train_start", "LambdaCallback.on_fit_start"]
    patches.close()
    assert function.on_fit_start is before
    assert not [name for name in vars(module) if name.startswith("on_")]


class LitAverages(Lit):
    """Averages and clips its weights, validates with the averages, and loads its best state at the end."""

    def on_train_start(self) -> None:
        self.average = {n: p.detach().clone() for n, p in self.named_parameters()}
        self.best = copy.deepcopy(self.state_dict())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for n, p in self.named_parameters():
            p.data.clamp_(-0.4, 0.4)
            self.average[n].lerp_(p.detach(), 0.2)
        if batch_idx == 1:
            self.best = copy.deepcopy(self.state_dict())
        self.log("size", float(sum(p.numel() for p in self.parameters())))

    def on_validation_start(self) -> None:
        self.swap()

    def on_validation_end(self) -> None:
        self.swap()

    def swap(self) -> None:
        if hasattr(self, "average"):
            for n, p in self.named_parameters():
                p.data, self.average[n] = self.average[n], p.data.clone()

    def on_train_end(self) -> None:
        self.load_state_dict(self.best)


class LitEpochAverages(LitAverages):
    """The same with hooks whose state is sent to all ranks."""

    def on_validation_start(self) -> None:
        pass

    def on_validation_end(self) -> None:
        pass

    def on_validation_epoch_start(self) -> None:
        self.swap()

    def on_validation_epoch_end(self) -> None:
        self.swap()


class LitWhole(Lit):
    """Saves the whole weights in a hook, as the error message suggests."""

    def on_train_epoch_end(self) -> None:
        state = self.trainer.strategy.lightning_module_state_dict()
        if self.trainer.is_global_zero:
            torch.save(state, Path(self.trainer.loggers[0].root_dir) / "state.pt")


class LitClips(LitOutside):
    """Clips gradients in hooks with all functions of torch, and logs their results."""

    def on_after_backward(self) -> None:
        for p, foreach in ((2.0, None), (2, True), (1, False), (float("inf"), True), (3, False)):
            self.log(f"norm {p} {foreach}", clip_grad_norm_(self.parameters(), 0.9, p, True, foreach))
        of_none = [p.grad for p in self.parameters() if p.grad is not None and p.ndim > 2]
        self.log("of none", nn.utils.get_total_norm(of_none))
        self.log("of one", clip_grad_norm_(self.model[0][0].weight, 0.05))
        self.log("of some", clip_grad_norm_([*self.inlet.parameters(), *self.model[8].parameters()], 0.3))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.log("weights", nn.utils.get_total_norm(self.parameters()))
        self.log("once more", clip_grad_norm_(self.parameters(), 0.1))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.03)
        nn.utils.clip_grad_value_(self.parameters(), 0.02, foreach=True)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if float(norm) > 0.08:
            nn.utils.clip_grads_with_norm_(self.parameters(), 0.08, norm)


class SavesState(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            torch.save(module.state_dict(), Path(trainer.loggers[0].root_dir) / "state.pt")


def test_hooks_do_what_they_do_on_one_process():
    kinds = (LitAverages, LitWhole, LitClips, LitEpochAverages)
    cases = [Case(kind, strategy={"microbatches": 2}, trainer={"max_epochs": 2}) for kind in kinds]
    folder, other = Path(mkdtemp()), Path(mkdtemp())
    (plain,) = run_ranks(train_cases, 1, [case.plain() for case in cases], 1, str(other), timeout=180)
    for found in run_ranks(train_cases, 2, cases, 2, str(folder), timeout=180):
        for mine, one in zip(found, plain, strict=True):
            for what in ("outputs", "weights", "metrics", "steps"):
                assert differences(mine[what], one[what], at=what) == []
    whole, one = (plain_values(torch.load(root / "1" / "state.pt")) for root in (folder, other))
    assert list(whole) == list(one)
    assert differences(whole, one) == []


def test_a_state_without_the_layers_of_others_is_not_saved():
    case = Case(strategy={"microbatches": 2}, trainer={"callbacks": [SavesState()]})
    text = r"SavesState.on_train_epoch_end stores self.model.0.0.weight, which is on another rank"
    with pytest.raises(RanksFailedError, match=text):
        run_ranks(train_cases, 2, [case], 2, mkdtemp(), timeout=180)
