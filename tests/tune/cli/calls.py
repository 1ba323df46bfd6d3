"""Functions that call commands in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_pipes.tune.cli import main

ROOT = Path(__file__).parents[3]
Say = Callable[..., str]


def found(say: Say, *arguments: str) -> dict[str, Any]:
    """Return the JSON output of a command."""
    text = say(*arguments, "--json")
    assert text.count("\n") == 1
    return dict(json.loads(text))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the message of a command that is refused."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, str)  # the interpreter prints it, and exits with 1
    assert capsys.readouterr().out == ""
    return ended.value.code.strip()
