"""A hook of MkDocs that adds a page with all errors and warnings, so that the search of the site finds them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

PAGE = "docs/reference/messages.md"
AREAS = {
    "trainer": "Training",
    "engine": "Processes and messages between them",
    "arrays": "Job arrays and MemorySwap",
    "tune": "Studies, sweeps and the command line",
    "ray": "Ray",
    "hydra_plugins": "Hydra",
    "supernets": "Supernets",
    "strategies": "Schedules",
    "planning": "Planning",
    "cost": "Costs, profiles and clusters",
    "sim": "Simulation and reports",
    "ir": "Plans, programs and settings",
}
"""The headings of the page, by the folder of the code."""
HEAD = """# All messages

This page lists the errors and warnings of the package, in which `…` stands for a value of your run.
[Troubleshooting](../troubleshooting.md) explains the most frequent ones.
"""
VALUE = "…"


class Message(NamedTuple):
    """The text of an error or a warning.

    Attributes:
        area: the folder of the code, a key of `AREAS`.
        kind: the name of the class of the error, or "warning".
        text: the text, with `VALUE` for each value.
    """

    area: str
    kind: str
    text: str


def list_messages(root: Path) -> list[Message]:
    """Return the messages of the package, in the order of the files."""
    trees: dict[str, list[ast.Module]] = {area: [] for area in AREAS}
    for area in AREAS:
        folder = root / area if area in ("strategies", "hydra_plugins") else root / "lightning_pipes" / area
        trees[area] += [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    kinds = dict.fromkeys(_find_errors([tree for each in trees.values() for tree in each])) | {"rank_zero_warn": None}
    return list(dict.fromkeys(m for area, each in trees.items() for tree in each for m in _read(area, tree, kinds)))


def _find_errors(trees: list[ast.Module]) -> set[str]:
    """Return the names of PipelineError and of all classes that derive from it."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"PipelineError"}
    while more := {name for name, each in bases.items() if each & found} - found:
        found |= more
    return found


def _read(area: str, tree: ast.Module, kinds: Mapping[str, None]) -> Iterator[Message]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds and node.args:
            reason, *way_out = map(_template, node.args[:2])
            text = ". ".join([reason, *way_out])
            if len(text.replace(VALUE, " ").split()) > 3:
                yield Message(area, "warning" if node.func.id == "rank_zero_warn" else node.func.id, text)


def _template(node: ast.expr) -> str:
    """Return the text of an expression, with `VALUE` for parts that are unknown before the program runs."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _template(left) + _template(right)
    return VALUE


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page to the site."""
    from mkdocs.structure.files import File

    messages = list_messages(Path(config.config_file_path or "").parent)
    lines = [HEAD]
    for area, title in AREAS.items():
        lines.append(f"## {title}\n")
        for message in messages:
            if message.area == area:
                lines += [
                    f"- {message.kind}",
                    "",
                    "    ```text",
                    f"    {' '.join(message.text.split())}",
                    "    ```",
                    "",
                ]
    files.append(File.generated(config, PAGE, content="\n".join(lines)))
    return files
