"""Check that docs/troubleshooting.md quotes messages as the code has them, and that all messages are listed."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load_hook() -> ModuleType:
    """Return the hook of the site that lists messages."""
    spec = importlib.util.spec_from_file_location("site_messages", ROOT / "docs" / "site_messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quoted_messages_exist() -> None:
    hook = load_hook()
    files = [path for folder in ("lightning_pipes", "strategies") for path in (ROOT / folder).rglob("*.py")]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    texts = [hook._template(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)]
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"```text\n(.+)\n```", page)
    assert len(quoted) > 20
    assert [quote for quote in quoted if not any(quote in text for text in texts)] == []


def test_every_folder_with_errors_is_listed() -> None:
    hook = load_hook()
    raising = set()
    for path in (*(ROOT / "lightning_pipes").rglob("*.py"), *(ROOT / "hydra_plugins").rglob("*.py")):
        if re.search(r"raise \w*Error\(", path.read_text()):
            raising.add(path.relative_to(ROOT / "lightning_pipes" if "lightning_pipes" in str(path) else ROOT).parts[0])
    assert {name for name in raising if not name.endswith(".py")} - {"testing", "lightning_pipes"} <= {*hook.AREAS}


def test_messages_are_read_from_all_forms_of_calls() -> None:
    hook = load_hook()
    tree = ast.parse("raise PlanError(f'a {b} of' + ' four words', 'Do this')\nrank_zero_warn('one two three four')")
    found = [*hook._read("ir", tree, {"PlanError": None, "rank_zero_warn": None})]
    assert [(m.kind, m.text) for m in found] == [
        ("PlanError", "a … of four words. Do this"),
        ("warning", "one two three four"),
    ]
