"""The accuracy of predicted slowdowns by neighbors, and the benefit of these predictions for a planner.

Stages of five kinds are trained on one core of this machine while processes of six kinds and several intensities
compete with them, also under CPU quotas. The predicted value is the ratio between the time of a step and its time
without neighbors. The inputs are the monitor's measurements of the machine and properties of the stage. Whole kinds of
neighbors and stages are held out, because a predictor is applied to neighbors and stages that are not in its training
data. The plain formula needs no training: it is (run + wait) / run of the computing thread, from Linux's scheduler.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from benchmarks.harness.report import Output
from lightning_pipes.planning.replanning import NO_NEIGHBOR, HostedStage
from lightning_pipes.strategies.dynpipe.interference import Predictor
from lightning_pipes.strategies.dynpipe.interference.dataset import Dataset, PredictionScore, cross_validated
from lightning_pipes.strategies.dynpipe.interference.features import FEATURE_NAMES, STAGE_FEATURES, Array
from lightning_pipes.strategies.dynpipe.interference.forest import Forest
from lightning_pipes.strategies.dynpipe.interference.predictor import CorrectedFormula, Formula, Model, formula_of
from lightning_pipes.tune.interference import collect_windows

# ---- The predictors that the forest is compared with (S V-A): a mean, the formula with a factor, trees, linear
# regression, and a neural network.


class Constant(Model):
    """Predicts the mean of the training data."""

    name: ClassVar[str] = "constant"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        self._mean = float(ratios.mean())
        return self

    def predict(self, rows: Array) -> Array:
        return np.full(len(rows), self._mean)


class Scaled(Model):
    """The formula multiplied by a constant, which is learned.

    The constant represents the slowdown by shared caches and by the sibling of a core.
    """

    name: ClassVar[str] = "formula x constant"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        self._factor = float(np.exp(np.log(ratios / formula_of(rows)).mean()))
        return self

    def predict(self, rows: Array) -> Array:
        return self._factor * formula_of(rows)


class Trees(Model):
    """A random forest of 128 trees."""

    name: ClassVar[str] = "forest"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        self.forest = Forest(rows, np.log(ratios), seed=seed)
        return self

    def predict(self, rows: Array) -> Array:
        return np.asarray(np.exp(self.forest.predict(rows).mean(axis=1)))


@dataclass
class Learned(Model):
    """An estimator of scikit-learn, after imputation, a logarithm and standardization of the columns."""

    estimator: Any
    name: ClassVar[str] = "learned"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import FunctionTransformer, StandardScaler

        filled = SimpleImputer(keep_empty_features=True)
        self._pipe = make_pipeline(filled, FunctionTransformer(np.log1p), StandardScaler(), self.estimator)
        self._pipe.fit(rows, np.log(ratios))
        self._range = float(np.log(ratios).min()), float(np.log(ratios).max())
        return self

    def predict(self, rows: Array) -> Array:
        # A forest never extrapolates beyond the range of its training data, but a linear model may.
        return np.asarray(np.exp(np.clip(self._pipe.predict(rows), *self._range)))


class Linear(Learned):
    """Ridge regression with a small penalty."""

    name: ClassVar[str] = "linear"

    def __init__(self) -> None:
        from sklearn.linear_model import Ridge

        super().__init__(Ridge(1.0))


class Network(Learned):
    """A small neural network."""

    name: ClassVar[str] = "network"

    def __init__(self) -> None:
        from sklearn.neural_network import MLPRegressor

        super().__init__(
            MLPRegressor(hidden_layer_sizes=(32, 16), alpha=1e-2, max_iter=2000, early_stopping=True, random_state=0)
        )


MODELS: tuple[type[Model], ...] = (Trees, CorrectedFormula, Formula, Scaled, Linear, Network, Constant)


# ---- The time that pipelines lose if they are cut by predicted slowdowns instead of true ones.

DEVICES, BLOCKS, MICROBATCHES = 4, 12, 8
BUSY = 0.5
"""The share of devices that have a neighbor."""
_OF_DEVICE = len(FEATURE_NAMES) - len(STAGE_FEATURES)
_CUTS = [(0, *cut, BLOCKS) for cut in combinations(range(1, BLOCKS), DEVICES - 1)]


@dataclass(frozen=True)
class _Problem:
    """Blocks on devices with neighbors. Each block behaves like one of the measured stages.

    Attributes:
        alone: seconds of each block without neighbors.
        blocks: the number of the measured stage that each block corresponds to.
        windows: for each device, the numbers of the windows of its setting. Axis 0 is stages, and axis 1 is the two
            windows.
    """

    alone: Array
    blocks: np.ndarray
    windows: list[np.ndarray]


def regrets(data: Dataset, fitted: Mapping[str, Model | None], problems: int, seed: int = 0) -> dict[str, Array]:
    """Return the relative increase of a step's time over the best partition, for each predictor and problem.

    Predictors use the first window of each setting. The true times of stages come from the second window.

    All predictors know the times of the current stages. The predictor None assumes that a device slows down all stages
    equally. "never" keeps the partition that is even without neighbors. "hindsight" uses the times of all stages in the
    first window, so its loss is caused by the variation between the two windows.

    Args:
        data: the measured windows.
        fitted: the predictors by name.
        problems: the number of random problems.
        seed: the seed of the problems.
    """
    chance = np.random.default_rng(seed)
    found: dict[str, list[float]] = {name: [] for name in ("never", "hindsight", *fitted)}
    settings = _settings(data)
    for _ in range(problems):
        problem = _drawn(chance, settings)
        before, truth = (np.array([_truth(data, problem, cut, when) for cut in _CUTS]) for when in (0, 1))
        now = int(np.argmin([_step(_alone(problem, cut)) for cut in _CUTS]))
        steps = np.array([_step(times) for times in truth])
        best = steps.min()
        found["never"].append(float(steps[now] / best - 1))
        guesses = {name: _predicted(data, problem, _CUTS[now], before[now], model) for name, model in fitted.items()}
        for name, guessed in {"hindsight": before, **guesses}.items():
            found[name].append(float(steps[int(np.argmin([_step(times) for times in guessed]))] / best - 1))
    return {name: np.array(values) for name, values in found.items()}


def _settings(data: Dataset) -> dict[bool, list[np.ndarray]]:
    """Return the windows of each setting, for settings without neighbors (True) and with neighbors (False)."""
    found: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for number in np.unique(data.settings):
        windows = np.flatnonzero(data.settings == number)
        order = np.lexsort(data.rows[windows, _OF_DEVICE:].T)  # two windows for each stage
        found[data.neighbours[windows[0]] == NO_NEIGHBOR].append(windows[order].reshape(-1, 2))
    return found


def _drawn(chance: np.random.Generator, settings: Mapping[bool, Sequence[np.ndarray]]) -> _Problem:
    windows = []
    for _ in range(DEVICES):
        choice = settings[bool(chance.random() > BUSY)]
        windows.append(choice[int(chance.integers(len(choice)))])
    blocks = chance.integers(len(windows[0]), size=BLOCKS)
    return _Problem(np.exp(0.3 * chance.normal(size=BLOCKS)), blocks, windows)


def _step(times: Array) -> float:
    """Return the seconds of a batch whose micro-batches follow each other at the pace of the slowest stage."""
    return float(times.sum() + (MICROBATCHES - 1) * times.max())


def _alone(problem: _Problem, cut: tuple[int, ...]) -> Array:
    return np.array([problem.alone[a:b].sum() for a, b in pairwise(cut)])


def _truth(data: Dataset, problem: _Problem, cut: tuple[int, ...], when: int) -> Array:
    return np.array(
        [
            (problem.alone[a:b] * data.ratios[problem.windows[device][problem.blocks[a:b], when]]).sum()
            for device, (a, b) in enumerate(pairwise(cut))
        ]
    )


def _predicted(data: Dataset, problem: _Problem, now: tuple[int, ...], measured: Array, model: Model | None) -> Array:
    """Return the predicted seconds of every stage of every partition.

    This is the time of the stage without neighbors, multiplied by the measured slowdown of the stage that is on the
    device now, and by the ratio between the predictions for both stages if the predictor is familiar with both.
    """
    alone = np.array([_alone(problem, cut) for cut in _CUTS])
    factors = measured / _alone(problem, now)
    if model is None:
        return np.asarray(alone * factors)
    pairs = sorted({(d, *pair) for cut in (now, *_CUTS) for d, pair in enumerate(pairwise(cut))})
    rows = np.array([_row(data, problem, now, *pair) for pair in pairs])
    ratios = dict(zip(pairs, zip(model.predict(rows), _known(model, rows), strict=True), strict=True))
    scale = np.ones_like(alone)
    for place, cut in enumerate(_CUTS):
        for device, pair in enumerate(pairwise(cut)):
            new, old = ratios[(device, *pair)], ratios[(device, now[device], now[device + 1])]
            if new[1] and old[1]:
                scale[place, device] = new[0] / old[0]
    return np.asarray(alone * factors * scale)


def _known(model: Model, rows: Array) -> np.ndarray:
    return (
        np.asarray(model.forest.is_familiar(rows))
        if isinstance(model, Trees | CorrectedFormula)
        else np.ones(len(rows), bool)
    )


def _row(data: Dataset, problem: _Problem, now: tuple[int, ...], device: int, start: int, stop: int) -> Array:
    """Return the features of a device and of a stage of several blocks on it.

    The monitor's measurements are those for the largest block that is on the device now. The features of blocks, which
    are rates in bytes per second, are averaged.
    """
    here, windows = slice(now[device], now[device + 1]), problem.windows[device][:, 0]
    largest = problem.blocks[here][int(np.argmax(problem.alone[here]))]
    stage = np.average(
        data.rows[windows[problem.blocks[start:stop]], _OF_DEVICE:], axis=0, weights=problem.alone[start:stop]
    )
    return np.asarray(np.hstack([data.rows[windows[largest], :_OF_DEVICE], stage]))


SPLITS = ("random", "neighbour kind", "stage kind")


def random_parts(data: Dataset) -> Iterator[tuple[str, Dataset, Dataset]]:
    """Yield five random splits as (name, training set, test set)."""
    part = np.random.default_rng(0).permutation(len(data)) % 5
    for n in range(5):
        yield str(n), data.select_rows(part != n), data.select_rows(part == n)


def scored(data: Dataset) -> dict[str, dict[str, PredictionScore]]:
    """Return the scores of every model, by the kind of split."""
    found: dict[str, dict[str, PredictionScore]] = {}
    for split in SPLITS:
        found[split] = {}
        for model in MODELS:
            parts = {
                "random": random_parts(data),
                "neighbour kind": data.without_each(data.neighbours),
                "stage kind": data.without_each(data.stages),
            }[split]
            found[split][model.name], _ = cross_validated(model, parts)
    return found


def known_share(data: Dataset) -> dict[str, float]:
    """Return the share of windows that the forest is familiar with, and the mean errors of these and other windows.

    Kinds of neighbors are held out.
    """
    errors, known = [], []
    for _, learned, held in data.without_each(data.neighbours):
        model = CorrectedFormula().fit(learned.rows, learned.ratios)
        errors.append(np.abs(model.predict(held.rows) - held.ratios))
        known.append(model.forest.is_familiar(held.rows))
    error, knows = np.concatenate(errors), np.concatenate(known)
    return {"share": float(knows.mean()), "mae": _mean(error[knows]), "mae of others": _mean(error[~knows])}


def planned(data: Dataset, problems: int) -> dict[str, np.ndarray]:
    """Return the share of a step that plans lose with each predictor, for each problem.

    The neighbors are of kinds that are not in the predictors' training data.
    """
    kinds = sorted({*data.neighbours.tolist()} - {NO_NEIGHBOR})
    lost: dict[str, list[np.ndarray]] = {}
    for part in (kinds[::2], kinds[1::2]):
        crossed = data.select_rows(~np.isin(data.neighbours, part)).cross_pairs().sample_rows()
        fitted = {m.name: m().fit(crossed.rows, crossed.ratios) for m in (Trees, CorrectedFormula)}
        held = data.select_rows(np.isin(data.neighbours, [*part, NO_NEIGHBOR]))
        for name, values in regrets(held, {"measured": None, **fitted}, problems).items():
            lost.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in lost.items()}


def replan_seconds(predictor: Predictor) -> float:
    """Return the seconds of one call that predicts all partitions of 16 blocks on 8 devices."""
    devices = [{"host.compute_run_share": 0.5, "host.compute_wait_share": n / 16} for n in range(8)]
    rows = [
        (devices[place], HostedStage(b - a, 8, 0.01 * (b - a), 0.02 * (b - a), 1e6 * (b - a), 3e6, 1e6 * a, 1e4))
        for cut in combinations(range(1, 16), 7)
        for place, (a, b) in enumerate(pairwise((0, *cut, 16)))
    ]
    began = time.perf_counter()
    predictor.predict(rows)
    return time.perf_counter() - began


def say(text: str, done: float) -> None:
    """Print the progress of the measurement."""
    print(text, file=sys.stderr, flush=True)


def predictor(few: bool = False, seconds: float = 0.2, problems: int = 200, data: str = "") -> Output:
    """Measure windows, compare predictors on them, and yield the comparison.

    Args:
        few: whether fewer neighbors and stages are measured.
        seconds: the length of a window.
        problems: the number of random problems of a planner.
        data: a file with the windows. They are read if it exists, and otherwise measured and written.
    """
    if data and Path(data).exists():
        windows = Dataset.load(Path(data))
    else:
        windows = Dataset.from_windows(collect_windows(few, seconds, say))
        if data:
            windows.save(Path(data))
    yield from report(windows, problems)


def report(data: Dataset, problems: int) -> Output:
    """Yield all tables and the headline numbers."""
    low, middle, high = np.quantile(data.ratios, (0.05, 0.5, 0.95))
    kinds = sorted({*data.neighbours.tolist()} - {NO_NEIGHBOR})
    yield f"{len(data)} windows of {', '.join(sorted({*data.stages.tolist()}))}, next to {', '.join(kinds)}"
    yield f"steps took {middle:.2f} times as long as without neighbors (5 to 95 %: {low:.2f} to {high:.2f})\n"
    scores = scored(data)
    yield "R2 / mean absolute error of the ratio" + "".join(f"{split + ' held out':>28}" for split in SPLITS)
    for model in MODELS:
        cells = (scores[split][model.name] for split in SPLITS)
        yield f"{model.name:37}" + "".join(f"{f'{s.r2:.2f} / {s.mae:.3f}':>28}" for s in cells)
    held = scores["neighbour kind"]
    formula, both = held["formula"], held["formula x forest"]
    plain = [held[name] for name in ("formula", "formula x constant")]
    adds = all(both.r2 > each.r2 and both.mae < each.mae for each in plain)
    better = "improves" if adds else "does not improve"
    yield f"\nfor kinds of neighbors outside of its training data, the forest {better} the formula:"
    yield (
        f"R2 {formula.r2:.2f} (times a constant {plain[1].r2:.2f}) to {both.r2:.2f}, "
        f"error {formula.mae:.3f} ({plain[1].mae:.3f}) to {both.mae:.3f}"
    )
    knows = known_share(data)
    yield (
        f"it is familiar with {knows['share']:.0%} of them, with an error of {knows['mae']:.3f}; error of the others "
        f"{knows['mae of others']:.3f}"
    )
    regret = planned(data, problems)
    yield "\na step of the chosen partition is longer than a step of the best one by, with kinds of neighbors held out:"
    names = {
        "never": "never re-planned",
        "measured": "by measured times only",
        "hindsight": "by times of all stages in another window",
    }
    for name, lost in regret.items():
        yield f"  {names.get(name, f'by measured times and {name}'):42}{lost.mean():.1%}"
    saved = regret["measured"] - regret["formula x forest"]
    error = float(saved.std() / len(saved) ** 0.5)
    helps = saved.mean() > 2 * error
    yield f"formula x forest saves {saved.mean():.2%} of a step, with a standard error of {error:.2%}"
    seconds = replan_seconds(data.train_predictor())
    yield f"\npredictions for all 6435 partitions of 16 blocks on 8 devices: {seconds:.2f} s"
    yield (
        f"on this machine a forest predicts {'better' if adds else 'no better'} than the formula, and planners "
        f"{'gain by it' if helps else 'gain nothing by it, because measured times contain the same information'}"
    )
    yield {
        "formula_r2": round(formula.r2, 3),
        "forest_r2": round(scores["neighbour kind"]["forest"].r2, 3),
        "both_r2": round(both.r2, 3),
        "regret": round(_mean(regret["formula x forest"]), 4),
        "regret_measured": round(_mean(regret["measured"]), 4),
        "replan_seconds": round(seconds, 3),
        "beats_formula": adds,
        "helps_planners": bool(helps),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")
