"""Policies that tests of the simulator run."""

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import Policy, Rule, RulePolicy


@dataclass(frozen=True)
class Scripted(Policy):
    """A program as a policy."""

    rows: tuple
    name: ClassVar[str] = "scripted"

    def pick(self, ready, view, plan):
        row = self.rows[view.rank]
        following = row[0] if view.last is None else row[row.index(view.last) + 1]
        return following if following in ready else None


@dataclass(frozen=True)
class ByRule(RulePolicy):
    """A rule as a policy, which the kernel runs."""

    limits: tuple = ()
    alternate: bool = True
    weights_last: bool = False
    name: ClassVar[str] = "by_rule"

    def rule(self, plan):
        limits = self.limits[:1] * plan.n_stages if len(self.limits) == 1 else self.limits
        return Rule(limits, self.alternate, self.weights_last)


@dataclass(frozen=True)
class Asked(Policy):
    """The same policy without its rule: it has to be asked."""

    policy: ByRule
    name: ClassVar[str] = "asked"

    def pick(self, ready, view, plan):
        return self.policy.pick(ready, view, plan)
