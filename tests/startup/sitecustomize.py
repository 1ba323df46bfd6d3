"""Runs first in interpreters that have this folder in PYTHONPATH: for torchmetrics transformers is not installed.

Otherwise every import of Lightning loads it, where it is installed: a fifth of the time until a script begins.
"""

import importlib.metadata

version = importlib.metadata.version


def without_transformers(name: str) -> str:
    if name == "transformers":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)


importlib.metadata.version = without_transformers
