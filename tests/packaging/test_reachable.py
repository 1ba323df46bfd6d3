"""Check that a user can reach every module of the package.

Modules that only a benchmark or a test needs are not installed.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "lightning_pipes": "the names that users import",
    "lightning_pipes.supernets": "the names that users import for supernets",
    "lightning_pipes.testing": "for tests of users' schedules and modules; all of its modules",
    "lightning_pipes.tune.cli": "commands, which are found by their names; all of its modules",
    "hydra_plugins": "found by Hydra; all of its modules",
}
"""Public modules in addition to the entry points of pyproject.toml."""
DOCUMENTED = {
    "lightning_pipes.strategies.jap:RoundOrder": "docs/arrays.md",
}
"""Further names that users import from a schedule's package, and the page that documents them."""
EXCEPTIONS = {
    "lightning_pipes.__main__": "run by `python -m lightning_pipes`",
}
"""Modules that may be unreachable, and the reasons."""


def find_modules() -> dict[str, Path]:
    """Return the files of all modules that are installed, by dotted name."""
    found = {}
    for folder, prefix in (("lightning_pipes", ()), ("hydra_plugins", ()), ("strategies", ("lightning_pipes",))):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (*prefix, *path.relative_to(ROOT).with_suffix("").parts)
            if parts[:2] != ("lightning_pipes", "strategies") or folder == "strategies":
                found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = find_modules()


@cache
def parse_module(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(MODULES[module].read_text())


def list_imports(module: str) -> Iterator[tuple[str, str]]:
    """Yield the imports of a module as pairs of a module and a name in it; the name is empty for a whole module."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(parse_module(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((source, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES:
            yield node.value, ""  # imported later by this name


@cache
def names_of_package(package: str) -> dict[str, tuple[str, str]]:
    """Return the names that a package re-exports from its modules, each with the module and its name there."""
    found = {}
    for node in ast.walk(parse_module(package)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                match key, value:
                    case ast.Constant(value=str(name)), ast.Constant(value=str(source)) if source in MODULES:
                        found[name] = (source, name)
    return found


def resolve_import(module: str, name: str) -> str | None:
    """Return the module that defines `name`, or None for a module of another package.

    A package that only re-exports a name is skipped, so that its other names count as unused.
    """
    if f"{module}.{name}" in MODULES:
        return f"{module}.{name}"
    if module in MODULES and MODULES[module].name == "__init__.py" and name in names_of_package(module):
        return resolve_import(*names_of_package(module)[name])
    return module if module in MODULES else None


def list_doors() -> Iterator[tuple[str, str]]:
    """Yield every public entry as a pair of a module and a name in it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group in (project["scripts"], *project["entry-points"].values(), {name: name for name in DOCUMENTED}):
        for target in group.values():
            module, _, name = target.partition(":")
            yield module, name
    for public, why in PUBLIC.items():
        yield from ((m, "") for m in MODULES if m == public or ("all of its" in why and m.startswith(f"{public}.")))


def reachable_modules() -> set[str]:
    """Return all modules that a public entry leads to, including the packages on the way."""
    reached: set[str] = set()
    waiting = [resolve_import(*door) for door in list_doors()]
    while waiting:
        module = waiting.pop()
        if module is None or module in reached:
            continue
        reached.add(module)
        waiting += (resolve_import(*each) for each in list_imports(module))
    parents = {module[:at] for module in reached for at, letter in enumerate(module) if letter == "."}
    return reached | parents


def test_every_module_is_reachable_from_a_public_door() -> None:
    assert {*MODULES} - reachable_modules() == {*EXCEPTIONS}


def test_documented_names_are_documented() -> None:
    for target, page in DOCUMENTED.items():
        module, _, name = target.partition(":")
        text = (ROOT / page).read_text()
        assert module in text, target
        assert name in text, target
