"""Tests of the check that an optimizer steps each parameter independently of the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.optimizers.step_probe import check_skips_unused, check_steps_apart
from tests.compat.gradient_modules import SAM, ClippingSGD, Lamb, NoisySGD
from tests.compat.supernet_modules import DecayingSGD


class SubclassOfAdamW(AdamW):
    pass


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer and counts its steps in an attribute."""

    def __init__(self, parameters: Any) -> None:
        self.inner = SGD(parameters, lr=0.1, momentum=0.9)
        self.count = 0
        super().__init__(self.inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.count % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))
        return loss


class SumsGradients(SGD):
    """Sums the squares of all gradients, and divides its learning rate by the sum from step `at` on."""

    def __init__(self, parameters: Any, at: int) -> None:
        super().__init__(parameters, lr=0.1)
        self.total, self.count, self.at = 0.0, 0, at

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        found = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.total += sum(float(p.grad.square().sum()) for p, _ in found)
        self.count += 1
        for p, rate in found:
            p.sub_(rate * p.grad if self.count < self.at else rate * p.grad / self.total)
        return loss


class NeedsItsOwn(SGD):
    """Fails with parameters of other shapes."""

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["params"][0].shape == (3, 5), "made for others"
        return super().step(closure)


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (3,), (2, 3, 4), ())]


FINE = [
    partial(SumsGradients, at=10**9),
    partial(DecayingSGD, lr=0.1),
    partial(AdamW, lr=0.1),
    SubclassOfAdamW,
    Lamb,
    Lookahead,
    partial(SAM, lr=0.1, norm=False),
]


@pytest.mark.parametrize("make", [*FINE, partial(ClippingSGD, lr=0.1)])
def test_each_parameter_is_stepped_separately(make):
    found = parameters()
    before = [p.detach().clone() for p in found]
    optimizer, state = make(found), torch.get_rng_state()
    optimizer.register_step_pre_hook(lambda *_: found[0].data.zero_())
    check_steps_apart([optimizer], is_asynchronous=False)
    assert all(torch.equal(p, q) for p, q in zip(found, before, strict=True))
    assert not optimizer.state
    assert all(p.grad is None for p in found)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make", "is_asynchronous", "message"),
    [
        (
            partial(Lamb, whole=True),
            False,
            "the step of Lamb for one parameter depends on other parameters.*clip_grad_norm_",
        ),
        (
            partial(SumsGradients, at=13),
            False,
            "the step of SumsGradients for one parameter depends on other parameters",
        ),
        (
            partial(SumsGradients, at=500),
            False,
            "the step of SumsGradients for one parameter depends on other parameters",
        ),
        (partial(SAM, lr=0.1), False, "the step of SAM for one parameter depends on other parameters"),
        (partial(ClippingSGD, lr=0.1), True, "the step of ClippingSGD for one parameter depends on other parameters"),
        (partial(NoisySGD, lr=0.1), False, "NoisySGD draws random numbers for one parameter after another"),
    ],
)
def test_optimizers_that_need_all_parameters_are_refused(make, is_asynchronous, message):
    with pytest.raises(PipelineError, match=message):
        check_steps_apart([AdamW(parameters()), make(parameters())], is_asynchronous)


def test_what_cannot_be_told_is_said():
    """Check the warning about an optimizer that fails with other parameters than its own."""
    with pytest.warns(UserWarning, match="unknown whether NeedsItsOwn steps each parameter separately.*made for oth"):
        check_steps_apart([NeedsItsOwn(parameters(), lr=0.1)], is_asynchronous=False)


@pytest.mark.parametrize("make", [SubclassOfAdamW, Lamb, Lookahead, partial(AdamW, lr=0.1)])
def test_unused_parameters_stay(make):
    check_skips_unused([make(parameters())])


def test_a_decay_of_unused_parameters_is_refused():
    with pytest.raises(PipelineError, match=r"DecayingSGD changes parameters that have no gradients.*'1f1b'"):
        check_skips_unused([DecayingSGD(parameters(), lr=0.1)])
