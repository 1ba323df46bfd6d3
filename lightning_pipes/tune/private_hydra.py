"""All private names of Hydra and OmegaConf that this package uses. Tests check each of them."""

from __future__ import annotations

from typing import Any

from hydra.core.singleton import Singleton


def hydra_singletons() -> dict[type, Any]:
    """Return Hydra's singletons by class. `instance()` of a class returns the entry of this dictionary."""
    instances: dict[type, Any] = Singleton._instances
    return instances


def value_of(node: object) -> Any:
    """Return the value of a node of a configuration, or None for nodes with children and for other objects."""
    found: Any = getattr(node, "_value", lambda: None)()
    return found
