"""Caches of keys and values, which Hugging Face models fill by default and which can't travel between stages."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch import nn


class CacheSwitch:
    """Switches `use_cache` off in a Hugging Face model's configs while a step runs.

    A context manager. Outside of it configs are as the user has them: what is saved or generated there is the same.
    """

    def __init__(self, module: nn.Module) -> None:
        configs: list[Any] = [getattr(part, "config", None) for part in module.modules()]
        found = {id(config): config for config in configs if _has_cache(config)}
        self._configs = list(found.values())
        self._switched: list[Any] = []

    def log(self) -> None:
        """Log one line where a step would fill a cache."""
        names = {type(config).__name__: None for config in self._configs if config.use_cache}
        if names:
            rank_zero_info(
                f"use_cache=True of {', '.join(names)} is switched off while steps run in the pipeline, whose layers "
                "see each batch once; the config itself is not changed"
            )

    def __enter__(self) -> None:
        self._switched = [config for config in self._configs if config.use_cache]
        for config in self._switched:
            config.use_cache = False

    def __exit__(self, *_: object) -> None:
        for config in self._switched:
            config.use_cache = True


def _has_cache(config: Any) -> bool:
    """Whether it is a config of transformers that knows `use_cache`."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(config).__mro__}
    return "transformers" in libraries and isinstance(getattr(config, "use_cache", None), bool)
