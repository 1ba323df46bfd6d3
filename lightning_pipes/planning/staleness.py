"""How many batches stale gradients need, by the number of stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pipes.ir import InputError, check_count, check_fields, check_number, check_type
from lightning_pipes.planning.replanning import GradientSample


@dataclass(frozen=True)
class Constants:
    """The numbers of a model that the theory asks for (DynPipe, S IV-B2).

    Attributes:
        loss: before training, f(w0); the least possible is taken as 0, as in the paper.
        lipschitz: L, by which gradients change at most when weights do.
        noise: xi^2, the mean squared norm of mini-batches' gradients.

    Raises:
        InputError: one is negative or not finite.
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
        """Return the constants by a few iterations.

        Args:
            largest: take the largest ratio of gradients to weights for L, as its definition has it, and not their mean.

        Raises:
            InputError: the weights never moved.
        """
        ratios = [probe.changed / probe.moved for probe in probes if probe.moved > 0]
        if not ratios:
            raise InputError("L is estimated from iterations in which weights move; there were none")
        lipschitz = max(ratios) if largest else sum(ratios) / len(ratios)
        return cls(loss, lipschitz, sum(probe.squared for probe in probes) / len(probes))


@dataclass(frozen=True)
class Iterations:
    """T(S): batches until the squared norm of the gradient is at most some target, on S stages (Theorem 1, E2-E3; the
    term 2 sigma^2 / B is dropped, as in the paper):

        T(S) = 2 f(w0) / (lr (target - 2 lr^2 S^3 L^2 xi^2)) = base / (1 - penalty S^3)

    It has a meaning only while the bracket is positive: no number of batches is enough on more stages. As S is cubed
    it is very sensitive to both constants; `from_measured` takes them from runs that were measured.

    Attributes:
        base: batches without staleness.
        penalty: the share of the bracket that one stage takes.
    """

    base: float
    penalty: float

    def __post_init__(self) -> None:
        check_fields(self)
        check_number("base", self.base, "finite, above 0", lambda x: 0 < x < math.inf)
        check_number("penalty", self.penalty, "finite, not negative", lambda x: 0 <= x < math.inf)

    @classmethod
    def of_theory(cls, constants: Constants, lr: float, target: float) -> Iterations:
        """Compute T(S) from the constants of a model, a learning rate, and the target of the squared gradient norm.

        Raises:
            InputError: a rate or a target that is not above 0.
        """
        for name, value in (("lr", lr), ("target", target)):
            check_number(name, value, "finite, above 0", lambda x: 0 < x < math.inf)
        penalty = 2 * lr**2 * constants.lipschitz**2 * constants.noise / target
        return cls(2 * constants.loss / (lr * target), penalty)

    @classmethod
    def from_measured(cls, measured: Mapping[int, float]) -> Iterations:
        """Fit the curve to measured numbers of batches on some numbers of stages: 1 / T is a line over S^3, the one
        with least squares, weighted so that the same relative error counts the same. `relative_errors` says how well it
        fits.

        Raises:
            InputError: fewer than two numbers of stages, or a number of batches that is not above 0.
        """
        if len(measured) < 2 or not all(0 < t < math.inf for t in measured.values()):
            raise InputError(
                f"T(S) is fitted to the batches of runs on two numbers of stages at least, got {dict(measured)}"
            )
        cubes = np.array([float(s) ** 3 for s in measured])
        taken = np.array([*measured.values()])
        lines = np.stack([np.ones_like(cubes), -cubes], axis=1) * taken[:, None]  # of 1 / T, times T
        (level, slope), *_ = np.linalg.lstsq(lines, np.ones_like(cubes), rcond=None)
        if slope < 0:  # more stages took fewer batches: no penalty can be seen
            level, slope = float((1 / taken).mean()), 0.0
        return cls(1 / float(level), float(slope / level))

    @classmethod
    def from_setting(cls, name: str, setting: bool | Mapping[int, float]) -> Iterations | None:
        """Return T(S) as a setting has it: True for no penalty, batches by number of stages, or False for None.

        Raises:
            InputError: neither; or fewer than two numbers of stages.
        """
        check_type(name, setting, bool | Mapping[int, float])
        if isinstance(setting, bool):
            return cls(1.0, 0.0) if setting else None
        return cls.from_measured(setting)

    def __call__(self, stages: int) -> float:
        """Batches on so many stages; infinite where no number is enough."""
        left = 1 - self.penalty * check_count("stages", stages) ** 3
        return self.base / left if left > 0 else math.inf

    @property
    def most_stages(self) -> float:
        """The number of stages that must not be reached; infinite without a penalty."""
        return self.penalty ** (-1 / 3) if self.penalty else math.inf

    def relative_errors(self, measured: Mapping[int, float]) -> dict[int, float]:
        """Return the relative error of T by number of stages."""
        return {stages: self(stages) / took - 1 for stages, took in measured.items()}
