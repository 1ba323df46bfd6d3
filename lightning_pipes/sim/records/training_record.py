"""A record of a training that can be compared with other records.

It contains losses, hashes of layers, and the order in which batches used each layer. A folder has one file for each fit
and rank, such as `000-rank0.jsonl`. A fit that resumes the previous one replaces the records of the previous fit from
its first batch on. Each line is one of the following:

    {"begins": 0}                                          the first line of a file: the number of its first batch
    {"F": 2, "layers": ["0", "5.2"]}                       batch 2 reads these layers
    {"B": 2, "layers": {"0": "91d5...", "5.2": null}}      batch 2 has updated them; their hashes, if taken
    {"loss": "0x1.8p+0", "of": 2, "value": 1.5}            the loss of batch 2
    {"end": 499, "layers": {"0": "5c01...", ...}}          the hashes of all layers after the last batch
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import merge
from pathlib import Path
from typing import Any, NamedTuple

from lightning_pipes.ir import InputError
from lightning_pipes.ir.checks import check_json_fields

RECORD_FOLDER = "reproducibility"
"""The folder of the files in the folder of a run."""


class Access(NamedTuple):
    """An access of a batch to a layer: the batch reads the layer in its forward (F), or has updated it (B)."""

    batch: int
    kind: str

    def __str__(self) -> str:
        return f"{self.batch}{self.kind}"


@dataclass
class TrainingRecord:
    """The record of one run.

    Attributes:
        losses: the losses by batch, in the format of `float.hex()`.
        hashes: the hashes of parameters and buffers by batch and layer, for layers that the batch has updated.
        accesses: the accesses to each layer, in order. If a layer was on several ranks, the accesses of each rank are
            in their order, and accesses of different ranks are in the order of their batches.
    """

    losses: dict[int, str] = field(default_factory=dict)
    hashes: dict[tuple[int, str], str] = field(default_factory=dict)
    accesses: dict[str, list[Access]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def load(cls, where: Path) -> TrainingRecord:
        """Return the record in the folder of a run.

        Raises:
            InputError: there is no record, or a line can't be read.
        """
        folder = where / RECORD_FOLDER if (where / RECORD_FOLDER).is_dir() else where
        files = sorted(folder.glob("*-rank*.jsonl"))
        if not files:
            raise InputError(
                f"{where} has no record of a training; the callback ReproducibilityLog writes one into {RECORD_FOLDER}/"
            )
        record = cls()
        for fit in sorted({path.name.partition("-")[0] for path in files}):
            mine = [path for path in files if path.name.startswith(f"{fit}-")]
            lines = {path: [*_read_lines(path)] for path in mine}
            begins = [line["begins"] for of_file in lines.values() for line in of_file if "begins" in line]
            record._forget(min(begins, default=0))
            found: list[dict[str, list[Access]]] = []
            for path, of_file in lines.items():
                found.append(defaultdict(list))
                for line in of_file:
                    record._add(line, path, found[-1])
            for layer in sorted({name for of_file in found for name in of_file}):
                accesses = merge(*(of_file[layer] for of_file in found if layer in of_file), key=_batch_key)
                record.accesses[layer] += accesses
        return record

    def order(self, layer: str) -> str:
        """Return the accesses to a layer in order, as batches and directions, such as "2F 2B 5F 5B"."""
        return " ".join(map(str, self.accesses.get(layer, ())))

    def _forget(self, begins: int) -> None:
        self.losses = {batch: loss for batch, loss in self.losses.items() if batch < begins}
        self.hashes = {key: value for key, value in self.hashes.items() if key[0] < begins}
        for layer, accesses in self.accesses.items():
            self.accesses[layer] = [access for access in accesses if access.batch < begins]

    def _add(self, line: Mapping[str, Any], path: Path, accesses: dict[str, list[Access]]) -> None:
        try:
            if "loss" in line:
                self.losses[line["of"]] = line["loss"]
            for kind in ("F", "B"):
                for layer in line["layers"] if kind in line else ():
                    accesses[layer].append(Access(line[kind], kind))
            for kind in ("B", "end"):
                for layer, value in line["layers"].items() if kind in line else ():
                    if value is not None:
                        self.hashes[line[kind], layer] = value
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} has a line that ReproducibilityLog did not write: {json.dumps(line)[:80]}"
            ) from error


@dataclass(frozen=True)
class RunComparison:
    """The comparison of two runs. Only values that both runs have recorded are compared.

    Attributes:
        losses, hashes, layers: the number of compared losses, hashes and layers.
        batch, layer: the batch and the layer of the first difference. `batch` is None if there is no difference, and
            `layer` is None if the difference is in a loss.
        values: the values of the two runs at this difference.
        orders: the layers that were used in different orders.
    """

    losses: int
    hashes: int
    layers: int
    batch: int | None = None
    layer: str | None = None
    values: tuple[str, str] = ("", "")
    orders: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether all compared losses and hashes are equal. The order of accesses is not considered."""
        return self.batch is None

    def __str__(self) -> str:
        what = f"{self.losses} losses and {self.hashes} hashes of layers"
        if self.is_equal:
            found = f"equal in {what}"
        elif self.layer is None:
            found = f"the loss of batch {self.batch} differs: {self.values[0]} and {self.values[1]}"
        else:
            found = f"layer {self.layer} differs after batch {self.batch}: {self.values[0]} and {self.values[1]}"
        if not self.orders:
            return f"{found}; each of {self.layers} layers was used in the same order"
        more = f" and {len(self.orders) - 3} more" if len(self.orders) > 3 else ""
        return f"{found}; used in another order: layers {', '.join(self.orders[:3])}{more} of {self.layers}"


def compare_runs(a: TrainingRecord, b: TrainingRecord) -> RunComparison:
    """Return the first batch for which two runs have different losses or different layers.

    Raises:
        InputError: the runs have no loss and no hash in common.
    """
    losses = sorted(a.losses.keys() & b.losses.keys())
    hashes = sorted(a.hashes.keys() & b.hashes.keys(), key=lambda key: (key[0], natural_key(key[1])))
    if not losses and not hashes:
        raise InputError(
            "the two runs have no batch in common for which both have a loss or a hash: one has batches "
            f"{_format_range(a)}, the other {_format_range(b)}. Record hashes at the same batches in both "
            "runs (every_n_batches)"
        )
    layers = sorted(a.accesses.keys() & b.accesses.keys(), key=natural_key)
    last = min(max((x.batch for each in r.accesses.values() for x in each), default=-1) for r in (a, b))
    orders = tuple(name for name in layers if _accesses_until(a, name, last) != _accesses_until(b, name, last))
    counts = len(losses), len(hashes), len(layers)
    found: list[tuple[int, int, str | None, tuple[str, str]]] = []
    for batch in losses:
        if a.losses[batch] != b.losses[batch]:
            found.append((batch, 0, None, (a.losses[batch], b.losses[batch])))
            break
    for key in hashes:
        if a.hashes[key] != b.hashes[key]:
            found.append((key[0], 1, key[1], (a.hashes[key][:12], b.hashes[key][:12])))
            break
    if not found:
        return RunComparison(*counts, orders=orders)
    batch, _, layer, values = min(found, key=lambda each: each[:2])
    return RunComparison(*counts, batch, layer, values, orders)


def _batch_key(access: Access) -> int:
    return access.batch


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key for the names of layers that sorts numbers by value: 2 before 10."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _accesses_until(record: TrainingRecord, layer: str, last: int) -> list[Access]:
    return [access for access in record.accesses[layer] if access.batch <= last]


def _format_range(record: TrainingRecord) -> str:
    batches = [*record.losses, *(batch for batch, _ in record.hashes)]
    return f"{min(batches)} to {max(batches)}" if batches else "none"


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file. The last line may be incomplete if the rank was killed, and is then ignored."""
    text = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(text):
        try:
            found = json.loads(line)
        except ValueError as error:
            if number == len(text) - 1:
                return
            raise InputError(f"{path}, line {number + 1}, is not valid JSON: {line[:80]!r}") from error
        if not isinstance(found, dict):
            raise InputError(f"{path}, line {number + 1}, was not written by ReproducibilityLog: {line[:80]!r}")
        yield found


@dataclass(frozen=True)
class Curves:
    """The metrics of one rank over time.

    Attributes:
        times: seconds since the start of the monitor, in ascending order.
        values: for each metric, its values at these times, or None if a value is missing. The name of a metric ends
            with its unit.

    Raises:
        InputError: the numbers of values and times differ, or the times do not ascend.
    """

    times: tuple[float, ...] = ()
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if list(self.times) != sorted(self.times) or not all(map(math.isfinite, self.times)):
            raise InputError("times of a curve must be finite and in ascending order")
        for name, values in self.values.items():
            if len(values) != len(self.times):
                raise InputError(f"{name!r} has {len(values)} values at {len(self.times)} times")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"times": self.times, "values": self.values}


def curves_of(data: object, what: str) -> Curves:
    """Return the curves from `Curves.to_dict`. Error messages name them `what`.

    Raises:
        InputError: the data does not contain curves, or is damaged.
    """
    return Curves(
        **check_json_fields(what, data, {"times": tuple[float, ...], "values": dict[str, tuple[float | None, ...]]})
    )
