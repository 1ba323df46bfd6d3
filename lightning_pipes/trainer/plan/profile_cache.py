"""Profiles that earlier runs have measured, stored below the root directory of the run.

A second run starts without measuring. The key of a profile contains everything that times depend on: the structure of
the layers, the batch, the device, the number of processes, and the versions of torch and of this package. If the first
steps of a run contradict a profile, the profile is removed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipes.cost import Link, ModelProfile
from lightning_pipes.ir import InputError
from lightning_pipes.ir.checks import read_object

PROFILE_FOLDER = "lightning_pipes_profiles"
PROFILES_VARIABLE = "LIGHTNING_PIPES_PROFILES"
"""The environment variable that names another folder. If it is empty, profiles are not stored."""


class MeasuredRun(NamedTuple):
    """The measurements of a run, which a later run can use before its devices are connected.

    Attributes:
        profile: the profile of the layers.
        rows: the number of samples of a batch.
        link: the slowest link between its ranks.
    """

    profile: ModelProfile
    rows: int
    link: Link


class ProfileCache:
    """A folder with files of profiles, which rank 0 writes and reads.

    Args:
        folder: the folder, or None to store nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._used: Path | None = None

    def find_profile(self, key: object) -> ModelProfile | None:
        """Return the profile that was stored under `key`, or None if there is none of this version and this user."""
        path = self._path(key)
        with suppress(OSError, InputError):
            if path is not None and path.stat().st_uid == os.getuid():
                self._used, profile = path, ModelProfile.load(path)
                return profile
        return None

    def keep_profile(self, key: object, profile: ModelProfile) -> None:
        """Write a profile if the folder is writable."""
        if self._write(key, profile.to_dict()):
            self._used = self._path(key)

    def find_run(self, key: object) -> MeasuredRun | None:
        """Return the last run that was stored under `key`, or None if there is none of this version and this user."""
        path = self._path(key)
        with suppress(OSError, InputError, KeyError, TypeError):
            if path is not None and path.stat().st_uid == os.getuid():
                found = read_object(path)
                link = Link(found["bandwidth"] or math.inf, found["latency"])
                return MeasuredRun(ModelProfile.from_dict(found["profile"]), found["rows"], link)
        return None

    def keep_run(self, key: object, run: MeasuredRun) -> None:
        """Write the measurements of a run if the folder is writable."""
        speed = run.link.bandwidth if math.isfinite(run.link.bandwidth) else None
        found = {"rows": run.rows, "bandwidth": speed, "latency": run.link.latency}
        self._write(key, {"profile": run.profile.to_dict(), **found})

    def _write(self, key: object, content: Mapping[str, Any]) -> bool:
        path = self._path(key)
        if path is None:
            return False
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                (Path(folder) / path.name).write_text(json.dumps(content, indent=1))
                os.replace(Path(folder) / path.name, path)
            return True
        return False

    def forget_profile(self) -> None:
        """Remove the profile that this run has used, because its steps contradict the profile."""
        if self._used is not None:
            self._used.unlink(missing_ok=True)

    def _path(self, key: object) -> Path | None:
        if self._folder is None:
            return None
        text = repr((key, torch.__version__, version("lightning_pipes")))
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def describe_module(module: nn.Module) -> object:
    """Return the key of a module before ranks connect, which contains its type and its parameters."""
    return "stages", type(module).__qualname__, [(name, tuple(p.shape)) for name, p in module.named_parameters()]


def find_cache(trainer: pl.Trainer) -> ProfileCache:
    """Return the cache in a Trainer's root directory, or in the folder that the environment variable names."""
    named = os.environ.get(PROFILES_VARIABLE)
    root = str(trainer.default_root_dir)
    if named == "" or (named is None and "://" in root):
        return ProfileCache(None)
    return ProfileCache(Path(root) / PROFILE_FOLDER if named is None else Path(named))


def clear_profiles(folder: Path) -> int:
    """Remove the profiles that runs with this root directory have stored, and return their number."""
    folder = Path(os.environ.get(PROFILES_VARIABLE) or folder / PROFILE_FOLDER)
    files = [*folder.glob("*.json")]
    for path in files:
        path.unlink()
    with suppress(OSError):
        folder.rmdir()
    return len(files)
