"""The words of CONTRIBUTING, in the package."""

import ast
import re

import pytest

from tests.packaging.timelines import ROOT

SOURCES = sorted(
    path for home in ("lightning_pipes", "strategies", "hydra_plugins") for path in (ROOT / home).glob("**/*.py")
)
AVOIDED = re.compile(r"foretold|foretell|doom", re.IGNORECASE)


def docstrings(path):
    """With the lines that they begin in; those of constants, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("home", ["lightning_pipes", "strategies", "hydra_plugins"])
def test_docstrings_begin_with_what_comes_back(home):
    found = [
        f"{path}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        if path.is_relative_to(ROOT / home)
        for line, text in docstrings(path)
        if text.startswith("What")
    ]
    assert not found, "\n".join(found)


def test_the_fields_words():
    found = [path for path in SOURCES if AVOIDED.search(path.read_text(encoding="utf-8"))]
    assert not found
