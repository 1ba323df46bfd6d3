"""Every private name of Hydra and OmegaConf that this package touches; a test pins each."""

from __future__ import annotations

from typing import Any

from hydra.core.singleton import Singleton


def hydra_singletons() -> dict[type, Any]:
    """Return Hydra's singletons by class; an entry of this dictionary is the result of `instance()`."""
    instances: dict[type, Any] = Singleton._instances
    return instances


def value_of(node: object) -> Any:
    """Return the value that a node of a configuration holds; None for other objects and for nodes with children."""
    found: Any = getattr(node, "_value", lambda: None)()
    return found
