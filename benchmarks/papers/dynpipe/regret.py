"""What pipelines lose that are cut by predicted slow-downs, and not by true ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from lightning_pipes.strategies.dynpipe.interference.dataset import NONE, Dataset
from lightning_pipes.strategies.dynpipe.interference.features import NAMES, STAGE, Array
from lightning_pipes.strategies.dynpipe.interference.models import Corrected, Model, Trees

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
    return np.asarray(model.forest.known(rows)) if isinstance(model, Trees | Corrected) else np.ones(len(rows), bool)


def _row(data: Dataset, problem: _Problem, now: tuple[int, ...], device: int, start: int, stop: int) -> Array:
    """The device as seen beside the largest block that it has now, and blocks with the mean of their numbers, which
    are bytes a second."""
    here, windows = slice(now[device], now[device + 1]), problem.windows[device][:, 0]
    largest = problem.blocks[here][int(np.argmax(problem.alone[here]))]
    stage = np.average(
        data.rows[windows[problem.blocks[start:stop]], _OF_DEVICE:], axis=0, weights=problem.alone[start:stop]
    )
    return np.asarray(np.hstack([data.rows[windows[largest], :_OF_DEVICE], stage]))
