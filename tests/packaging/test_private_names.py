"""Check that few modules use private names of other packages, and that a test covers each name.

The check finds imports of private names and from private modules, private attributes of any object unless our code
defines the name, and names in `getattr` and in `__dict__`. It does not find a private name that our code also defines,
nor overrides of private methods. For the strategy, a separate test here checks the overrides.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from lightning.pytorch.strategies import ParallelStrategy

from lightning_pipes import PipelineStrategy

ROOT = Path(__file__).parents[2]
HOMES = {
    f"lightning_pipes/{name}.py"
    for name in (
        "engine/private_torch",
        "trainer/private_lightning",
        "trainer/weights/private_transformers",
        "tune/studies/private_optuna",
        "tune/private_hydra",
    )
}
EVERYWHERE = {
    "_replace": "of named tuples, which is public",
    "_fields": "of named tuples, which is public",
    "_exit": "of os, which is public",
    "_getframe": "of sys, in Python's documentation",
    "_pytree": "of torch.utils: trees are everywhere; pinned in tests/engine/test_private_torch.py",
    "_modules": "of modules: their names and order; pinned there",
    "_parameters": "of modules: weights are put there; pinned there",
    "_buffers": "as _parameters",
}
HIDDEN = {"_full", "_call", "_loop", "_name"}
"""Our names that a literal puts into `__dict__`, where no definition shows them."""


def sources() -> list[Path]:
    folders = ("lightning_pipes", "strategies", "hydra_plugins")
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))]
    return [p for p in found if not p.is_relative_to(ROOT / "lightning_pipes" / "strategies")]  # a link


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__") and len(name) > 1


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines, also as attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "made", "cls"):
                yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:  # for example in vars(thing).update(_name=...)
            yield node.arg


def is_dictionary(node: ast.expr) -> bool:
    """Return whether the expression is the dictionary of an object's attributes."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "vars"
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"


def touched(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each private name that a module imports or reads from an object."""
    for node in ast.walk(tree):
        names: list[object] = []
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lightning_pipes"):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and is_dictionary(node.value):
            names = [node.slice.value]
        yield from ((getattr(node, "lineno", 0), str(name)) for name in names if is_private(name))


def foreign(trees: Mapping[str, ast.AST]) -> list[str]:
    """Return the places outside the permitted modules that use a private name which our code does not define."""
    modules = {path: tree for path, tree in trees.items() if path not in HOMES}
    own = {name for tree in modules.values() for name in defined(tree)} | HIDDEN | EVERYWHERE.keys()
    return [f"{path}:{n}: {name}" for path, tree in modules.items() for n, name in touched(tree) if name not in own]


def test_private_names_are_at_home() -> None:
    found = foreign({str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sources()})
    assert found == [], f"put them into one of {sorted(HOMES)}, with a test that pins them"


@pytest.mark.parametrize(
    "code",
    [
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "from torch._C import anything",
        "import optuna._experimental",
        "def f(study): return study._stop_flag",
        "def f(study): study._stop_flag = False",
        "from hydra.core.singleton import Singleton\nSingleton._instances",
        "def f(x): return getattr(x, '_post_accumulate_grad_hooks', None)",
        "def f(x): return vars(x)['_hidden_thing']",
        "def f(x): x.__dict__['_hidden_thing'] = 1",
    ],
)
def test_a_new_one_is_found(code: str) -> None:
    assert len(foreign({"lightning_pipes/trainer/new.py": ast.parse(code)})) == 1
    assert foreign({"lightning_pipes/tune/studies/private_optuna.py": ast.parse(code)}) == []


def test_own_names_are_not_reported() -> None:
    code = "class A:\n    def __init__(self): self._x = 1\ndef f(a): return a._x"
    assert foreign({"lightning_pipes/trainer/new.py": ast.parse(code)}) == []


def test_private_names_that_the_strategy_overrides() -> None:
    """Check the private methods and attributes of Lightning's strategy that our strategy overrides."""
    of_lightning = {name for kind in ParallelStrategy.__mro__ for name in vars(kind)}
    ours = {name for name in vars(PipelineStrategy) if is_private(name) and name in of_lightning}
    assert ours - {"_abc_impl"} == {"_configure_launcher"}
