"""Runs first in interpreters that have this folder in PYTHONPATH: for torchmetrics, which every import of Lightning
loads, some packages are not installed that it would load for nothing.

They take two fifths of the time until a script begins. The collector of garbage looks less often at what is imported,
which is none: that takes another fifth.
"""

import gc
import importlib.metadata
import importlib.util

gc.set_threshold(20_000, 20, 20)
version, find_spec = importlib.metadata.version, importlib.util.find_spec
UNSEEN = {"transformers", "scipy", "matplotlib"}


def version_if_seen(name):
    if name in UNSEEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)


def found_if_seen(name, package=None):
    return None if name in UNSEEN else find_spec(name, package)


importlib.metadata.version, importlib.util.find_spec = version_if_seen, found_if_seen
