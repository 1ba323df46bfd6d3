"""Stages beside neighbours, as they were measured: what a forest learns from, and how predictors are compared.

DynPipe trains on a set of its own, each task alone and beside others (S V-A), and scores on a random part of it. Rows
of one neighbour resemble each other, so whole kinds of neighbours, and whole kinds of stages, have to be held out here:
a predictor is for those that it has not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import InputError, short_repr
from lightning_pipes.planning.replanning import HostedStage
from lightning_pipes.strategies.dynpipe.interference.features import NAMES, STAGE, Array, feature_table
from lightning_pipes.strategies.dynpipe.interference.forest import arrays_of
from lightning_pipes.strategies.dynpipe.interference.predictor import Model

NONE = "none"
"""The kind of no neighbour: others of the machine may be there anyway. It is in every training."""
FOLDS = 5
LEARNED = 3000
"""Rows at most that a forest for planners learns from: more take longer, and say the same."""
_DEVICE_COLUMNS = len(NAMES) - len(STAGE)


class PredictionScore(NamedTuple):
    """Errors of predicted ratios against measured ones: the share of their variance that is explained, 1 at best and
    below 0 for what is worse than their mean; and the mean of the absolute error."""

    r2: float
    mae: float


@dataclass(frozen=True, eq=False)
class Dataset:
    """Windows of time in which a stage ran beside neighbours.

    Attributes:
        rows: axis 0 is windows, axis 1 the columns `features.NAMES`.
        ratios: seconds of a step over those of one alone.
        neighbours, stages: the kinds, by name.
        settings: numbers of what was beside: windows with the same number had the same neighbours, one after another.

    Raises:
        InputError: different lengths, no rows, or ratios that are none.
    """

    rows: Array
    ratios: Array
    neighbours: npt.NDArray[np.str_]
    stages: npt.NDArray[np.str_]
    settings: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        lengths = {len(each) for each in vars(self).values()}
        if len(lengths) != 1 or self.rows.ndim != 2 or self.rows.shape[1] != len(NAMES) or not len(self.rows):
            raise InputError(f"a dataset needs {len(NAMES)} columns, and all else once a row; got {self.rows.shape}")
        if not (np.isfinite(self.ratios) & (self.ratios > 0)).all():
            raise InputError("ratios of a dataset must be above 0 and finite")

    @classmethod
    def from_windows(cls, windows: Iterable[tuple[Mapping[str, float], HostedStage, float, str, str, int]]) -> Self:
        """Return windows as arrays.

        Args:
            windows: metrics of the monitor, the stage, the ratio, the kinds of neighbour and stage, and the setting.
        """
        seen, hostings, ratios, neighbours, stages, settings = zip(*windows, strict=True)
        rows = feature_table(list(zip(seen, hostings, strict=True)))
        return cls(rows, np.array(ratios), np.array(neighbours), np.array(stages), np.array(settings))

    def __len__(self) -> int:
        return len(self.ratios)

    def select_rows(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Dataset:
        """Return some of its windows."""
        return Dataset(*(each[index] for each in vars(self).values()))

    def cross_pairs(self) -> Dataset:
        """Return the questions of planners: a device as it was seen while one stage ran there, another stage, and the
        ratio of that one beside the same neighbours; every pair of windows of a setting."""
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

    def sample_rows(self, most: int = LEARNED) -> Dataset:
        """Return so many of its windows, by chance; seeded, in their order."""
        return self.select_rows(np.sort(np.random.default_rng(0).permutation(len(self))[:most]))

    def random_parts(self, seed: int = 0) -> Iterator[tuple[str, Dataset, Dataset]]:
        """Parts by chance: (name, to learn from, to score on), five times."""
        part = np.random.default_rng(seed).permutation(len(self)) % FOLDS
        for n in range(FOLDS):
            yield str(n), self.select_rows(part != n), self.select_rows(part == n)

    def without_each(self, kinds: npt.NDArray[np.str_]) -> Iterator[tuple[str, Dataset, Dataset]]:
        """For each of the kinds (`neighbours` or `stages`) all other windows, and its own."""
        for kind in sorted({*kinds.tolist()} - {NONE}):
            yield kind, self.select_rows(kinds != kind), self.select_rows(kinds == kind)

    def save(self, path: str | Path) -> None:
        """Write arrays."""
        with Path(path).open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, names=np.array(NAMES), **vars(self))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            InputError: there is no such file, or it is not one of these.
        """
        data = arrays_of(path, "a dataset")
        try:
            if tuple(data.pop("names")) != NAMES:
                raise InputError(f"{path} has other columns than this version; measure again")
            return cls(**data)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{short_repr(str(path))} can't be read as a dataset: {error}") from error


def score_predictions(truth: Array, predicted: Array) -> PredictionScore:
    """How good predictions are."""
    variance = float(((truth - truth.mean()) ** 2).sum())
    r2 = 1 - float(((truth - predicted) ** 2).sum()) / variance if variance else float("nan")
    return PredictionScore(r2, float(np.abs(truth - predicted).mean()))


def cross_validated(
    model: type[Model], parts: Iterator[tuple[str, Dataset, Dataset]]
) -> tuple[PredictionScore, dict[str, PredictionScore]]:
    """Return the cross-validated score of a model over all parts; and of each part."""
    truths, guesses, each = [], [], {}
    for name, learned, scored in parts:
        guess = model().fit(learned.rows, learned.ratios).predict(scored.rows)
        each[name] = score_predictions(scored.ratios, guess)
        truths.append(scored.ratios)
        guesses.append(guess)
    return score_predictions(np.concatenate(truths), np.concatenate(guesses)), each
