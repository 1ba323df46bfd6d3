"""The index of a sharded checkpoint: where each tensor is, and the checksums of the files.

It is the pickle by which torch.distributed.checkpoint finds tensors. To unpickle it is to run what is in it; here it is
read by stand-ins, which only remember what they would have been made of.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.checkpoint.checksums import WAY_OUT, Sum, check, damaged

INDEX = ".metadata"
"""The file; written last."""
_SUMS = "lightning_pipes_sums"


def is_sharded(path: Path) -> bool:
    """Return whether there is a sharded checkpoint at a path."""
    return (path / INDEX).is_file()


@dataclass(frozen=True)
class Place:
    """Where a tensor is: the name of the file, and a part of its bytes, which torch.load reads."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Index:
    """The parts of a sharded checkpoint.

    Attributes:
        places: of each tensor, by its name.
        sums: of each file but this one; None where an older version has written none.
    """

    places: Mapping[str, Place]
    sums: Mapping[str, Sum] | None

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of a folder; nothing in the file is run.

        Raises:
            PipelineError: there is none, it is damaged, or anything else is in it.
        """
        path = folder / INDEX
        if not path.is_file():
            raise PipelineError(
                f"{folder} is no folder with a complete checkpoint: it has no {INDEX}, which is written last. {WAY_OUT}"
            )
        check(path)
        try:
            with open(path, "rb") as file:
                found = _Reader(file).load()
            sums = (found.state["planner_data"] or {}).get(_SUMS)
            places = {
                key.state["fqn"]: _place(value.state, key.state["fqn"])
                for key, value in found.state["storage_data"].items()
            }
            index = cls(places, None if sums is None else {_file(f): Sum(int(n), int(c)) for f, (n, c) in sums.items()})
        except Exception as error:  # of any kind, as anything may be in the file
            raise damaged(path, f"{type(error).__name__}: {error}") from error
        if index.sums is not None:
            check(path, sealed=True)
        return index


def with_sums(sums: Mapping[str, Sum]) -> dict[str, Any]:
    """The entries that the index has to hold, in its `planner_data`, for `Index.read` to find the sums."""
    return {_SUMS: {name: tuple(found) for name, found in sums.items()}}


def _place(entry: Mapping[str, Any], name: str) -> Place:
    if entry.get("transform_descriptors"):
        raise ValueError(f"{name} is stored in a form that checkpoint='sharded' does not write")
    return Place(_file(entry["relative_path"]), int(entry["offset"]), int(entry["length"]))


def _file(name: str) -> str:
    """The name of a file that is in the folder itself."""
    if Path(name).name != name:
        raise ValueError(f"{name!r} is outside of the folder")
    return name


class _Thing:
    """Stands for an object of any class, and knows what that would have been made of."""

    def __new__(cls, *arguments: Any) -> _Thing:
        made = object.__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    arguments: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    """Reads a pickle, and neither imports nor calls anything that is named in it."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Thing,), {})  # of its own for each, so that no pickle can change what others get
