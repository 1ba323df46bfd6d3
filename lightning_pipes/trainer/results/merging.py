"""Merging of the values that micro-batches give one variable into the value that the whole batch would give it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from lightning_pipes.engine.trees import make_named

Path = tuple[tuple[str, Any], ...]
_RELATIVE_TOLERANCE = 1e-4
"""The relative difference of values that are considered close."""
SUM, TOTAL = "sum", "total"
"""Names of two kinds of sums.

The first continues from its value before the batch, and the second starts at zero in each batch.
"""


def format_path(path: Path) -> str:
    """Return the path as the user would write it. [*] denotes any entry of a list."""
    kinds = {".": ".{}", "[": "[{!r}]", "*": "[*]"}
    return "self" + "".join(kinds[kind].format(key) for kind, key in path)


class ValueMerger:
    """Merges values of micro-batches.

    Equal values stay as they are, numbers become their mean over samples, lists grow by one merged entry, and tensors
    and lists with an entry for each sample are concatenated. If the value of a whole batch is known, it determines
    whether the result is a mean, a sum, the largest or the smallest value, and a warning reports values that are none
    of these.

    Args:
        owner: the name of the module's class, for messages.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._how: dict[Path, str] = {}
        self._by_sample: dict[Path, bool] = {}
        """Whether lists and tuples grow by an entry for each sample, as found in comparisons with whole batches."""
        self._warned: set[Path] = set()
        self._compared: set[Path] = set()
        self._guessed: set[Path] = set()
        self.restore_order: Callable[[Any], Any] | None = None
        """Returns the entries of the samples of a batch in the order in which the samples were loaded."""
        self.ambiguous: set[Path] = set()
        """Sums for which no batch has shown yet whether they start at zero in each batch."""
        self.is_exact = True
        """Whether the whole batch was computed without random numbers, or with those of its micro-batches."""

    def merge(self, path: Path, before: Any, values: Sequence[Any], rows: Sequence[int], whole: Any) -> Any:
        """Return the merged value.

        Args:
            path: the path of the variable.
            before: the value with which each micro-batch began.
            values: the value of each micro-batch.
            rows: the number of samples of each micro-batch.
            whole: the value of the whole batch; None if it is not known.
        """
        first = values[0]
        if first is before and all(map(is_, values, [first] * len(values))):
            return first
        kinds = {type(value) for value in values}
        if len(kinds) == 1 and isinstance(first, (dict, set, list, tuple)):
            if isinstance(first, set):
                return set().union(*values)
            if isinstance(first, dict):
                return self._dicts(path, before, values, rows, whole)
            return self._lists(path, before, values, rows, whole)
        return self._leaves(path, before, values, rows, whole)

    def _dicts(self, path: Path, before: Any, values: Sequence[Any], rows: Sequence[int], whole: Any) -> Any:
        merged: dict[Any, Any] = {}
        for key in dict.fromkeys(key for value in values for key in value):
            there = [(value[key], n) for value, n in zip(values, rows, strict=True) if key in value]
            if len(there) < len(values) and isinstance(before, dict) and key in before:
                continue  # some micro-batches have removed it
            expected = whole.get(key) if isinstance(whole, dict) else None
            earlier = before.get(key) if isinstance(before, dict) else None
            found, counts = [value for value, _ in there], [n for _, n in there]
            merged[key] = self.merge((*path, (".", key)), earlier, found, counts, expected)
        return merged

    def _lists(self, path: Path, before: Any, values: Sequence[Any], rows: Sequence[int], whole: Any) -> Any:
        kept = list(before) if isinstance(before, (list, tuple)) else []
        if not all(len(value) >= len(kept) and all(map(is_, value, kept)) for value in values):
            has_grown = (*path, ("*", None)) in self._how  # a full deque, or a list that is cleared and refilled
            if not has_grown and all(len(value) == len(kept) for value in values):
                return self._rewritten(path, kept, values, rows, whole)
            kept = []
        start = len(kept)
        tails = [value[start:] for value in values]
        expected = whole[start:] if isinstance(whole, (list, tuple)) else None
        lengths = [len(tail) for tail in tails]
        if expected is not None and len(values) > 1 and any(lengths):
            self._by_sample[path] = len(expected) == sum(lengths) and len(expected) != lengths[0]
        per_sample = self._by_sample.get(
            path, lengths == list(rows) and any(n > 1 for n in rows) and not _are_columns(tails, rows)
        )
        if per_sample or len(set(lengths)) > 1:
            merged = [entry for tail in tails for entry in tail]
            if self.restore_order is not None and lengths == list(rows):
                merged = self.restore_order(merged)
        else:
            columns = list(zip(*tails, strict=True))
            known = expected if expected is not None and len(expected) == len(columns) else [None] * len(columns)
            is_record = isinstance(values[0], tuple) and not kept  # each position of a tuple has its own meaning
            merged = [
                self.merge((*path, ("[", n) if is_record else ("*", None)), None, list(column), rows, entry)
                for n, (column, entry) in enumerate(zip(columns, known, strict=True))
            ]
        made = [*kept, *merged]
        return made if isinstance(values[0], list) else _as_tuple(values[0], made)

    def _rewritten(self, path: Path, before: list[Any], values: Sequence[Any], rows: Sequence[int], whole: Any) -> Any:
        """Return the merged entries of a list of unchanged length."""
        expected = whole if isinstance(whole, (list, tuple)) and len(whole) == len(before) else [None] * len(before)
        entries = [
            self.merge((*path, ("[", n)), earlier, column, rows, known)
            for n, (earlier, column, known) in enumerate(zip(before, zip(*values, strict=True), expected, strict=True))
        ]
        return entries if isinstance(values[0], list) else _as_tuple(values[0], entries)

    def _leaves(self, path: Path, before: Any, values: Sequence[Any], rows: Sequence[int], whole: Any) -> Any:
        chosen = self._how.get(path)
        candidates: dict[str, Any] = {}
        if whole is not None and not self.is_exact and not _fits_any(whole, _candidates(before, values, rows)):
            whole = None  # the value may differ because of its random numbers
        last = TOTAL if path in self.ambiguous and chosen == SUM else chosen
        for name, value in _candidates(before, values, rows):
            candidates[name] = value
            if whole is None and last in (None, name):
                break
        if whole is not None:
            self._separate_sums(path, candidates, whole)
        elif last == TOTAL and chosen == SUM and not are_close(candidates[SUM], candidates[TOTAL]):
            self._warn(
                path,
                f"{self._owner} sets {format_path(path)} to a sum over samples in each micro-batch. Batches so far do "
                "not show whether the sum covers the whole training or only the latest batch. It is assumed to cover "
                "the whole training; otherwise, the value differs from one process. Keep means, or set "
                "PipelineStrategy(microbatches=1)",
            )
        name = chosen if chosen in candidates else next(iter(candidates))
        if whole is not None and not are_close(candidates[name], whole):
            fitting = next((other for other, value in candidates.items() if are_close(value, whole)), None)
            if fitting is not None:
                if path in self._guessed:
                    self._warn(
                        path,
                        f"{format_path(path)} was treated as a {name} over samples in batches that were evaluated "
                        "before training, but the first training batch shows that this was wrong. In the earlier "
                        "batches, the value differed from one process. Set it in training only, or set "
                        "Trainer(num_sanity_val_steps=0)",
                    )
                name = self._how[path] = fitting
            elif not have_equal_values(whole, before):  # a batch that is evaluated may change nothing
                self._warn(
                    path,
                    f"{self._owner}.training_step sets {format_path(path)} to {_short(whole)} for the first batch as "
                    f"a whole, and to {_short(candidates[name])} for its {len(values)} micro-batches. The value is "
                    "not a mean, sum or extreme over samples, and not a list of samples, so it differs from one "
                    "process. Set PipelineStrategy(microbatches=1), or keep means or sums",
                )
        if whole is not None and not have_equal_values(whole, before):
            self._compared.add(path)
        elif name == "mean" or (name == SUM and chosen is None):
            self._guessed.add(path)
        if name != "same":
            self._how.setdefault(path, name)
        if self.restore_order is not None and name in ("cat", "tail"):
            start = 0 if name == "cat" else before.size(0)
            return torch.cat([candidates[name][:start], self.restore_order(candidates[name][start:])])
        return candidates[name]

    def _separate_sums(self, path: Path, candidates: Mapping[str, Any], whole: Any) -> None:
        """Note whether the value of a whole batch fits both kinds of sums."""
        fitting = {name for name in (SUM, TOTAL) if name in candidates and are_close(candidates[name], whole)}
        if len(fitting) == 2 and (path in self.ambiguous or path not in self._how):
            self.ambiguous.add(path)
        elif fitting:
            self.ambiguous.discard(path)

    def merge_unchecked(self, path: Path, before: Any, values: Sequence[Any], rows: Sequence[int]) -> Any:
        """Return the merged value without recording guesses, if it is compared later or on another rank."""
        guessed, ambiguous = self._guessed, self.ambiguous
        self._guessed, self.ambiguous = set(), set()
        merged = self.merge(path, before, values, rows, None)
        self._guessed, self.ambiguous = guessed, ambiguous
        return merged

    def warn_of_guesses(self) -> None:
        """Warn of each value that was assumed to be a mean or sum and was never compared with a whole batch."""
        for path in sorted(self._guessed - self._compared, key=format_path):
            self._warn(
                path,
                f"{self._owner}.training_step sets {format_path(path)}, to another value by each micro-batch. No whole "
                f"batch was compared with its micro-batches, so {format_path(path)} is taken for a "
                f"{self._how.get(path, SUM)} over samples. If it is not, it differs from one process. Set "
                "PipelineStrategy(microbatches=1), or remove check_loss=False if it is set",
            )
        self._guessed.clear()

    def _warn(self, path: Path, text: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(text, stacklevel=3)


def _candidates(before: Any, values: Sequence[Any], rows: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """Yield ways to merge several values into one, by name, the likeliest first."""
    first, total = values[0], sum(rows)
    if all(have_equal_values(value, first) for value in values[1:]):
        yield "same", first
    tensors = all(isinstance(value, torch.Tensor) and value.layout is torch.strided for value in values)
    values = [value.detach() for value in values] if tensors else values
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    # A tensor that keeps its shape is probably not a list of samples.
    kept = tensors and isinstance(before, torch.Tensor) and all(value.shape == before.shape for value in values)
    by_sample = tensors and all(v.ndim and v.size(0) == n for v, n in zip(values, rows, strict=True))
    if by_sample and not kept:
        yield "cat", torch.cat(list(values))
    if tensors and isinstance(before, torch.Tensor) and before.ndim:
        earlier = before.size(0)
        if all(v.ndim and v.size(0) == earlier + n for v, n in zip(values, rows, strict=True)):
            yield "tail", torch.cat([values[0], *(v[earlier:] for v in values[1:])])
    alike = tensors and len({(v.shape, v.dtype) for v in values}) == 1 and values[0].dtype is not torch.bool
    if numbers or alike:
        if not (isinstance(first, int) or (alike and not values[0].is_floating_point())):
            yield "mean", sum(value * (n / total) for value, n in zip(values, rows, strict=True))
        comparable = isinstance(before, (int, float)) and not isinstance(before, bool)
        comparable |= isinstance(before, torch.Tensor) and (numbers or before.shape == values[0].shape)
        start = before if comparable else 0
        yield SUM, sum(value - start for value in values) + start
        yield TOTAL, sum(values)
        yield "largest", max(values) if numbers else torch.stack(list(values)).amax(0)
        yield "smallest", min(values) if numbers else torch.stack(list(values)).amin(0)
    if by_sample and kept:
        yield "cat", torch.cat(list(values))
    yield "last", values[-1]


def _are_columns(lists: Sequence[Sequence[Any]], rows: Sequence[int]) -> bool:
    """Return whether the entries of lists are tensors with an entry for each sample.

    An example are the two states of an LSTM.
    """
    return all(
        isinstance(entry, torch.Tensor) and entry.ndim > 0 and entry.size(0) == n
        for entries, n in zip(lists, rows, strict=True)
        for entry in entries
    )


def _fits_any(whole: Any, candidates: Iterable[tuple[str, Any]]) -> bool:
    return any(are_close(value, whole) for _, value in candidates)


def have_equal_values(a: Any, b: Any) -> bool:
    """Return whether two values have the same type and are equal. Tensors must be equal in all elements."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
            return False
        dense = a.layout is torch.strided  # torch.equal compares only strided tensors
        return torch.equal(a, b) if dense else torch.equal(a.to_dense(), b.to_dense())
    try:
        return bool(a == b)
    except Exception:
        return False


def are_close(a: Any, b: Any, relative: float = _RELATIVE_TOLERANCE) -> bool:
    """Return whether two values are equal up to rounding.

    Args:
        a: a value.
        b: another value.
        relative: the tolerated relative difference, which is at least 1e-4.
    """
    relative = max(relative, _RELATIVE_TOLERANCE)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.shape != b.shape:
            return False
        a, b = (t.detach().to_dense().double().cpu() for t in (a, b))
        return bool(torch.allclose(a, b, rtol=relative, atol=relative * float(b.abs().max()) if b.numel() else 0.0))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return abs(a - b) <= relative * max(abs(a), abs(b))
    return have_equal_values(a, b)


def _as_tuple(like: Any, entries: list[Any]) -> Any:
    return make_named(like, entries) if hasattr(like, "_fields") else type(like)(entries)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() > 1:
        return f"a tensor of shape {tuple(value.shape)} and norm {value.detach().double().norm().item():.6g}"
    return f"{value.item():.6g}" if isinstance(value, torch.Tensor) else repr(value)[:60]
