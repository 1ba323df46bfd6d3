"""Every private name of Hydra and OmegaConf that is touched here, each pinned by a test."""

from __future__ import annotations

from typing import Any

from hydra.core.singleton import Singleton


def hydra_singletons() -> dict[type, Any]:
    """Hydra's singletons by class; what is put there is what `instance()` returns."""
    instances: dict[type, Any] = Singleton._instances
    return instances


def value_of(node: object) -> Any:
    """The value that a node of a configuration holds; None for what is no node, or holds others."""
    found: Any = getattr(node, "_value", lambda: None)()
    return found
