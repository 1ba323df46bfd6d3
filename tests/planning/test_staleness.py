import math

import numpy as np
import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.planning.staleness import Constants, GradientSample, Iterations


def probes(seed: int, steps: int = 6) -> tuple[list[GradientSample], float]:
    """Return samples of gradient descent on 0.5 w' A w, and the largest eigenvalue of A.

    Every mini-batch has different noise.
    """
    rng = np.random.default_rng(seed)
    values = rng.uniform(0.5, 4.0, 5)
    w, found = rng.normal(size=5), []
    for _ in range(steps):
        own = values * w + 0.1 * rng.normal(size=5)
        new = w - 0.05 * own
        changed = float(np.linalg.norm(values * new - values * w))  # on the same probe, without noise
        found.append(GradientSample(float(np.linalg.norm(new - w)), changed, float(own @ own)))
        w = new
    return found, float(values.max())


def test_constants_of_a_quadratic() -> None:
    found, largest = probes(0)
    mean, most = (Constants.from_probes(1.0, found, largest=flag) for flag in (False, True))
    assert 0.5 <= mean.lipschitz <= most.lipschitz <= largest
    assert mean.noise == most.noise == pytest.approx(np.mean([probe.squared for probe in found]))
    with pytest.raises(InputError, match="weights change"):
        Constants.from_probes(1.0, [GradientSample(0.0, 1.0, 1.0)])


def test_the_formula() -> None:
    """Check T = 2 f0 / (lr (target - 2 lr^2 S^3 L^2 xi^2))."""
    constants, lr, target = Constants(3.0, 2.0, 5.0), 0.01, 0.5
    made = Iterations.of_theory(constants, lr, target)
    for stages in (1, 2, 4):
        bracket = target - 2 * lr**2 * stages**3 * 2.0**2 * 5.0
        assert made(stages) == pytest.approx(2 * 3.0 / (lr * bracket))
    most = (target / (2 * lr**2 * 4 * 5)) ** (1 / 3)  # stages
    assert math.isfinite(made(int(most)))
    assert made(int(most) + 1) == math.inf


def test_without_noise_any_staleness_is_free() -> None:
    made = Iterations.of_theory(Constants(1.0, 2.0, 0.0), 0.1, 1.0)
    assert made(1) == made(1000) == 20


def test_it_is_fitted_to_what_runs_took() -> None:
    true = Iterations(1000.0, 1e-3)
    measured = {stages: true(stages) for stages in (1, 2, 4, 8)}
    made = Iterations.from_measured(measured)
    assert (made.base, made.penalty) == (pytest.approx(1000), pytest.approx(1e-3))
    assert [made(stages) for stages in measured] == pytest.approx([*measured.values()])
    noisy = {stages: took * (1.05 if stages in (2, 8) else 0.95) for stages, took in measured.items()}
    fitted = Iterations.from_measured(noisy)
    assert [fitted(stages) for stages in noisy] == pytest.approx([*noisy.values()], rel=0.1)
    assert Iterations.from_measured({1: 100.0, 8: 90.0}).penalty == 0
    with pytest.raises(InputError, match="two numbers of stages"):
        Iterations.from_measured({4: 100.0})
