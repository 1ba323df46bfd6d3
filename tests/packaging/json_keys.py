"""The origin of the values that benchmarks print as JSON, found in their source without running them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DATED = re.compile(r"_of_\d{4}_\d{2}_\d{2}$")
"""The end of a key whose value is from an earlier run."""
SETTINGS = {"stages", "ranks", "seed", "rows", "subnets", "batches", "microbatches"}
"""Keys that describe the run."""


@dataclass
class Module:
    """A module's functions and the values that it assigns to names, entries and attributes at any place."""

    tree: ast.Module
    returned: dict[str, list[ast.expr]] = field(default_factory=dict)
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Module:
        """Return the module with this source text."""
        made = cls(ast.parse(text))
        for node in ast.walk(made.tree):
            if isinstance(node, ast.FunctionDef):
                values = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
                made.returned.setdefault(node.name, []).extend(values)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    made._assign(target, node.value)
            elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
                made._assign(node.target, node.value)
            elif isinstance(node, ast.ImportFrom) and node.module:
                made.imported |= {name.asname or name.name: (node.module, name.name) for name in node.names}
        return made

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript):
            target, value = target.value, ast.Dict([target.slice], [value])
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Attribute):
            self.assigned.setdefault(f".{target.attr}", []).append(value)


def literal_keys(folder: Path) -> dict[str, set[str]]:
    """Return the keys of printed JSON whose value is a literal, by the name of the benchmark."""
    modules = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts): Module.of(path.read_text())
        for path in folder.rglob("*.py")
    }
    return {name: found for name in modules if (found := set(_printed(name, modules)))}


def _printed(name: str, modules: dict[str, Module]) -> Iterator[str]:
    seen: set[int] = set()
    for node in ast.walk(modules[name].tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "json.dumps":
            yield from _literals(name, node.args[0], modules, seen)


def _literals(name: str, value: ast.expr, modules: dict[str, Module], seen: set[int]) -> Iterator[str]:
    """Yield the keys of a mapping that have literal values."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[tuple[str, ast.expr]] = []
    if isinstance(value, ast.Dict):
        for key, each in zip(value.keys, value.values, strict=True):
            if key is not None and _is_literal(name, each, modules) and not _is_allowed(key):
                yield ast.unparse(key)
            inner.append((name, each))
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        inner = [(name, value.left), (name, value.right)]
    elif isinstance(value, ast.IfExp):
        inner = [(name, value.body), (name, value.orelse)]
    elif isinstance(value, ast.Attribute):
        inner = [(name, each) for each in modules[name].assigned.get(f".{value.attr}", ())]
    elif isinstance(value, ast.Name | ast.Call):
        called = value.func if isinstance(value, ast.Call) else value
        if isinstance(called, ast.Name):
            where, known = _place(name, called.id, modules)
            table = modules[where].returned if isinstance(value, ast.Call) else modules[where].assigned
            inner = [(where, each) for each in table.get(known, ())]
        if isinstance(value, ast.Call):
            for keyword in value.keywords if ast.unparse(called) == "dict" else ():
                inner.append((name, ast.Dict([keyword.arg and ast.Constant(keyword.arg)], [keyword.value])))
    for where, each in inner:
        yield from _literals(where, each, modules, seen)


def _is_allowed(key: ast.expr) -> bool:
    if not isinstance(key, ast.Constant):
        return not isinstance(key, ast.JoinedStr)
    return not isinstance(key.value, str) or key.value in SETTINGS or DATED.search(key.value) is not None


def _is_literal(name: str, value: ast.expr, modules: dict[str, Module]) -> bool:
    """Return whether a value is a number other than 0 or consists of such numbers.

    Constants and entries of constant tables count as their values.
    """
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and value.value not in (0, True)
    if isinstance(value, ast.UnaryOp):
        return _is_literal(name, value.operand, modules)
    if isinstance(value, ast.BinOp):
        return _is_literal(name, value.left, modules) and _is_literal(name, value.right, modules)
    if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name):
        where, known = _place(name, value.value.id, modules)
        tables = modules[where].assigned.get(known, [])
        entries = [each for table in tables if isinstance(table, ast.Dict) for each in table.values]
        return known.isupper() and bool(entries) and all(_is_literal(where, each, modules) for each in entries)
    if isinstance(value, ast.Name):
        where, known = _place(name, value.id, modules)
        values = modules[where].assigned.get(known, [])
        return known.isupper() and bool(values) and all(_is_literal(where, each, modules) for each in values)
    return False


def _place(name: str, known: str, modules: dict[str, Module]) -> tuple[str, str]:
    """Return the module in which a name is defined, and its name there."""
    where = modules[name].imported.get(known)
    return where if where is not None and where[0] in modules else (name, known)
