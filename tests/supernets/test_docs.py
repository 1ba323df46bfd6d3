"""Test that the first example of docs/supernets.md runs on two processes, and that its subnets overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_pipes.ir import Kind
from lightning_pipes.testing.ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "supernets.md"


def run_page(rank: int, directory: str) -> tuple[list[int], bool, float]:
    """Run the example, and return the steps and subnets, whether subnets overlapped, and the sum of all weights."""
    code = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(96, 64), torch.randint(10, (96,)))
    names: dict[str, Any] = {"data": data, "__name__": "page"}
    quiet = "max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False"
    exec(code.replace("max_epochs=2", f"{quiet}, default_root_dir={directory!r}"), names)
    events = names["strategy"].report.measured.events if rank == 0 else ()
    started = {e.instruction.batch: e.start for e in reversed(events) if e.instruction.kind is Kind.F}
    stepped = {e.instruction.batch: e.end for e in events if e.instruction.kind is Kind.STEP}
    overlap = any(started[n + 1] < stepped[n] for n in stepped if n + 1 in started)
    total = sum(float(p.double().sum()) for p in names["module"].parameters())
    return [names["trainer"].global_step, names["stream"].next], overlap, total


def test_the_first_lines_run(tmp_path: Path) -> None:
    overlaps = False
    for _ in range(4):  # on a busy machine, the processes may run one after the other for a whole run
        first, second = run_ranks(run_page, 2, str(tmp_path), timeout=100)
        assert first[0] == second[0] == [6, 6]
        assert first[2] == second[2]
        overlaps = overlaps or first[1]
        if overlaps:
            break
    assert overlaps
