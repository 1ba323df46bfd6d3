"""Check that the pages of docs/reference agree with the code."""

from __future__ import annotations

import inspect
import re

import pytest

from lightning_pipes import PipelineStrategy
from tests.packaging.reference import FOLDER, PAGES, ROOT, describe_arguments, list_themes


@pytest.mark.parametrize("name", PAGES)
def test_page_agrees_with_the_code(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run: python -m tests.packaging.reference"


def test_every_setting_has_a_theme_and_a_description() -> None:
    arguments = {*inspect.signature(PipelineStrategy.__init__).parameters} - {"self"}
    assert {name for name, _ in list_themes()} == arguments
    assert {*describe_arguments()} == arguments


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    """Check this here, too, because building the site takes longer."""
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {*listed} >= {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    made = {"docs/reference/messages.md"}  # only in the site
    assert [page for page in listed if page not in made and not (ROOT / page).is_file()] == []
