"""Check that docs/architecture.md agrees with the source."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
HOME = ROOT / "lightning_pipes"
DRAWN = [line for line in PAGE.split("```")[1].splitlines() if re.search(r"\S {2,}\w+/", line)]
FILES = sorted(set(re.findall(r"`([\w/]+\.py)`", PAGE)))
NAMED = re.findall(r"`(\w+(?:\.\w+)+)` (?:and `(\w+(?:\.\w+)+)` )?in `([\w/]+\.py)`", PAGE)


def the_one(place: str) -> list[Path]:
    """Return the files that a path in the page refers to; the path may omit its parent folders."""
    return [path for path in HOME.rglob("*") if f"/{path.relative_to(ROOT)}".endswith(f"/{place.rstrip('/')}")]


@pytest.mark.parametrize("line", DRAWN)
def test_called_functions_are_in_their_files(line):
    names, place = re.match(r" *(.+?) {2,}(\w+/[\w/.]*)", line).groups()
    (path,) = [path for path in the_one(place) if "strategies" not in path.parts]
    sources = [path] if path.suffix == ".py" else sorted(path.glob("*.py"))
    source = "\n".join(each.read_text(encoding="utf-8") for each in sources)
    for name in re.split(r", ", names):
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b", source), f"{part} is not in {path}"


@pytest.mark.parametrize("place", FILES)
def test_files_are_there(place):
    assert the_one(place), f"nothing is called {place}"


@pytest.mark.parametrize(("one", "other", "place"), NAMED)
def test_functions_are_there(one, other, place):
    (path,) = the_one(place)
    for name in filter(None, (one, other)):
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b", path.read_text(encoding="utf-8")), f"{part} is not in {path}"


def test_every_room_is_in_the_table():
    """Check the folders below each layer except private ones, and the strategies."""
    table = PAGE.split("## Layers and rooms")[1].split("## Where is")[0]
    for layer in ("sim", "engine", "trainer", "arrays", "tune"):
        for room in (HOME / layer).iterdir():
            if room.is_dir() and (room / "__init__.py").exists():
                assert f"`{room.name}/`" in table, f"{layer}/{room.name} is not on the page"
