"""Policies for tests of the simulator."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import Policy, Rule, RulePolicy


@dataclass(frozen=True)
class Scripted(Policy):
    """A policy that follows a program."""

    rows: tuple
    name: ClassVar[str] = "scripted"

    def pick(self, ready, view, plan):
        row = self.rows[view.rank]
        following = row[0] if view.last is None else row[row.index(view.last) + 1]
        return following if following in ready else None


@dataclass(frozen=True)
class ByRule(RulePolicy):
    """A policy with a rule, which the kernel executes."""

    limits: tuple = ()
    alternate: bool = True
    weights_last: bool = False
    name: ClassVar[str] = "by_rule"

    def rule(self, plan):
        limits = self.limits[:1] * plan.n_stages if len(self.limits) == 1 else self.limits
        return Rule(limits, self.alternate, self.weights_last)


@dataclass(frozen=True)
class Asked(Policy):
    """The same policy without its rule, so that the simulator calls `pick`."""

    policy: ByRule
    name: ClassVar[str] = "asked"

    def pick(self, ready, view, plan):
        return self.policy.pick(ready, view, plan)
