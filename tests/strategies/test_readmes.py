"""Check that pages with code and its output, such as every README of a schedule, show what the code prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import lightning_pipes.strategies

HOME = Path(lightning_pipes.strategies.__file__).resolve().parent
PAGES = sorted(HOME.glob("*/README.md"))
OTHERS = [Path(__file__).parents[2] / "docs" / "large_models.md"]


@pytest.mark.parametrize(
    "page", PAGES + OTHERS, ids=[*(page.parent.name for page in PAGES), *(page.stem for page in OTHERS)]
)
def test_page_shows_what_its_code_prints(page):
    """Run each Python block of a page and compare its output with the text block that follows it.

    Other blocks are ignored.
    """
    pairs = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for code, shown in pairs:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, {})
        assert "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines()) + "\n" == shown


def test_there_are_pages():
    assert {page.parent.name for page in PAGES} >= {"gpipe", "one_f_one_b", "interleaved", "kfkb"}
