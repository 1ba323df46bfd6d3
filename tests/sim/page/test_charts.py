"""Check the monitored values on the page and in a record."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.planning.advice import Advice
from lightning_pipes.sim.page import render_page
from lightning_pipes.sim.page.charts import render_charts
from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.sim.records.training_record import Curves
from lightning_pipes.testing.generators import record_of

WAIT, NEVER, ZERO = "host.compute_wait_share", "gpu.power_watts", "host.throttled_cores"
SEEN = Curves((0.0, 1.0, 2.0, 4.0), {WAIT: (0.0, 0.5, None, 0.25), NEVER: (None,) * 4, ZERO: (0.0,) * 4})
QUIET = Curves((0.0, 2.0), {WAIT: (0.0, 0.1), NEVER: (None, None), ZERO: (0.0, 0.0)})


def test_a_line_for_each_rank_with_gaps_where_it_was_missing():
    text = render_charts([SEEN, QUIET])
    assert text.count("<figure>") == 1  # a value that was never measured or always 0 is not shown
    assert "host: compute wait, up to 50%, in 4 s" in text
    lines = re.findall(r'<polyline class="(rank\d)" points="([^"]*)">', text)
    assert lines == [("rank0", "0.0,104.0 100.0,6.0"), ("rank1", "0.0,104.0 200.0,84.4")]
    assert re.findall(r'<circle class="rank0" cx="(.*?)" cy="(.*?)"', text) == [("400.0", "55.0")]
    assert "rank 1" in text


def test_units_in_words():
    values = {
        "gpu.free_bytes": (2.0**30,),
        "gpu.pcie_tx_bytes_per_s": (2.0**20,),
        "pipeline.forward_seconds": (0.002,),
        "host.runnable_count": (3.0,),
        "gpu.power_watts": (350.0,),
        "host.compute_slices_per_s": (40.0,),
        "<b>": (1.0,),
    }
    text = render_charts([Curves((1.0,), values)])
    for words in ("1 GiB", "1 MiB/s", "2 ms", "up to 3,", "350 watts", "40 a second", "&lt;b&gt;"):
        assert words in text, words
    assert text.index("pipeline: forward") < text.index("gpu: free")
    assert "<summary>1 more</summary>" in text


def test_nothing_was_seen():
    assert "no source" in render_charts([Curves(), Curves()])


def test_a_page_has_them_where_there_was_a_monitor():
    record = record_of([2] * 6, 2, 4)
    assert "Metrics from the monitors" not in render_page(record, Advice("Fine."))
    seen = replace(record, monitored=(SEEN, QUIET))
    assert "Metrics from the monitors" in render_page(seen, Advice("Fine."))


def test_records_keep_them(tmp_path):
    record = replace(record_of([2] * 6, 2, 4), monitored=(SEEN, QUIET))
    record.save(tmp_path / "run.json")
    assert RunRecord.load(tmp_path / "run.json").monitored == (SEEN, QUIET)
    data = json.loads((tmp_path / "run.json").read_text())
    data["monitored"][1]["times"] = [2.0, 1.0]
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="must be finite and in ascending order"):
        RunRecord.load(tmp_path / "run.json")
    del data["monitored"]  # as in files of older versions
    (tmp_path / "run.json").write_text(json.dumps(data))
    assert RunRecord.load(tmp_path / "run.json").monitored == ()


def test_mistakes():
    with pytest.raises(InputError, match="has 1 values at 2 times"):
        Curves((0.0, 1.0), {"x": (1.0,)})
    with pytest.raises(InputError, match="1 ranks were monitored, but the plan has 2"):
        replace(record_of([2] * 6, 2, 4), monitored=(SEEN,))
