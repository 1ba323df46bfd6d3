"""Check that imports point down the table of docs/architecture.md, and that light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ["ir", "cost", "sim", "planning", "engine", "trainer", "supernets", "arrays", "tune", "ray"]  # from the bottom
ROOMS = {  # of a layer, from the bottom; a room is a folder or a file
    "sim": [
        "timeline",
        "residency",
        "predictor",
        "loops",
        "simulator",
        "records",
        "page",
    ],
    "engine": [
        "private_torch",
        "allocator",
        "trees",
        "watch",
        "monitor",
        "messages",
        "residency",
        "compute",
        "engine",
    ],
    "trainer": [
        "private_lightning",
        "ranks",
        "data",
        "weights",
        "user",
        "optimizers",
        "results",
        "cuts",
        "checks",
        "checkpoint",
        "reports",
        "plan",
        "relocation",
        "loop",
        "verify",
        "watchers",
        "callbacks",
        "checkpointing",
        "active_run",
        "session",
        "fork_launcher",
        "launchers",
        "setup",
        "strategy",
    ],
}
TORCHLESS = {"ir", "cost", "sim", "planning", "strategies"}
FORBIDDEN = {
    **{part: {"torch", "lightning", "torchmetrics", "hydra", "omegaconf", "optuna"} for part in TORCHLESS},
    "engine": {"lightning", "hydra", "omegaconf", "optuna"},
    "trainer": {"hydra", "omegaconf", "optuna"},
    "supernets": {"hydra", "omegaconf"},
    "arrays": {"hydra", "omegaconf", "optuna"},
    "hydra_plugins": {"torch", "lightning", "optuna"},
}
STANDARD_LIBRARY_ONLY = {"ir"}
CLOCK_READS = {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"}
WAITS_IN_REAL_TIME = {
    "trainer/fork_launcher.py",
    "arrays/array.py",  # for messages from other ranks
    "arrays/siblings/sibling.py",
    "engine/messages/bulk_transfer.py",  # for chunks, and for connections that close
    "engine/messages/links.py",  # between two attempts to connect
    "engine/messages/local.py",
    "engine/watch",
    "ir/clock.py",
    "trainer/checkpoint/sharded.py",
    "trainer/private_lightning.py",  # compares with times that Lightning has read
    "trainer/ranks/control.py",
    "tune/neighbors.py",  # takes turns with other processes of its core
    "tune/studies/leader_store.py",
    "tune/studies/study.py",  # for the reason why a leader has ended
}
"""Files and folders that wait in real time for another process, a connection or a thread."""


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return every module that the file imports, also inside functions, with absolute names."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            found += [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return tuple(found)


def files(part: str) -> list[Path]:
    folder = ROOT / part if part in {"strategies", "hydra_plugins"} else ROOT / "lightning_pipes" / part
    found = sorted(folder.rglob("*.py"))
    assert found, f"no Python files in {folder}"
    return found


def ours(module: str) -> str | None:
    """Return the part of lightning_pipes that a module name belongs to, or None for other packages."""
    first, _, rest = module.partition(".")
    return rest.split(".")[0] or None if first == "lightning_pipes" else None


def complaints(part: str, allowed: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files(part)
        for module in imports(path)
        if (ours(module) or part) not in allowed
        or module.split(".")[0] in FORBIDDEN.get(part, ())
        or (part in STANDARD_LIBRARY_ONLY and module.split(".")[0] not in {*sys.stdlib_module_names, "lightning_pipes"})
    ]


@pytest.mark.parametrize("part", LAYERS)
def test_imports_point_down(part: str) -> None:
    allowed = {*LAYERS[: LAYERS.index(part) + 1]}
    if part == "tune":  # the user's entry point, which imports the package itself
        allowed |= {"PipelineStrategy"}
    assert complaints(part, allowed) == []


def room(module: str, layer: str) -> str | None:
    """Return the folder or file of a layer that contains a module.

    The result is None for the layer itself and for modules outside the layer.
    """
    parts = module.split(".")
    return parts[2] if parts[:2] == ["lightning_pipes", layer] and len(parts) > 2 else None


@pytest.mark.parametrize("layer", ROOMS)
def test_rooms_import_from_rooms_below(layer: str) -> None:
    rooms, wrong = ROOMS[layer], []
    for path in files(layer):
        here = room(dotted(path), layer)
        for module in imports(path) if here != "__init__" else ():
            there = room(module, layer)
            if there in rooms and rooms.index(there) > rooms.index(here or ""):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    found = {p.stem for p in (ROOT / "lightning_pipes" / layer).iterdir()} - {"__pycache__", "__init__"}
    assert (wrong, found) == ([], {*rooms})


def dotted(path: Path) -> str:
    """Return the name of the module in a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_no_file_imports_itself_by_way_of_others() -> None:
    of = {dotted(path): path for part in LAYERS for path in files(part) if path.name != "__init__.py"}
    TopologicalSorter({name: {*imports(path)} & {*of} - {name} for name, path in of.items()}).prepare()


def test_strategies_import_from_below_the_line_only() -> None:
    assert complaints("strategies", TORCHLESS) == []


def test_testing_imports_any_layer_but_not_the_schedules() -> None:
    assert complaints("testing", {*LAYERS, "testing"}) == []


def test_hydra_plugins_are_thin() -> None:
    assert complaints("hydra_plugins", {"hydra_plugins", "tune", "import_hook"}) == []
    for path in files("hydra_plugins"):
        assert "__future__" not in set(imports(path)), f"{path}: Hydra runs it before it is in sys.modules"
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists(), "hydra_plugins is a namespace that others share"


def test_the_check_sees_imports_inside_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    folder = tmp_path / "lightning_pipes" / "ir"
    folder.mkdir(parents=True)
    (folder / "bad.py").write_text("def f():\n    import torch.nn\n    from ..engine import stage\n")
    assert [c.split("imports ")[1] for c in complaints("ir", {"ir"})] == [
        "torch.nn",
        "lightning_pipes.engine",
        "lightning_pipes.engine.stage",
    ]


@pytest.mark.parametrize(
    "module",
    ["lightning_pipes", "lightning_pipes.strategies.kfkb", "lightning_pipes.tune.cli", "hydra.core.plugins"],
)
def test_no_torch_is_loaded(module: str) -> None:
    scan = "hydra.core.plugins.Plugins.instance();" if module.startswith("hydra") else ""
    code = f"import sys, {module}; {scan} print([m for m in ('torch', 'lightning', 'optuna') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (found.stdout.strip(), found.stderr) == ("[]", "")


def test_strategies_is_not_a_name_of_its_own() -> None:
    found = subprocess.run([sys.executable, "-c", "import strategies"], capture_output=True, text=True, cwd=ROOT)
    assert "import lightning_pipes.strategies, not strategies" in found.stderr


def reads_time(path: Path) -> bool:
    """Return whether a file reads the module `time`."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module="time"):
                return True
            case ast.Attribute(value=ast.Name(id="time"), attr=attribute) if attribute in CLOCK_READS:
                return True
    return False


def test_the_clock_is_read_in_one_place() -> None:
    found = set()
    for part in (*LAYERS, "strategies", "hydra_plugins"):
        root = ROOT / "lightning_pipes" if part in LAYERS else ROOT
        found |= {path.relative_to(root).as_posix() for path in files(part) if reads_time(path)}
    rooms = {path if path in WAITS_IN_REAL_TIME else path.rpartition("/")[0] for path in found}
    assert rooms == WAITS_IN_REAL_TIME, "use lightning_pipes.ir.clock; or list what waits for another process"
