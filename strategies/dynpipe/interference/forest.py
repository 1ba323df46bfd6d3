"""A random forest as flat arrays. It predicts with numpy alone, and its file contains only numbers and names."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import InputError, short_repr

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]
FORMAT = 1
"""The version of the file format. It is increased when readers of an older version would misread the file."""
MOST_NODES = 50_000_000
"""The maximum number of nodes of a forest."""
PARTS = 4
"""The number of parts in cross-validation."""
TRIED_TREES = 16
"""The number of trees in cross-validation."""
FEW = 40
"""The number of rows below which cross-validation is not informative."""
_AT_ONCE = 4096
"""The number of rows that are predicted together. More rows would not fit into caches."""


class ForestSettings(NamedTuple):
    """Settings of trees, named as in scikit-learn.

    Attributes:
        max_features: the share of columns among which a split chooses.
        min_samples_leaf: the minimum number of rows in a leaf.
    """

    max_features: float
    min_samples_leaf: int


CANDIDATES = tuple(ForestSettings(features, leaf) for leaf in (3, 1) for features in (0.5, 1.0))


@dataclass(frozen=True, eq=False)
class Forest:
    """Regression trees. The prediction of the forest is the mean of the leaves that a row reaches, one in each tree.

    Attributes:
        names: the names of the columns of a row.
        roots: the first node of every tree.
        children: the children of every node: for values up to its threshold, and for larger values. Axis 0 is nodes. A
            leaf is its own child. Children come after their parents.
        feature: the column that a node compares.
        threshold: the threshold of every node. It is infinite if only missing values take the other branch.
        missing: the child to which a node sends a row whose value is NaN: 0 or 1.
        value: the value of every node. The values of leaves are predictions.
        low, high: the range of every column in training, or NaN if all of its values were missing.
        gaps: whether the value of a column was missing in a row of the training data.

    Raises:
        InputError: the arrays do not form a forest.
    """

    names: tuple[str, ...]
    roots: Integers
    children: Integers
    feature: Integers
    threshold: Array
    missing: Integers
    value: Array
    low: Array
    high: Array
    gaps: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        columns, nodes = len(self.names), len(self.value)
        shapes = {
            "roots": (len(self.roots),),
            "children": (nodes, 2),
            **dict.fromkeys(("feature", "threshold", "missing", "value"), (nodes,)),
            **dict.fromkeys(("low", "high", "gaps"), (columns,)),
        }
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise InputError(f"forest: {name} has shape {getattr(self, name).shape}, and should have {shape}")
        if not columns or not nodes or not len(self.roots) or nodes > MOST_NODES:
            raise InputError(
                f"a forest can't have {len(self.roots)} trees with {nodes} nodes in total, and {columns} columns. It "
                f"needs at least one of each, and at most {MOST_NODES} nodes"
            )
        own = np.arange(nodes)
        leaf = (self.children == own[:, None]).all(axis=1)
        down = (self.children > own[:, None]).all(axis=1) & (self.children < nodes).all(axis=1)
        ends = np.append(self.roots[1:], nodes)
        tree = np.searchsorted(self.roots, own, side="right") - 1
        checks = {
            "a node is neither a leaf nor above its children": bool((leaf | down).all()),
            "roots do not ascend from node 0": self.roots[0] == 0 and bool((self.roots < ends).all()),
            "a node has children in another tree": bool((self.children < ends[tree][:, None]).all()),
            "a node looks at a column that is not there": bool(((self.feature >= 0) & (self.feature < columns)).all()),
            "a threshold is NaN, or a value is not finite": not np.isnan(self.threshold).any()
            and bool(np.isfinite(self.value).all()),
            "missing is neither 0 nor 1": bool(np.isin(self.missing, (0, 1)).all()),
        }
        for what, right in checks.items():
            if not right:
                raise InputError(f"forest: {what}")

    def predict(self, rows: Array) -> Array:
        """Return the prediction of each tree for each row. Axis 0 is rows, and axis 1 is trees.

        As in scikit-learn, the values of rows are compared in single precision.

        Raises:
            InputError: the rows have another number of columns.
        """
        rows = np.asarray(rows, float)
        if rows.ndim != 2 or rows.shape[1] != len(self.names):
            raise InputError(f"rows need {len(self.names)} columns ({', '.join(self.names)}), got shape {rows.shape}")
        found = np.empty((len(rows), len(self.roots)))
        with np.errstate(over="ignore"):  # infinity is compared correctly
            single = rows.astype(np.float32)
        for first in range(0, len(rows), _AT_ONCE):
            found[first : first + _AT_ONCE] = self._leaves(single[first : first + _AT_ONCE])
        return found

    def is_familiar(self, rows: Array, margin: float = 0.1) -> npt.NDArray[np.bool_]:
        """Return whether each row lies within the range of the training rows.

        Every value has to be in the range of its column in training, widened by the share `margin` at both ends. A
        value may be missing only if it was missing in a training row, too. A column that was always missing in training
        is not checked. Beyond the training data, trees make the same prediction as at its edge, so they are not
        reliable for other rows.
        """
        room = margin * (self.high - self.low)
        inside = (rows >= self.low - room) & (rows <= self.high + room)
        never = np.isnan(self.low)
        return np.asarray((never | inside | (np.isnan(rows) & self.gaps)).all(axis=1))

    def save(self, path: str | Path | BinaryIO) -> None:
        """Write the arrays to a file that can be read without running code from it."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "names"}
        with Path(path).open("wb") if isinstance(path, str | Path) else nullcontext(path) as file:
            np.savez_compressed(file, allow_pickle=False, format=np.int64(FORMAT), names=np.array(self.names), **data)

    @classmethod
    def load(cls, path: str | Path | BinaryIO) -> Forest:
        """Read a file that `save` wrote.

        Raises:
            InputError: the file does not exist, or it is not a forest of this version.
        """
        data = arrays_of(path, "a forest")
        if data.get("format") != FORMAT:
            raise InputError(f"{path} is not a forest of format {FORMAT}. Train another forest with this version")
        wanted = {f.name for f in fields(cls)} | {"format"}
        if data.keys() != wanted:
            raise InputError(f"{path} has {', '.join(sorted(data.keys() ^ wanted))}, or lacks it; train another forest")
        return cls(names=_names(data["names"], path), **{k: _typed(k, data[k], path) for k in _KINDS})

    def _leaves(self, rows: npt.NDArray[np.float32]) -> Array:
        trees = len(self.roots)
        at = np.tile(self.roots, len(rows))
        row = np.repeat(np.arange(len(rows)), trees)
        children, going = self.children, np.arange(len(at))
        while len(going):
            here = at[going]
            number = rows[row[going], self.feature[here]]
            side = np.where(np.isnan(number), self.missing[here], number > self.threshold[here])
            there = children[here, side.astype(np.intp)]
            at[going] = there
            going = going[there != here]
        return self.value[at].reshape(len(rows), trees)


_KINDS = {
    **dict.fromkeys(("roots", "children", "feature", "missing"), np.int32),
    **dict.fromkeys(("threshold", "value", "low", "high"), np.float64),
    "gaps": np.bool_,
}


def arrays_of(path: str | Path | BinaryIO, what: str) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a file by name, without running code from it.

    Args:
        path: the file.
        what: the expected content, for error messages.

    Raises:
        InputError: the file does not exist, or it does not contain arrays.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise InputError(f"{short_repr(str(path))} can't be read as {what}: {error}") from error


def _names(found: npt.NDArray[Any], path: str | Path | BinaryIO) -> tuple[str, ...]:
    if found.dtype.kind != "U" or found.ndim != 1:
        raise InputError(f"{path}: names of columns are texts, got {found.dtype}")
    return tuple(map(str, found))


def _typed(name: str, found: npt.NDArray[Any], path: str | Path | BinaryIO) -> npt.NDArray[Any]:
    if found.dtype != _KINDS[name]:
        raise InputError(f"{path}: {name} holds {found.dtype}, and should hold {np.dtype(_KINDS[name])}")
    return found


def _untrained(trees: int, settings: ForestSettings, seed: int) -> Any:
    try:
        from sklearn.ensemble import RandomForestRegressor
    except ImportError as error:
        raise InputError(f"training a forest needs scikit-learn: {error}; pip install scikit-learn") from error
    features, leaf = settings
    return RandomForestRegressor(trees, max_features=features, min_samples_leaf=leaf, random_state=seed, n_jobs=1)


def select_settings(rows: Array, values: Array, seed: int = 0) -> ForestSettings:
    """Return the settings with the lowest squared error in cross-validation over parts of consecutive rows.

    Consecutive rows had the same neighbors, so random parts would favor trees that overfit. If there are fewer than
    `FEW` rows, the first of `CANDIDATES` is returned.
    """
    if len(rows) < FEW:
        return CANDIDATES[0]
    part = np.arange(len(rows)) * PARTS // len(rows)

    def cross_validate(settings: ForestSettings) -> float:
        total = 0.0
        for n in range(PARTS):
            fitted = _untrained(TRIED_TREES, settings, seed)
            fitted.fit(rows[part != n], values[part != n])
            total += float(((fitted.predict(rows[part == n]) - values[part == n]) ** 2).sum())
        return total

    return min(CANDIDATES, key=cross_validate)


def join_trees(names: Sequence[str], trees: Sequence[Any], rows: Array) -> Forest:
    """Return the forest of scikit-learn's `trees` (the `tree_` of each estimator), which were trained on `rows`."""
    sizes = [tree.node_count for tree in trees]
    roots = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
    children, missing = [], []
    for root, tree in zip(roots, trees, strict=True):
        own = np.arange(tree.node_count)
        pair = np.stack([tree.children_left, tree.children_right], axis=1)
        children.append(root + np.where(pair < 0, own[:, None], pair))
        missing.append(1 - tree.missing_go_to_left.astype(np.int32))
    features = np.concatenate([tree.feature for tree in trees])
    leaf = features < 0
    there = ~np.isnan(rows)
    any_there = there.any(axis=0)
    return Forest(
        tuple(names),
        roots,
        np.concatenate(children).astype(np.int32),
        np.where(leaf, 0, features).astype(np.int32),
        np.where(leaf, 0.0, np.concatenate([tree.threshold for tree in trees])),
        np.concatenate(missing).astype(np.int32),
        np.concatenate([tree.value[:, 0, 0] for tree in trees]).astype(float),
        np.where(any_there, np.where(there, rows, np.inf).min(axis=0), np.nan),
        np.where(any_there, np.where(there, rows, -np.inf).max(axis=0), np.nan),
        np.asarray(~there.all(axis=0)),
    )


def train(
    rows: Array,
    values: Array,
    names: Sequence[str],
    trees: int = 128,
    seed: int = 0,
    settings: ForestSettings | None = None,
) -> Forest:
    """Return a forest that predicts `values` of `rows`, trained by scikit-learn.

    It has 128 trees, as in DynPipe (S V-A). The code of DynPipe has 500 trees, which make the same predictions.

    Args:
        rows: the training rows. Axis 0 is rows, in the order in which they were observed, and axis 1 is the columns
            `names`. Missing values are NaN.
        values: the value of each row.
        names: the names of the columns.
        trees: the number of trees.
        seed: the seed of the random numbers.
        settings: the settings of the trees. By default, the settings with the best predictions in cross-validation.

    Raises:
        InputError: scikit-learn is not installed, there are too few rows, or some numbers are not finite.
    """
    if len(rows) < 2 or len(rows) != len(values) or not np.isfinite(values).all() or np.isinf(rows).any():
        raise InputError(f"training needs two rows at least, and finite numbers; got {rows.shape} and {values.shape}")
    settings = settings or select_settings(rows, values, seed)
    fitted = _untrained(trees, settings, seed)
    fitted.fit(rows, values)
    return join_trees(names, [tree.tree_ for tree in fitted.estimators_], rows)
