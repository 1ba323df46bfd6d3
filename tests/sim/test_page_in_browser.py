"""Check the page in a browser: it draws, zooms, handles keys and the mouse, loads nothing, and fits its window."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_pipes.planning.advice import Advice, advise_run
from lightning_pipes.sim.page import render_page
from lightning_pipes.testing.generators import record_of
from tests.sim.browser import Browser, chromium, needs_chromium

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return the page of four ranks of which the third is slow."""
    record = replace(record_of([2] * 6 + [4] * 3 + [2] * 3, 4, 8), peaks=(30_000_000,) * 4)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(record, advise_run(record)))
    return path, record


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Return the page of eight ranks with two stages each and 64 micro-batches, which has 4000 events per panel."""
    record = record_of([2] * 16, 8, 64, "interleaved")
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(record, Advice("Nothing is slow.")))
    return path, record


def view(browser: Browser) -> tuple[int, int]:
    return tuple(int(browser.run(f"document.getElementById('timeline').dataset.{name}")) for name in ("from", "to"))


def center(browser: Browser) -> tuple[float, float, float]:
    """Return the middle of the plot at the height of rank 0's measured bar, and the width of the plot."""
    box = browser.run("(({x, y, width}) => [x, y, width])(document.getElementById('timeline').getBoundingClientRect())")
    return box[0] + 60 + (box[2] - 136) / 2, box[1] + 24 + 15, box[2] - 136


@pytest.mark.parametrize("dark", [False, True])
def test_it_draws_without_errors_and_asks_for_nothing(browser, small, tmp_path, dark):
    path, _ = small
    browser.open(path, dark=dark)
    assert browser.logged == []
    assert [url for url in browser.asked if not url.startswith("data:")] == [path.as_uri()]
    assert browser.run("document.querySelectorAll('#timeline path').length") > 20
    ground = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") is not dark
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


@pytest.mark.parametrize("width", [1280, 700, 400])
def test_it_does_not_scroll_sideways(browser, small, large, width):
    for path, _ in (small, large):
        browser.open(path, width=width)
        assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1024, 1300, 1500, 1920])
def test_no_column_of_a_table_is_cut_off(browser, small, large, width):
    """Check that tables need no scrolling at common screen widths, because the last column has the measured memory."""
    for path, _ in (small, large):
        browser.open(path, width=width)
        sizes = browser.run("[...document.querySelectorAll('.wide')].map(t => [t.clientWidth, t.scrollWidth])")
        assert sizes
        assert all(shown == whole for shown, whole in sizes), sizes


def test_the_first_screen_says_what_is_slow_and_what_to_change(browser, small):
    path, _ = small
    browser.open(path, 1280, 720)
    bottom = browser.run("document.querySelector('.advice').getBoundingClientRect().bottom")
    said = browser.run("document.querySelector('.advice').innerText")
    assert bottom < 720
    assert said.startswith("Stage 2 takes 2x the time of the others: move layer")
    assert 'PipelineStrategy("1f1b", microbatches=8, partition=[' in said


def test_every_event_is_drawn_where_it_ran(browser, small):
    """Check that the bars of one color in the drawing are the forwards of all ranks."""
    path, record = small
    browser.open(path)
    path_of_forwards = browser.run(
        "[...document.querySelectorAll('#timeline path')].find(p => p.style.fill === 'var(--F0)').getAttribute('d')"
    )
    drawn = sorted((float(x), float(y.split("h")[0])) for x, y in (p.split() for p in path_of_forwards.split("M")[1:]))
    _, _, plot = center(browser)
    span = max(record.measured.makespan, record.predicted.makespan)
    forwards = [e for e in record.measured.computations if e.instruction.kind == "F"]
    expected = sorted((60 + e.start / span * plot, 24.0 + 30 * e.rank + 5) for e in forwards)
    assert len(drawn) == len(expected)
    for a, b in zip(drawn, expected, strict=True):
        assert a == pytest.approx(b, abs=0.1)


def test_keys_zoom_and_move(browser, small):
    path, _ = small
    browser.open(path)
    browser.run("document.getElementById('timeline').focus()")
    start, end = view(browser)
    browser.press("+")
    inner = view(browser)
    assert inner[1] - inner[0] == pytest.approx((end - start) / 2, rel=1e-3)
    browser.press("ArrowRight")
    moved = view(browser)
    assert moved[0] - inner[0] == pytest.approx((end - start) / 8, rel=1e-3)
    browser.press("-")
    browser.press("ArrowLeft")
    browser.press("0")
    assert view(browser) == (start, end)
    browser.press("-")  # the whole timeline is already visible
    assert view(browser) == (start, end)


def test_the_wheel_zooms_where_the_mouse_is_and_the_page_scrolls_without_focus(browser, small):
    path, _ = small
    browser.open(path, height=500)
    x, y, _ = center(browser)
    before = view(browser)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    browser.run("new Promise(done => setTimeout(done, 100))")
    assert view(browser) == before
    browser.mouse("mouseMoved", x, y)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200, modifiers=2)  # with Ctrl
    browser.until(f"document.getElementById('timeline').dataset.to !== '{before[1]}'")
    inner = view(browser)
    assert sum(inner) / 2 == pytest.approx(sum(before) / 2, rel=0.01)
    assert inner[1] - inner[0] < 0.9 * (before[1] - before[0])


def test_dragging_moves(browser, small):
    path, _ = small
    browser.open(path)
    browser.run("document.getElementById('timeline').focus()")
    browser.press("+")
    browser.press("+")
    before = view(browser)
    x, y, plot = center(browser)
    browser.mouse("mousePressed", x, y)
    browser.mouse("mouseMoved", x - plot / 10, y, buttons=1)
    browser.mouse("mouseReleased", x - plot / 10, y)
    after = view(browser)
    assert after[0] - before[0] == pytest.approx((before[1] - before[0]) / 10, rel=0.02)


def test_hovering_tells_the_instruction_and_its_times(browser, small):
    path, record = small
    browser.open(path)
    x, y, plot = center(browser)
    first = next(e for e in record.measured.computations if e.rank == 0)
    span = max(record.measured.makespan, record.predicted.makespan)
    browser.mouse("mouseMoved", x - plot / 2 + plot * (first.start + first.end) / 2 / span, y)
    said = browser.run("document.getElementById('tip').innerText")
    assert said.splitlines()[:3] == [
        "forward, stage 0, micro-batch 0 (samples 0 to 3)",
        "on rank 0, measured",
        "6.12 ms: from 0 ns to 6.12 ms",
    ]
    assert "predicted: " in said
    assert not browser.run("document.getElementById('tip').hidden")


def test_the_keyboard_walks_through_instructions(browser, small):
    path, _ = small
    browser.open(path)
    browser.run("document.getElementById('timeline').focus()")
    told = "document.getElementById('told').innerText"
    browser.press(".")
    assert browser.run(told).startswith("forward, stage 0, micro-batch 0")
    browser.press(".")
    assert browser.run(told).startswith("forward, stage 0, micro-batch 1")
    browser.press("ArrowDown")
    assert "on rank 1, measured" in browser.run(told)
    for _ in range(3):
        browser.press("ArrowDown")
    assert "on rank 0, predicted" in browser.run(told)


def test_a_large_timeline_still_answers(browser, large):
    path, record = large
    browser.open(path)
    assert len(record.measured.events) > 3500
    slowest = browser.run("""(() => {
        const host = document.getElementById('timeline');
        const times = ['+', '+', 'ArrowRight', 'ArrowRight', '-', '-', '0'].map((key) => {
            const started = performance.now();
            host.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
            host.getBoundingClientRect();
            return performance.now() - started;
        });
        return Math.max(...times);
    })()""")
    assert slowest < 500  # milliseconds; about 20 on an idle machine
    assert browser.run("document.querySelectorAll('#timeline *').length") < 3000
