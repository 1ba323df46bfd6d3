"""Tests for the command line as a whole: help, exit codes and imports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest
import yaml

from lightning_pipes.tune import schema
from lightning_pipes.tune.cli import main
from lightning_pipes.tune.cli.main import COMMANDS
from tests.tune.cli.calls import ROOT, Say


class TestMain:
    def test_help(self, say: Say) -> None:
        assert all(name in say("--help") for name in COMMANDS)

    @pytest.mark.parametrize("arguments", [[], ["plam"], ["report"], ["schedules", "kfkb"]])
    def test_invalid_arguments_end_with_2(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(arguments) == 2

    def test_unknown_flags_end_with_2(self) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--nonsense"])
        assert ended.value.code == 2

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_has_help_with_examples(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert f"  lightning-pipes {name}" in out
        assert "--json" in out
        if name in schema.SCHEMAS:
            assert "settings, with their defaults:" in out

    def test_as_a_process(self) -> None:
        command = [sys.executable, "-m", "lightning_pipes", "simulate", "schedule=kfbk"]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert ended.returncode == 1
        assert "there is no such schedule. Did you mean 'kfkb'?" in ended.stderr
        assert "Traceback" not in ended.stderr

    def test_torch_stays_unloaded(self) -> None:
        code = "import sys, lightning_pipes.tune.cli as c; c.main(['simulate']); print('torch' in sys.modules)"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert ended.stdout.splitlines()[-1] == "False", ended.stderr


@pytest.mark.parametrize("name", ["plan", "simulate", "profile"])
def test_settings_files_hold_what_the_schema_takes(name: str) -> None:
    written = yaml.safe_load((ROOT / "conf" / f"{name}.yaml").read_text())
    groups = {key for each in written.pop("defaults") if isinstance(each, dict) for key in each}
    assert set(written) | groups == {f.name for f in fields(schema.SCHEMAS[name])}
