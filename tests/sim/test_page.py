"""Check that the page is complete, self-contained, and safe for any names that it contains."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from lightning_pipes.cost import Regime
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import Kind
from lightning_pipes.planning.advice import Advice, advise_run
from lightning_pipes.sim import compare_timelines, simulate
from lightning_pipes.sim.page import render_page
from lightning_pipes.sim.records.compare import BottleneckRank
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import record_of, uniform

RECORD = record_of([2] * 6 + [4] * 3 + [2] * 3, 4, 8)
NOTHING = Advice("Nothing is slow.")


class Elements(HTMLParser):
    """Collects the tags with their attributes and the tags that are still open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def data_of(text: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def test_a_window_of_overlapping_batches_is_not_a_step():
    record = record_of([2] * 12, 4, 4, "dynpipe")
    text = render_page(record, NOTHING)
    step = seconds_text(record.measured.makespan / record.measured.batches)
    assert record.measured.batches > 1
    assert f"<b>{step}</b><span>a step of the pipeline, of {record.measured.batches} batches that overlap" in text
    assert f"a step of {step}" in text
    assert f"{record.measured.batches} batches that overlap: " in str(
        compare_timelines(record.predicted, record.measured)
    )


def test_inputs_that_waited_are_in_the_report_the_page_and_the_advice():
    """Check the waiting inputs of an example by hand, in the report, on the page and in the advice.

    The schedule is 1F1B with f = 10 and b = 20. Messages take 30 ns and are sent one at a time.

    Stage 1 starts F0 at 40 after waiting 40, F1 at 70 without waiting, F2 at 160 after waiting 60, and F3 at 190
    without waiting. Stage 0 starts B0 at 100 after waiting 80, B1 at 130 without waiting, B2 at 220 after waiting 60,
    and B3 at 250 after waiting 10. A stage counts as full from its first backward to its last forward: for F1 to F3 on
    stage 1, and for B0 and B1 on stage 0.
    """
    plan, costs = uniform(2, 4, f=10, b=20, link=30)
    ran = simulate(OneFOneB().program(plan), plan, costs)
    record = replace(record_of([1, 1], 2, 4), predicted=ran, measured=ran, replayed=ran)
    assert sorted(record.queues_text.splitlines()) == [
        "stage 0, gradients: 0.2 waited on average, slack 0; 3 of 4 launches stalled, 150 ns in all",
        "stage 1, activations: 0.5 waited on average, slack 0; 2 of 4 launches stalled, 100 ns in all",
    ]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", render_page(record, NOTHING), re.DOTALL)
    cells = [re.sub(r"<[^>]*>", "", row.replace("<td", "|<td")).split("|")[1:] for row in rows]
    assert ["0", "gradients", "0.2", "0", "3 of 4", "150 ns"] in cells
    assert ["1", "activations", "0.5", "0", "2 of 4", "100 ns"] in cells
    assert any(
        note.startswith(
            "While the pipeline was full, stage 0 found no gradient at 1 of 2 launches and waited 80 ns: the stage or"
        )
        for note in advise_run(record).notes
    )
    plan, costs = uniform(2, 8, f=10, b=20, link=1)
    ran = simulate(KFKB(4).program(plan), plan, costs)
    notes = advise_run(replace(record_of([1, 1], 2, 8), predicted=ran, measured=ran, replayed=ran)).notes
    assert any("an input waited at every launch: no rank stalled" in note for note in notes)


def test_it_needs_nothing_else():
    elements = Elements(render_page(RECORD, advise_run(RECORD)))
    assert elements.open == []
    for tag, attributes in elements.found:
        for name in ("src", "href", "action", "data"):
            assert (attributes.get(name) or "data:").startswith("data:"), f"<{tag} {name}={attributes[name]}>"
    text = render_page(RECORD, NOTHING)
    # an XML namespace, not a resource
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text


def test_it_holds_every_event():
    data = data_of(render_page(RECORD, NOTHING))
    assert [panel["name"] for panel in data["panels"]] == ["measured", "predicted", "replayed"]
    shown = (RECORD.measured, RECORD.predicted, RECORD.replayed)
    for panel, timeline in zip(data["panels"], shown, strict=True):
        columns = panel["events"]
        found = zip(columns["rank"], columns["kind"], columns["stage"], columns["span"], columns["start"], strict=True)
        held = [
            (rank, data["kinds"][kind], stage, *data["spans"][span], start) for rank, kind, stage, span, start in found
        ]
        assert held == [
            (e.rank, e.instruction.kind, e.instruction.stage, *e.instruction.span, e.start) for e in timeline.events
        ]
        assert [a + b for a, b in zip(columns["start"], columns["took"], strict=True)] == [
            e.end for e in timeline.events
        ]
    assert data["slow"] == 2
    assert data["memory"]["peaks"] == list(RECORD.peak_bytes)


def test_names_can_hold_anything():
    evil = "</script><img src=x onerror=alert(1)> & \"'"
    record = replace(
        RECORD,
        facts={evil: evil},
        choice=evil,
        profile=replace(RECORD.profile, layers=tuple(replace(x, name=evil) for x in RECORD.profile.layers)),
    )
    elements = Elements(render_page(record, Advice(evil, notes=(evil,))))
    assert elements.open == []
    assert "img" not in {tag for tag, _ in elements.found}
    measured = replace(RECORD.measured, name=evil)
    assert Elements(render_page(replace(RECORD, measured=measured), NOTHING)).open == []


def test_why_it_was_chosen():
    assert "<pre>gpipe 3 ms\nkfkb 4 ms</pre>" in render_page(replace(RECORD, choice="gpipe 3 ms\nkfkb 4 ms"), NOTHING)
    assert "<pre>" not in render_page(RECORD, NOTHING)


def test_a_plan_has_one_panel_and_says_that_nothing_ran():
    text = render_page(replace(RECORD, measured=None, replayed=None), NOTHING)
    assert [panel["name"] for panel in data_of(text)["panels"]] == ["predicted"]
    assert "Pipeline plan: 1f1b" in text
    assert "before it ran" not in text
    assert "replayed" not in text.lower().partition("<script>")[0]


def test_without_bytes_there_is_no_memory_curve():
    costs = replace(RECORD.costs, activation_bytes=(), weight_bytes=(), state_bytes=(), working_bytes=())
    bare = replace(RECORD, costs=costs, replayed=replace(RECORD.replayed, peak_bytes=(0,) * 4))
    text = render_page(bare, NOTHING)
    assert data_of(text)["memory"] is None
    assert "tensors" not in text


def test_a_limit_is_shown_where_it_is_near():
    near = data_of(render_page(replace(RECORD, memory=(150 * 2**20,) * 4), NOTHING))["memory"]
    far = data_of(render_page(replace(RECORD, memory=(2**40,) * 4), NOTHING))["memory"]
    assert near["most"] == 150 * 2**20 > far["most"] == max(far["peaks"])


class TestSlowest:
    def test_of_one_stage_a_rank(self):
        slow = BottleneckRank.from_timeline(RECORD.measured)
        assert (slow.rank, slow.stages, slow.is_uneven) == (2, (2,), True)
        assert slow.ratio == pytest.approx(2.0, rel=1e-3)
        assert str(slow) == "Stage 2 takes 2x the time of the others"
        seconds = sum(e.end - e.start for e in RECORD.measured.events if e.instruction.kind in (Kind.F, Kind.B))
        assert sum(slow.by_stage) == pytest.approx(seconds / 1e9)

    def test_of_several_stages_a_rank(self):
        slow = BottleneckRank.from_timeline(record_of([2, 2, 2, 4, 2, 2, 2, 4], 4, 8, "interleaved").measured)
        assert str(slow) == "Rank 3 (stages 3, 7) takes 2x the time of the others"

    def test_of_equal_stages(self):
        slow = BottleneckRank.from_timeline(record_of([2, 2], 2, 8).measured)
        assert not slow.is_uneven
        assert str(slow).startswith("No stage is slow: stage ")
        assert str(slow).endswith("takes 1x the time of the other")

    def test_of_one_rank(self):
        assert str(BottleneckRank.from_timeline(record_of([2, 2], 1, 8).measured)) == "There is one rank only"


def test_the_regime_of_the_prediction_and_its_meaning():
    record = RECORD
    for regime in ("asynchronous", "shared"):
        plan, costs = record.plan, replace(record.costs, regime=regime)
        ran = simulate(record.replayed.program(), plan, costs)
        shown = replace(record, predicted=replace(ran, name="predicted"), replayed=replace(ran, name="replayed"))
        text = render_page(shown, NOTHING)
        assert f"Simulated with {Regime(regime).label}: {Regime(regime).description}." in text
        headings = [panel["heading"] for panel in data_of(text)["panels"]]
        assert [Regime(regime).label in heading for heading in headings] == [False, True, True]


def tiles_of(text: str) -> dict[str, str]:
    """Return the values of the tiles of a page by their captions."""
    return {words: value for value, words in re.findall(r'class="tile"><b>(.*?)</b><span>(.*?)</span>', text)}


def test_a_prediction_is_not_the_replay():
    """Check that the page separates the prediction from the replay.

    The predicted step is twice as long as the measured one. The replay uses the measured times, so its step agrees with
    the measured one.
    """
    wrong = record_of([4] * 6 + [8] * 3 + [4] * 3, 4, 8).predicted
    text = render_page(replace(RECORD, predicted=wrong), NOTHING)
    off = wrong.makespan / RECORD.measured.makespan - 1
    assert off > 0.9
    assert tiles_of(text)[f"a step as predicted before it ran ({off:+.0%})"] == seconds_text(wrong.makespan)
    _, predicted, replayed = (panel["heading"] for panel in data_of(text)["panels"])
    assert predicted.startswith(f"{seconds_text(wrong.makespan)}, before it ran")
    assert replayed.startswith(f"{seconds_text(RECORD.replayed.makespan)}, from the measured time of each operation")
    assert RECORD.replayed.makespan == pytest.approx(RECORD.measured.makespan, rel=1e-3)


def test_page_reports_a_missing_prediction():
    why = "the layers were not measured before training"
    text = render_page(replace(RECORD, predicted=None, unpredicted=why), NOTHING)
    assert tiles_of(text)[why] == "No prediction"
    assert [panel["name"] for panel in data_of(text)["panels"]] == ["measured", "replayed"]
    assert "bubble, predicted" not in text


def test_a_page_has_one_bubble_for_one_step():
    """Check that a page shows a single bubble for the measured step, in the tile and in the table of ranks.

    Simulated bubbles are labeled as simulated.
    """
    text = render_page(RECORD, advise_run(RECORD))
    bubble = f"{RECORD.bubble:.1%}"
    assert tiles_of(text)["bubble: the mean share of the step in which ranks idle"] == bubble
    rows = [re.sub(r"<[^>]*>", "|", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", text, re.DOTALL)]
    (as_measured,) = [row for row in rows if "as measured" in row]
    assert bubble in as_measured
    assert any("as it is, simulated" in row for row in rows)


def test_changes_are_listed_with_the_samples_that_a_rank_holds():
    """Check the numbers of samples, by which the advice chooses between changes that are equally fast."""
    advice = advise_run(RECORD)
    (table,) = [
        each for each in re.findall(r"<table>(.*?)</table>", render_page(RECORD, advice), re.S) if "paste" in each
    ]
    heads, _, *rows = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", table, re.S))
    held = [row[heads.index("samples held")] for row in rows]
    assert held == [f"{change.held:g}" for change in (advice.now, *advice.changes[:12])]
    assert len({*held}) > 1


def test_resident_memory_and_tensors_are_not_compared():
    peaks = (28_900_000,) * 4
    cpu, gpu = (replace(RECORD, peaks=peaks, memory=memory) for memory in ((None,) * 4, (2**36,) * 4))
    tensors, resident = cpu.memory_text.split(". Resident memory of the processes, excluding imports: ")
    assert tensors.startswith("Estimated peak memory of tensors: ")
    assert "For the same batch, the estimate is " in tensors
    assert "27.6 MiB" in resident
    assert "for one process" not in resident
    assert ". Peak memory allocated on GPUs: 27.6 MiB on rank 0" in gpu.memory_text
    assert "process at most" in render_page(cpu, NOTHING)
    assert "allocated at most" in render_page(gpu, NOTHING)


def test_a_sibling_has_no_bubble_of_its_own():
    text = render_page(replace(RECORD, siblings=3), NOTHING)
    body = text.partition('<script type="application/json"')[0]
    assert "bubble" not in body.replace("no bubble of its own", "").replace("has the bubble of all siblings", "")
    assert "idle" not in body.partition("</style>")[2]
    assert not any(panel["bubble"] for panel in data_of(text)["panels"])
    assert replace(RECORD, siblings=3).bubble is None


def test_steps_that_scatter():
    rare = {(kind, s): (1.0,) * 9 + (20.0,) for kind in (Kind.F, Kind.B) for s in range(RECORD.plan.n_stages)}
    assert "if operations vary as measured" in render_page(
        replace(RECORD, costs=replace(RECORD.costs, scatter=rare)), NOTHING
    )
    assert "if operations vary" not in render_page(RECORD, NOTHING)
