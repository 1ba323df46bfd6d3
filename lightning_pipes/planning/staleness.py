"""The number of batches that training with stale gradients needs, as a function of the number of stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pipes.ir import InputError, check_count, check_fields, check_number, check_type
from lightning_pipes.planning.replanning import GradientSample


@dataclass(frozen=True)
class Constants:
    """The constants of a model in the convergence analysis (DynPipe, S IV-B2).

    Attributes:
        loss: the loss before training, f(w0). The smallest possible loss is taken as 0, as in the paper.
        lipschitz: L, the Lipschitz constant of the gradient as a function of the weights.
        noise: xi^2, the mean squared norm of the gradients of mini-batches.

    Raises:
        InputError: a constant is negative or not finite.
    """

    loss: float
    lipschitz: float
    noise: float

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in vars(self).items():
            check_number(name, value, "finite, not negative", lambda x: 0 <= x < math.inf)

    @classmethod
    def from_probes(cls, loss: float, probes: Sequence[GradientSample], largest: bool = False) -> Constants:
        """Return the constants estimated from a few iterations.

        Args:
            loss: the loss before training.
            probes: the measurements of the iterations.
            largest: whether L is the largest ratio of the changes of gradients and weights, as in its definition,
                instead of the mean ratio.

        Raises:
            InputError: the weights did not change in any iteration.
        """
        ratios = [probe.changed / probe.moved for probe in probes if probe.moved > 0]
        if not ratios:
            raise InputError("L is estimated from iterations in which weights change, but there were none")
        lipschitz = max(ratios) if largest else sum(ratios) / len(ratios)
        return cls(loss, lipschitz, sum(probe.squared for probe in probes) / len(probes))


@dataclass(frozen=True)
class Iterations:
    """T(S), the number of batches until the squared norm of the gradient reaches a target, on S stages.

    The formula is Theorem 1 of DynPipe (E2-E3). As in the paper, the term 2 sigma^2 / B is dropped:

        T(S) = 2 f(w0) / (lr (target - 2 lr^2 S^3 L^2 xi^2)) = base / (1 - penalty S^3)

    It is valid only while the bracket is positive: with more stages, no number of batches is sufficient. Because S is
    cubed, T(S) is very sensitive to both constants. `from_measured` fits them to measured runs.

    Attributes:
        base: the number of batches without staleness.
        penalty: the relative decrease of the bracket for one stage.
    """

    base: float
    penalty: float

    def __post_init__(self) -> None:
        check_fields(self)
        check_number("base", self.base, "finite, above 0", lambda x: 0 < x < math.inf)
        check_number("penalty", self.penalty, "finite, not negative", lambda x: 0 <= x < math.inf)

    @classmethod
    def of_theory(cls, constants: Constants, lr: float, target: float) -> Iterations:
        """Return T(S) from the constants of a model, a learning rate, and the target of the squared gradient norm.

        Raises:
            InputError: the learning rate or the target is not above 0.
        """
        for name, value in (("lr", lr), ("target", target)):
            check_number(name, value, "finite, above 0", lambda x: 0 < x < math.inf)
        penalty = 2 * lr**2 * constants.lipschitz**2 * constants.noise / target
        return cls(2 * constants.loss / (lr * target), penalty)

    @classmethod
    def from_measured(cls, measured: Mapping[int, float]) -> Iterations:
        """Return T(S) fitted to measured numbers of batches, by number of stages.

        1 / T is a linear function of S^3. It is fitted by least squares, weighted so that equal relative errors count
        equally.

        Raises:
            InputError: there are fewer than two numbers of stages, or a number of batches is not above 0.
        """
        if len(measured) < 2 or not all(0 < t < math.inf for t in measured.values()):
            raise InputError(
                f"T(S) is fitted to the batches of runs with at least two numbers of stages, got {dict(measured)}"
            )
        cubes = np.array([float(s) ** 3 for s in measured])
        taken = np.array([*measured.values()])
        lines = np.stack([np.ones_like(cubes), -cubes], axis=1) * taken[:, None]  # 1 / T, multiplied by T
        (level, slope), *_ = np.linalg.lstsq(lines, np.ones_like(cubes), rcond=None)
        if slope < 0:  # more stages took fewer batches, so there is no visible penalty
            level, slope = float((1 / taken).mean()), 0.0
        return cls(1 / float(level), float(slope / level))

    @classmethod
    def from_setting(cls, name: str, setting: bool | Mapping[int, float]) -> Iterations | None:
        """Return T(S) from a setting of the user.

        Args:
            name: the name of the setting, for error messages.
            setting: True for no penalty, False for no T(S), or the measured numbers of batches by number of stages.

        Returns:
            T(S), or None if the setting is False.

        Raises:
            InputError: the setting has another type, or contains fewer than two numbers of stages.
        """
        check_type(name, setting, bool | Mapping[int, float])
        if isinstance(setting, bool):
            return cls(1.0, 0.0) if setting else None
        return cls.from_measured(setting)

    def __call__(self, stages: int) -> float:
        """Return the number of batches on `stages` stages; infinite if no number is sufficient."""
        left = 1 - self.penalty * check_count("stages", stages) ** 3
        return self.base / left if left > 0 else math.inf
