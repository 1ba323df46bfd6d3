"""Check that class names are unique, so that the names of the package can be searched for."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOMES = ("lightning_pipes", "strategies", "hydra_plugins")


def find_doubled_classes() -> dict[str, list[str]]:
    """Return the modules of each public class name that several modules define."""
    found: dict[str, list[str]] = defaultdict(list)
    for home in HOMES:
        for path in sorted((ROOT / home).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}:
                if not name.startswith("_"):
                    found[name].append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in sorted(found.items()) if len(paths) > 1}


def test_class_names_are_defined_once() -> None:
    assert find_doubled_classes() == {}
