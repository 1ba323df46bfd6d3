"""Fixtures of the tests of commands."""

from __future__ import annotations

import pytest

from lightning_pipes.testing.generators import record_of
from lightning_pipes.tune.cli import main
from tests.tune.cli.calls import Say


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that runs a command and returns its output.

    The command must succeed without output on stderr.
    """

    def run(*arguments: str) -> str:
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a profile with eight layers."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    made = record_of([2, 2, 2, 6, 4, 2, 4, 2], 2, 4).profile
    assert made is not None
    made.save(path)
    return str(path)
