"""A random forest as flat arrays: predicts with numpy alone, and is kept in a file that holds nothing but numbers."""

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
"""Of the file; raised when a reader of an older one would misread it."""
MOST_NODES = 50_000_000
PARTS = 4
TRIED_TREES = 16
"""Of cross-validation."""
FEW = 40
"""Rows below which cross-validation says little."""
_AT_ONCE = 4096
"""Rows that go down the trees together: more would not fit into caches."""


class ForestSettings(NamedTuple):
    """Settings of trees, by scikit-learn's names.

    Attributes:
        max_features: the share of columns that a split chooses from.
        min_samples_leaf: rows that a leaf has at least.
    """

    max_features: float
    min_samples_leaf: int


CANDIDATES = tuple(ForestSettings(features, leaf) for leaf in (3, 1) for features in (0.5, 1.0))


@dataclass(frozen=True, eq=False)
class Forest:
    """Trees of which every row goes down one path each; the forest says the mean of their leaves.

    Attributes:
        names: of the columns of a row.
        roots: the first node of every tree.
        children: of every node the one for numbers up to its threshold, and the one for larger ones; axis 0 is nodes. A
            leaf is its own child. Children come after their parents.
        feature: the column that a node looks at.
        threshold: of a node; infinite where only what is missing goes another way.
        missing: which child a row goes to whose number is NaN: 0 or 1.
        value: of every node; those of leaves are predictions.
        low, high: of every column the range that it had in training; NaN where there was nothing.
        gaps: of every column whether it was missing in some row of the training.

    Raises:
        InputError: arrays that make no forest.
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
            raise InputError(f"forest: {len(self.roots)} trees of {nodes} nodes over {columns} columns are none")
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
        """Return the word of each tree on each row: axis 0 is rows, axis 1 trees. As in scikit-learn, numbers of rows
        count in single precision."""
        rows = np.asarray(rows, float)
        if rows.ndim != 2 or rows.shape[1] != len(self.names):
            raise InputError(f"rows need {len(self.names)} columns ({', '.join(self.names)}), got shape {rows.shape}")
        found = np.empty((len(rows), len(self.roots)))
        with np.errstate(over="ignore"):  # infinity compares as well
            single = rows.astype(np.float32)
        for first in range(0, len(rows), _AT_ONCE):
            found[first : first + _AT_ONCE] = self._leaves(single[first : first + _AT_ONCE])
        return found

    def is_familiar(self, rows: Array, margin: float = 0.1) -> npt.NDArray[np.bool_]:
        """Return whether each row lies in the range of the training rows: every number in the range that its column had
        there, widened by the share `margin` of it at both ends, and none missing that never was. Trees say the same
        beyond their data as at the edge of it, so of other rows they know nothing."""
        room = margin * (self.high - self.low)
        inside = (rows >= self.low - room) & (rows <= self.high + room)
        never = np.isnan(self.low)
        return np.asarray((never | inside | (np.isnan(rows) & self.gaps)).all(axis=1))

    def save(self, path: str | Path | BinaryIO) -> None:
        """Write arrays, to be read without running anything in them."""
        data: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "names"}
        with Path(path).open("wb") if isinstance(path, str | Path) else nullcontext(path) as file:
            np.savez_compressed(file, allow_pickle=False, format=np.int64(FORMAT), names=np.array(self.names), **data)

    @classmethod
    def load(cls, path: str | Path | BinaryIO) -> Forest:
        """Read what `save` wrote.

        Raises:
            InputError: there is no such file, or it is not one of these.
        """
        data = arrays_of(path, "a forest")
        if data.get("format") != FORMAT:
            raise InputError(f"{path} is no forest of format {FORMAT}; train another")
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
    """Return the arrays of a file, by name; nothing in them is run. Errors say `what` it should be.

    Raises:
        InputError: there is no such file, or it is none of arrays.
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
    """Return the settings with the least squared error in cross-validation, over parts of consecutive rows.

    Rows that follow each other had the same neighbours, so parts by chance would favour trees that learn by heart.
    Where there are few rows it is the first of CANDIDATES.
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
    """Return the forest of scikit-learn's `trees` (`tree_` of each estimator), trained on `rows`."""
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
    """Return a forest that predicts `values` of `rows`, by scikit-learn; 128 trees as in DynPipe (S V-A), where its
    code has 500, which say the same.

    Args:
        rows: axis 0 is rows, in the order in which they were seen, axis 1 the columns `names`; what is missing is NaN.
        settings: of the trees; by default those that predict best what was left out.

    Raises:
        InputError: scikit-learn is not there, or there are too few rows, or numbers that are not finite.
    """
    if len(rows) < 2 or len(rows) != len(values) or not np.isfinite(values).all() or np.isinf(rows).any():
        raise InputError(f"training needs two rows at least, and finite numbers; got {rows.shape} and {values.shape}")
    settings = settings or select_settings(rows, values, seed)
    fitted = _untrained(trees, settings, seed)
    fitted.fit(rows, values)
    return join_trees(names, [tree.tree_ for tree in fitted.estimators_], rows)
