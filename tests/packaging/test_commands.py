"""Check that the commands that pages show exist and accept the arguments that the pages show."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_pipes.tune.cli.main import COMMANDS, _parser, _settings
from lightning_pipes.tune.schema import register

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def list_commands() -> Iterator[str]:
    """Yield each command on a line of its own, without its comment, once."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = re.sub(r" *\\\n *", " ", page.read_text())
        for line in re.findall(r"^ *(?:srun )?((?:lightning-pipes|python|torchrun|make) [^|\n]+)$", text, re.MULTILINE):
            command = re.sub(r"\s{2,}[#(].*", "", line)
            if re.match(r"lightning-pipes [a-z]|python examples/|torchrun .*examples/|make [a-z]", command):
                found[command] = None
    yield from found


def check_script(script: str, arguments: list[str]) -> None:
    """Check that a script of examples/ has these flags, or these settings if it is an app of Hydra."""
    text = (ROOT / "examples" / script).read_text()
    if "@hydra.main" not in text:
        assert [a for a in arguments if a.startswith("--") and f'"{a}"' not in text] == []
        return
    parsed = OverridesParser.create().parse_overrides([a for a in arguments if not a.startswith("-")])
    overrides = [f"{o.key_or_group}=???" if o.is_sweep_override() else o.input_line or "" for o in parsed]
    register()
    sys.path.insert(0, str(ROOT / "examples"))
    import_module("settings").register()
    (name,) = re.findall(r'config_name="(\w+)"', text)
    with initialize_config_dir(str(ROOT / "examples" / "conf"), version_base="1.3"):
        compose(name, overrides)


@pytest.mark.parametrize("command", [*list_commands()])
def test_command(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets
    elif program == "lightning-pipes":
        name, *rest = words
        assert name in COMMANDS
        kind = import_module(f"lightning_pipes.tune.cli.{name}").COMMAND
        if kind.script and any(word.endswith(".py") for word in rest):  # the arguments after it belong to the script
            rest = rest[: next(n for n, word in enumerate(rest) if word.endswith(".py")) + 1]
        options = _parser(kind).parse_intermixed_args(rest)
        _settings(kind, [word for word in options.settings if "=" in word])
    else:
        start = next(n for n, word in enumerate(words) if word.startswith("examples/"))
        check_script(words[start].removeprefix("examples/"), words[start + 1 :])


def test_there_are_commands() -> None:
    assert len([*list_commands()]) > 30
