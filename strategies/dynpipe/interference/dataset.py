"""Measurements of stages next to neighbors, on which forests are trained and predictors are compared.

Neighbors are other programs on the same device. DynPipe trains on its own set of tasks, each of which ran alone and
next to others (S V-A), and evaluates on a random part of it. Rows with the same neighbor resemble each other. A
predictor is needed for neighbors and stages that it was not trained on, so whole kinds of neighbors and whole kinds of
stages have to be held out here.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import InputError, short_repr
from lightning_pipes.planning.replanning import NO_NEIGHBOR, HostedStage
from lightning_pipes.strategies.dynpipe.interference.features import FEATURE_NAMES, STAGE_FEATURES, Array, feature_table
from lightning_pipes.strategies.dynpipe.interference.predictor import CorrectedFormula, Model, Predictor

MAX_TRAINING_ROWS = 3000
"""The maximum number of rows on which a forest for planners is trained. More rows take longer, with equal results."""
_DEVICE_COLUMNS = len(FEATURE_NAMES) - len(STAGE_FEATURES)


class PredictionScore(NamedTuple):
    """Errors of predicted ratios compared with measured ratios.

    Attributes:
        r2: the share of the variance that is explained. It is 1 at best, and below 0 if the predictions are worse than
            the mean.
        mae: the mean absolute error.
    """

    r2: float
    mae: float


@dataclass(frozen=True, eq=False)
class Dataset:
    """Windows of time in which a stage ran next to neighbors.

    Attributes:
        rows: the features. Axis 0 is windows, and axis 1 is the columns `features.FEATURE_NAMES`.
        ratios: the seconds of a step divided by the seconds of a step without neighbors.
        neighbours, stages: the names of the kinds of neighbor and stage.
        settings: the numbers of the settings. Windows with the same number had the same neighbors, one after another.

    Raises:
        InputError: the arrays have different lengths or no rows, or a ratio is not positive and finite.
    """

    rows: Array
    ratios: Array
    neighbours: npt.NDArray[np.str_]
    stages: npt.NDArray[np.str_]
    settings: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        lengths = {len(each) for each in vars(self).values()}
        if len(lengths) != 1 or self.rows.ndim != 2 or self.rows.shape[1] != len(FEATURE_NAMES) or not len(self.rows):
            raise InputError(
                f"a dataset needs {len(FEATURE_NAMES)} columns, and one entry of every other field for each row; got "
                f"rows of shape {self.rows.shape}"
            )
        if not (np.isfinite(self.ratios) & (self.ratios > 0)).all():
            raise InputError("ratios of a dataset must be above 0 and finite")

    @classmethod
    def from_windows(cls, windows: Iterable[tuple[Mapping[str, float], HostedStage, float, str, str, int]]) -> Self:
        """Return a dataset of these windows.

        Args:
            windows: for each window, the metrics of the monitor, the stage, the ratio, the kinds of neighbor and stage,
                and the number of the setting.
        """
        seen, hostings, ratios, neighbours, stages, settings = zip(*windows, strict=True)
        rows = feature_table(list(zip(seen, hostings, strict=True)))
        return cls(rows, np.array(ratios), np.array(neighbours), np.array(stages), np.array(settings))

    def __len__(self) -> int:
        return len(self.ratios)

    def select_rows(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Dataset:
        """Return the dataset with some of the windows."""
        return Dataset(*(each[index] for each in vars(self).values()))

    def cross_pairs(self) -> Dataset:
        """Return the questions that planners ask, for every pair of windows of the same setting.

        A row combines the metrics of a device while one stage ran there with another stage. The ratio is the ratio of
        the other stage next to the same neighbors.
        """
        pairs = [
            (i, j)
            for setting in np.unique(self.settings)
            for i in np.flatnonzero(self.settings == setting)
            for j in np.flatnonzero(self.settings == setting)
        ]
        seen, asked = np.array(pairs).T
        rows = np.hstack([self.rows[seen, :_DEVICE_COLUMNS], self.rows[asked, _DEVICE_COLUMNS:]])
        labels = (self.ratios, self.neighbours, self.stages, self.settings)
        return Dataset(rows, *(each[asked] for each in labels))

    def sample_rows(self, most: int = MAX_TRAINING_ROWS) -> Dataset:
        """Return a random sample of at most `most` windows in their original order. The sample is seeded."""
        return self.select_rows(np.sort(np.random.default_rng(0).permutation(len(self))[:most]))

    def train_predictor(self) -> Predictor:
        """Return the predictor of planners, trained on pairs of windows."""
        pairs = self.cross_pairs().sample_rows()
        return Predictor(CorrectedFormula().fit(pairs.rows, pairs.ratios).forest)

    def without_each(self, kinds: npt.NDArray[np.str_]) -> Iterator[tuple[str, Dataset, Dataset]]:
        """Yield a split for each kind as (name, all other windows, windows of this kind).

        Args:
            kinds: the kind of each window, which is `neighbours` or `stages`.
        """
        for kind in sorted({*kinds.tolist()} - {NO_NEIGHBOR}):  # every training set has it
            yield kind, self.select_rows(kinds != kind), self.select_rows(kinds == kind)

    def save(self, path: str | Path) -> None:
        """Write the arrays to a file."""
        with Path(path).open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, names=np.array(FEATURE_NAMES), **vars(self))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote.

        Raises:
            InputError: the file does not exist, or it is not a dataset of this version.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                data = {name: file[name] for name in file.files}
            if tuple(data.pop("names")) == FEATURE_NAMES:
                return cls(**data)
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{short_repr(str(path))} can't be read as a dataset: {error}. Pass a file that "
                "`lightning-pipes interference` of this version wrote"
            ) from error
        raise InputError(
            f"the columns of {path} differ from the columns of this version; measure again with `lightning-pipes "
            "interference`"
        )


def score_predictions(truth: Array, predicted: Array) -> PredictionScore:
    """Return the errors of predictions compared with the true values."""
    variance = float(((truth - truth.mean()) ** 2).sum())
    r2 = 1 - float(((truth - predicted) ** 2).sum()) / variance if variance else float("nan")
    return PredictionScore(r2, float(np.abs(truth - predicted).mean()))


def cross_validated(
    model: type[Model], parts: Iterator[tuple[str, Dataset, Dataset]]
) -> tuple[PredictionScore, dict[str, PredictionScore]]:
    """Return the score of a model over the test sets of all parts together, and the score of each part."""
    truths, guesses, each = [], [], {}
    for name, learned, scored in parts:
        guess = model().fit(learned.rows, learned.ratios).predict(scored.rows)
        each[name] = score_predictions(scored.ratios, guess)
        truths.append(scored.ratios)
        guesses.append(guess)
    return score_predictions(np.concatenate(truths), np.concatenate(guesses)), each
