"""Check that a user can reach every module of the package, and every function, class and method.

Code that only benchmarks or tests need is not installed.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "lightning_pipes": "the names that users import",
    "lightning_pipes.ray": "the names that users import on a Ray cluster",
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
FUNCTION_EXCEPTIONS = {
    "lightning_pipes.engine.messages.bulk_transfer:BulkTransfer.set_gate": "holds transfers back in tests",
    "lightning_pipes.engine.watch.fault_points:Fault.to_environment": "writes variables that a process reads",
    "lightning_pipes.engine.watch.plain:_Writer.reducer_override": "called by the pickler",
    "lightning_pipes.engine.watch.plain:_reduce_tensor": "called by the pickler, through `reducer_override`",
    "lightning_pipes.import_hook:_Finder.find_spec": "called by the import system",
    "lightning_pipes.import_hook:_then_load_trainer": "called by the import system, through `find_spec`",
    "lightning_pipes.ir.clock:sleep": "replaced together with the other functions of the clock in tests",
    "lightning_pipes.ir.clock:use_clock": "replaces the clock in tests",
    "lightning_pipes.tune.neighbors:Neighbor.pids": "the processes, whose ends tests wait for",
    "lightning_pipes.planning.partition:with_layer": "named by the documentation of `PipelineStrategy.adopt`",
}
"""Functions, classes and methods that may be unreachable, and the reasons."""
OWN_PACKAGES = ("lightning_pipes", "hydra_plugins", "builtins")
"""The packages whose classes do not call the methods that they leave to subclasses from outside."""


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


@cache
def walk_nodes(root: ast.AST) -> list[ast.AST]:
    """Return a node and all nodes below it."""
    return [*ast.walk(root)]


def list_nodes(module: str) -> Iterator[ast.AST]:
    """Yield all nodes of the syntax tree of a module."""
    for statement in parse_module(module).body:
        if isinstance(statement, ast.ClassDef):  # walked piece by piece, as in `ReachedNames.follow`
            pieces = (*statement.bases, *statement.keywords, *statement.decorator_list, *statement.body)
            yield from (node for piece in pieces for node in walk_nodes(piece))
        else:
            yield from walk_nodes(statement)


def list_imports(module: str) -> Iterator[tuple[str, str]]:
    """Yield the imports of a module as pairs of a module and a name in it; the name is empty for a whole module."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in list_nodes(module):
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
    for node in list_nodes(package):
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


# ---- Functions, classes and methods.

DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Name = tuple[str, str]
"""A module and the name of a definition in it; a method is named `Class.method`."""
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)


def iter_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, including the statements in `if` and `try`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            inner = [*statement.body, *statement.orelse]
            inner += [each for handler in getattr(statement, "handlers", ()) for each in handler.body]
            yield from iter_statements(inner)


@cache
def find_definitions() -> dict[Name, list[ast.stmt]]:
    """Return all functions and classes of all modules, and the methods of the classes.

    A name has several definitions if it is a property with a setter, or if a condition decides between them.
    """
    found: dict[Name, list[ast.stmt]] = {}
    for module in MODULES:
        for statement in iter_statements(parse_module(module).body):
            if isinstance(statement, DEFINITIONS):
                found.setdefault((module, statement.name), []).append(statement)
            if isinstance(statement, ast.ClassDef):
                for method in iter_statements(statement.body):
                    if isinstance(method, DEFINITIONS):
                        found.setdefault((module, f"{statement.name}.{method.name}"), []).append(method)
    return found


@cache
def names_in_module(module: str) -> dict[str, Name]:
    """Return the local names of everything that a module imports from other modules of the package."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    found = {}
    for node in list_nodes(module):
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return found


@cache
def resolve_name(module: str, name: str) -> Name | None:
    """Return the definition that a name in a module refers to, through imports and re-exports."""
    for _ in range(9):
        if (module, name) in find_definitions():
            return module, name
        if module not in MODULES:
            return None
        source = names_in_module(module).get(name) or names_of_package(module).get(name)
        if source is None:
            return None
        module, name = source
    return None


def is_override(module: str, owner: str, method: str) -> bool:
    """Return whether a base class from another package has a method of this name.

    If an extra that the module needs is not installed, the result is True.
    """
    try:
        kind = getattr(import_module(module), owner)
    except ModuleNotFoundError:
        return True
    bases = (base for base in kind.__mro__[1:] if base.__module__.partition(".")[0] not in OWN_PACKAGES)
    return any(method in vars(base) for base in bases)


class ReachedNames:
    """The definitions to which public entries lead.

    A function or class is reached if reached code names it. A method of a reached class is reached if reached code
    uses any attribute of this name, if it is a special method, or if it overrides a method of another package.
    """

    def __init__(self) -> None:
        self.names: set[Name] = set()
        self._attributes: set[str] = set()
        self._waiting: list[Name] = []
        self._methods: dict[Name, list[Name]] = {}
        for module, name in find_definitions():
            if "." in name:
                self._methods.setdefault((module, name.partition(".")[0]), []).append((module, name))

    def add(self, name: Name | None) -> None:
        """Add a definition and everything that its code leads to."""
        if name is not None and name not in self.names:
            self.names.add(name)
            self._waiting.append(name)

    def add_public(self, name: Name | None) -> None:
        """Add a definition that users import, and all methods of a class that users call."""
        self.add(name)
        for method in self._methods.get(name, ()) if name is not None else ():
            if not method[1].partition(".")[2].startswith("_"):
                self.add(method)

    def add_code(self, module: str, nodes: Iterable[ast.AST]) -> None:
        """Add everything that this code of a module refers to."""
        for node in (each for top in nodes for each in walk_nodes(top)):
            match node:
                case ast.Name(id=name):
                    self.add(resolve_name(module, name))
                case ast.Attribute(value=value, attr=attribute):
                    self._attributes.add(attribute)
                    if isinstance(value, ast.Name) and value.id in names_in_module(module):
                        self.add(resolve_name(".".join(names_in_module(module)[value.id]), attribute))
                case ast.MatchClass(kwd_attrs=attributes):
                    self._attributes.update(attributes)
                case ast.Constant(value=str(text)):
                    self._add_text(module, text)

    def add_attributes(self, names: Iterable[str]) -> None:
        """Add the attributes that text outside of the package uses."""
        self._attributes.update(names)

    def follow(self) -> None:
        """Add everything that the added definitions lead to."""
        while self._waiting or self._find_methods():
            while self._waiting:
                module, name = self._waiting.pop()
                for node in find_definitions()[module, name]:
                    if isinstance(node, ast.ClassDef):
                        body = [each for each in node.body if not isinstance(each, DEFINITIONS)]
                        self._add_class_names(module, name, body)
                        self.add_code(module, [*node.bases, *node.keywords, *node.decorator_list, *body])
                    else:
                        self.add_code(module, [node])

    def _add_class_names(self, module: str, owner: str, body: list[ast.stmt]) -> None:
        """Add the methods that the body of their class names, as in `__mul__ = extend`."""
        used = {node.id for each in body for node in ast.walk(each) if isinstance(node, ast.Name)}
        for method in self._methods.get((module, owner), ()):
            if method[1].partition(".")[2] in used:
                self.add(method)

    def _add_text(self, module: str, text: str) -> None:
        """Add what a string names: an attribute for `getattr`, a quoted type, or the full path of a definition."""
        if text.isidentifier():
            self._attributes.add(text)
        if "." in text or ":" in text:
            source, _, name = text.replace(":", ".").rpartition(".")
            self.add(resolve_name(source, name))
        elif len(text) < 80:
            for word in IDENTIFIER.findall(text):
                self.add(resolve_name(module, word))

    def _find_methods(self) -> bool:
        """Add the methods of reached classes that are used or override others, and return whether there are any."""
        for owner in [*self.names]:
            for module, name in self._methods.get(owner, ()):
                method = name.partition(".")[2]
                if (module, name) not in self.names and (
                    method in self._attributes
                    or (method.startswith("__") and method.endswith("__"))
                    or is_override(module, owner[1], method)
                ):
                    self.add((module, name))
        return bool(self._waiting)


def list_public_names() -> Iterator[Name | None]:
    """Yield the definitions of public entries, and everything that examples and pages import."""
    for module, name in list_doors():
        if name:
            yield resolve_name(module, name)
        elif module in MODULES:
            exported = [
                s for s in parse_module(module).body if isinstance(s, ast.Assign) and "__all__" in ast.unparse(s)
            ]
            own = (each for home, each in find_definitions() if home == module and "." not in each)
            yield from (resolve_name(module, n) for n in (ast.literal_eval(exported[0].value) if exported else own))
    for page in (
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("*.md"),
        *ROOT.glob("strategies/*/*.md"),
    ):
        for module, names in re.findall(r"from (lightning_pipes[\w.]*) import ([\w, ]+)", page.read_text()):
            yield from (resolve_name(module, name.strip()) for name in names.split(","))


@cache
def reached_names() -> set[Name]:
    """Return all definitions that a user can reach."""
    reached = ReachedNames()
    for module in reachable_modules() & {*MODULES}:
        statements = [each for each in parse_module(module).body if not isinstance(each, DEFINITIONS)]
        exports = [
            each for each in statements if isinstance(each, ast.Assign) and "__all__" in ast.unparse(each.targets[0])
        ]
        reached.add_code(module, [each for each in statements if each not in exports])
    for name in list_public_names():
        reached.add_public(name)
    for module, each in find_definitions():
        if each in ("__getattr__", "__dir__"):
            reached.add((module, each))
    for page in ROOT.glob("docs/*.md"):
        reached.add_attributes(word for code in CODE.findall(page.read_text()) for word in IDENTIFIER.findall(code))
    reached.follow()
    return reached.names


def find_dead_names() -> set[str]:
    """Return the definitions that no user can reach. Methods of such a class are left out."""
    dead = {*find_definitions()} - reached_names()
    return {f"{module}:{name}" for module, name in dead if (module, name.rpartition(".")[0]) not in dead}


def test_every_function_is_reachable_from_a_public_door() -> None:
    assert find_dead_names() == {*FUNCTION_EXCEPTIONS}
