"""How well slow-downs by neighbours are predicted, and what that is worth to a planner.

Stages of five kinds train on one core of this machine while processes compete with them, of six kinds and several
intensities, and under quotas. The ratio of a step's time to that alone is predicted from what a monitor sees of the
machine, and from the stage. Whole kinds are held out, for a predictor is for neighbours and stages that it has not
seen. The plain formula needs no learning: (run + wait) / run of the computing thread, by Linux's scheduler.
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
from lightning_pipes.planning.replanning import HostedStage
from lightning_pipes.strategies.dynpipe.interference import Predictor
from lightning_pipes.strategies.dynpipe.interference.dataset import NONE, Dataset, PredictionScore, cross_validated
from lightning_pipes.strategies.dynpipe.interference.features import NAMES, STAGE, Array
from lightning_pipes.strategies.dynpipe.interference.forest import Forest
from lightning_pipes.strategies.dynpipe.interference.predictor import CorrectedFormula, Formula, Model, formula_of
from lightning_pipes.tune.interference import collect_windows

# ---- Predictors that the forest is compared with (S V-A): a mean, the formula with a factor, trees, a line, a
# network.


class Constant(Model):
    """The mean of what it has learned."""

    name: ClassVar[str] = "constant"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        self._mean = float(ratios.mean())
        return self

    def predict(self, rows: Array) -> Array:
        return np.full(len(rows), self._mean)


class Scaled(Model):
    """The formula, times one factor that is learned: what caches and the sibling of a core cost everybody."""

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
    """One of scikit-learn's, behind columns that are filled, compressed and scaled."""

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
        # Beyond its data a line leads anywhere; a forest never says more than the most that it has seen.
        return np.asarray(np.exp(np.clip(self._pipe.predict(rows), *self._range)))


class Linear(Learned):
    """Linear regression, with a little shrinking."""

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


# ---- What pipelines lose that are cut by predicted slow-downs, and not by true ones.

DEVICES, BLOCKS, MICROBATCHES = 4, 12, 8
BUSY = 0.5
"""The share of devices that have a neighbour."""
_OF_DEVICE = len(NAMES) - len(STAGE)
_CUTS = [(0, *cut, BLOCKS) for cut in combinations(range(1, BLOCKS), DEVICES - 1)]


@dataclass(frozen=True)
class _Problem:
    """Blocks, each like one of the stages that were measured, on devices with neighbours.

    Attributes:
        alone: seconds of each block.
        blocks: the number of the stage that each is like.
        windows: of each device, of the setting that it is in: axis 0 is stages, axis 1 the two windows.
    """

    alone: Array
    blocks: np.ndarray
    windows: list[np.ndarray]


def regrets(data: Dataset, fitted: Mapping[str, Model | None], problems: int, seed: int = 0) -> dict[str, Array]:
    """For each predictor the share by which a step of the partition that it has chosen is longer than one of the best,
    problem by problem. What is seen is of one window, and the truth is what stages take in the other one.

    All know what the stages take that run now; None takes each device to slow down any stage as much. "never" stays
    with the partition that is even without neighbours. "hindsight" knows what each stage took in the first window:
    what is lost by it is the unrest of the machine.
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
    """The windows of every setting; without neighbours, and with."""
    found: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for number in np.unique(data.settings):
        windows = np.flatnonzero(data.settings == number)
        order = np.lexsort(data.rows[windows, _OF_DEVICE:].T)  # by stage, two each
        found[data.neighbours[windows[0]] == NONE].append(windows[order].reshape(-1, 2))
    return found


def _drawn(chance: np.random.Generator, settings: Mapping[bool, Sequence[np.ndarray]]) -> _Problem:
    windows = []
    for _ in range(DEVICES):
        choice = settings[bool(chance.random() > BUSY)]
        windows.append(choice[int(chance.integers(len(choice)))])
    blocks = chance.integers(len(windows[0]), size=BLOCKS)
    return _Problem(np.exp(0.3 * chance.normal(size=BLOCKS)), blocks, windows)


def _step(times: Array) -> float:
    """Seconds of a batch: one micro-batch goes through all stages, the others follow at the slowest one's pace."""
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
    """Seconds of every stage of every partition: what a stage takes alone, times the measured factor of the stage that
    is on the device now, times the predictor's ratio of the two, where it knows both."""
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
    """The device as seen beside the largest block that it has now, and blocks with the mean of their numbers, which
    are bytes a second."""
    here, windows = slice(now[device], now[device + 1]), problem.windows[device][:, 0]
    largest = problem.blocks[here][int(np.argmax(problem.alone[here]))]
    stage = np.average(
        data.rows[windows[problem.blocks[start:stop]], _OF_DEVICE:], axis=0, weights=problem.alone[start:stop]
    )
    return np.asarray(np.hstack([data.rows[windows[largest], :_OF_DEVICE], stage]))


SPLITS = ("random", "neighbour kind", "stage kind")


def random_parts(data: Dataset) -> Iterator[tuple[str, Dataset, Dataset]]:
    """Five random splits as (name, training set, test set)."""
    part = np.random.default_rng(0).permutation(len(data)) % 5
    for n in range(5):
        yield str(n), data.select_rows(part != n), data.select_rows(part == n)


def scored(data: Dataset) -> dict[str, dict[str, PredictionScore]]:
    """Scores of every model, by how data were split."""
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
    """With kinds of neighbours held out, the share of windows that the forest says it knows, and the mean errors of
    those and of the others."""
    errors, known = [], []
    for _, learned, held in data.without_each(data.neighbours):
        model = CorrectedFormula().fit(learned.rows, learned.ratios)
        errors.append(np.abs(model.predict(held.rows) - held.ratios))
        known.append(model.forest.is_familiar(held.rows))
    error, knows = np.concatenate(errors), np.concatenate(known)
    return {"share": float(knows.mean()), "mae": _mean(error[knows]), "mae of others": _mean(error[~knows])}


def planned(data: Dataset, problems: int) -> dict[str, np.ndarray]:
    """The share of a step that plans lose, beside kinds of neighbours that no predictor has learned from; problem by
    problem, by predictor."""
    kinds = sorted({*data.neighbours.tolist()} - {NONE})
    lost: dict[str, list[np.ndarray]] = {}
    for part in (kinds[::2], kinds[1::2]):
        crossed = data.select_rows(~np.isin(data.neighbours, part)).cross_pairs().sample_rows()
        fitted = {m.name: m().fit(crossed.rows, crossed.ratios) for m in (Trees, CorrectedFormula)}
        held = data.select_rows(np.isin(data.neighbours, [*part, NONE]))
        for name, values in regrets(held, {"measured": None, **fitted}, problems).items():
            lost.setdefault(name, []).append(values)
    return {name: np.concatenate(values) for name, values in lost.items()}


def replan_seconds(predictor: Predictor) -> float:
    """Seconds to ask for all partitions of 16 blocks on 8 devices at once."""
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
    """Print how far the measurement is."""
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
    """Yield all tables, and the headline."""
    low, middle, high = np.quantile(data.ratios, (0.05, 0.5, 0.95))
    kinds = sorted({*data.neighbours.tolist()} - {NONE})
    yield f"{len(data)} windows of {', '.join(sorted({*data.stages.tolist()}))}, beside {', '.join(kinds)}"
    yield f"steps took {middle:.2f} times as long as alone (5 to 95 %: {low:.2f} to {high:.2f})\n"
    scores = scored(data)
    yield "R2 / mean absolute error of the ratio" + "".join(f"{split + ' held out':>28}" for split in SPLITS)
    for model in MODELS:
        cells = (scores[split][model.name] for split in SPLITS)
        yield f"{model.name:37}" + "".join(f"{f'{s.r2:.2f} / {s.mae:.3f}':>28}" for s in cells)
    held = scores["neighbour kind"]
    formula, both = held["formula"], held["formula x forest"]
    plain = [held[name] for name in ("formula", "formula x constant")]
    adds = all(both.r2 > each.r2 and both.mae < each.mae for each in plain)
    better = "better" if adds else "no better"
    yield f"\nbeside kinds of neighbours that it has not seen the forest makes the formula {better}:"
    yield (
        f"R2 {formula.r2:.2f} (times a constant {plain[1].r2:.2f}) to {both.r2:.2f}, "
        f"error {formula.mae:.3f} ({plain[1].mae:.3f}) to {both.mae:.3f}"
    )
    knows = known_share(data)
    yield (
        f"it says that it knows {knows['share']:.0%} of them, with an error of {knows['mae']:.3f}; of the others "
        f"{knows['mae of others']:.3f}"
    )
    regret = planned(data, problems)
    yield "\na step of the partition chosen is longer than of the best, kinds of neighbours held out:"
    names = {
        "never": "never re-planned",
        "measured": "by measured times alone",
        "hindsight": "by what all stages took in other seconds",
    }
    for name, lost in regret.items():
        yield f"  {names.get(name, f'by measured times and {name}'):42}{lost.mean():.1%}"
    saved = regret["measured"] - regret["formula x forest"]
    error = float(saved.std() / len(saved) ** 0.5)
    helps = saved.mean() > 2 * error
    yield f"formula x forest saves {saved.mean():.2%} of a step, give or take {error:.2%}"
    seconds = replan_seconds(data.train_predictor())
    yield f"\npredictions for all 6435 partitions of 16 blocks on 8 devices: {seconds:.2f} s"
    yield (
        f"on this machine a forest tells {'more' if adds else 'no more'} than the formula, and planners "
        f"{'gain by it' if helps else 'gain nothing by it: measured times have in them what it tells'}"
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
