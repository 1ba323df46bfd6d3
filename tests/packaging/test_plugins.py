"""Check that Hydra finds the same plugins by entry points and in the package hydra_plugins.

Hydra reads the entry points of pyproject.toml from version 1.4 on.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.plugins import Plugins
from hydra.plugins.plugin import Plugin
from hydra.plugins.search_path_plugin import SearchPathPlugin

ROOT = Path(__file__).parents[2]
GROUP = "hydra.plugins"


def test_both_forms_name_the_same_classes() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        entries = tomllib.load(file)["project"]["entry-points"][GROUP]
    classes = [EntryPoint(name, value, GROUP).load() for name, value in entries.items()]
    assert all(issubclass(kind, Plugin) for kind in classes)
    found = {kind for kind in Plugins.instance().discover() if kind.__module__.startswith("hydra_plugins.lightning_")}
    assert {(k.__module__, k.__name__) for k in classes} == {(k.__module__, k.__name__) for k in found}


def test_no_path_is_added() -> None:
    kind = next(kind for kind in Plugins.instance().discover(SearchPathPlugin) if kind.__name__ == "Schemas")
    paths = ConfigSearchPathImpl()
    kind().manipulate_search_path(paths)
    assert not paths.get_path()
