"""The first lines of docs/supernets.md run as they are."""

from __future__ import annotations

from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "supernets.md"


def test_the_first_lines_run(tmp_path: Path) -> None:
    code = PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(96, 64), torch.randint(10, (96,)))
    names = {"data": data, "__name__": "page"}
    quiet = "max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False"
    code = code.replace("max_epochs=2", f"{quiet}, default_root_dir={str(tmp_path)!r}")
    exec(code, names)
    assert names["stream"].next == names["trainer"].global_step == 6  # type: ignore[attr-defined]
