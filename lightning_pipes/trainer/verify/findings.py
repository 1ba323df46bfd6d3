"""The results of comparisons, in a file for the command `lightning-pipes verify`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FINDINGS_VARIABLE = "LIGHTNING_PIPES_VERIFY_FINDINGS"
"""The environment variable with the file; training ends after the batches that are compared where it is set."""


@dataclass(frozen=True)
class Finding:
    """The result of one comparison, as a sentence."""

    equal: bool
    text: str


def save_finding(finding: Finding) -> None:
    """Append a result to the file, if there is one."""
    path = os.environ.get(FINDINGS_VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(finding)) + "\n")


def load_findings(path: Path) -> list[Finding]:
    """Return the results in a file; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Finding(**json.loads(line)) for line in lines]


def is_awaited() -> bool:
    """Whether a command waits for the result, and for nothing after it."""
    return bool(os.environ.get(FINDINGS_VARIABLE))
