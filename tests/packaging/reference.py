"""Write the pages of docs/reference that list settings, commands and Hydra groups.

Usage:

    python -m tests.packaging.reference
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import InputError
from lightning_pipes.ir.registry import installed_schedules, make_schedule
from lightning_pipes.tune.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
NOTE = "`python -m tests.packaging.reference` writes this page"
FIRST_THEME = "the schedule and the cut"
"""The theme of the arguments before the first comment in the signature."""
TRIED: Mapping[str, Mapping[str, Any]] = {
    "partition": {"partition": [2]},
    "verify": {"verify": 2},
    "loss": {"loss": "batch"},
    "shard_optimizer": {"shard_optimizer": True, "data_parallel": 2},
    "microbatches_by": {"microbatches_by": "tokens"},
    "replan": {"replan": True},
    "stages": {"stages": "auto"},
    "stale_gradients": {"stale_gradients": True},
}
"""For each setting that some schedules refuse, arguments that are tried with every schedule."""
OVERLAPPING = {name for name in installed_schedules() if not make_schedule(name).flushes}
REFUSED_BY_RUN = {
    "loss": OVERLAPPING | {"interleaved", "hanayo", "v"},
    "verify": OVERLAPPING - {"csp"},
    "tensor_parallel": {"csp"},
    "shard_optimizer": OVERLAPPING,
}
"""The schedules that refuse a setting when a run starts, and not when the strategy is made."""


def list_themes() -> Iterator[tuple[str, str]]:
    """Yield each argument of PipelineStrategy with its theme, which is a comment in the signature."""
    source = inspect.getsource(PipelineStrategy.__init__)
    theme = FIRST_THEME
    for line in source[: source.index("-> None:")].splitlines():
        if comment := re.fullmatch(r"\s+# (.+)", line):
            theme = comment[1]
        elif argument := re.match(r"\s+(\w+): ", line):
            yield argument[1], theme


def describe_arguments() -> dict[str, str]:
    """Return the description of each argument in the docstring of PipelineStrategy."""
    text = inspect.getdoc(PipelineStrategy) or ""
    arguments = text.split("\nArgs:\n")[1].split("\n\nRaises:")[0]
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", arguments, re.MULTILINE)
    return {name: " ".join(described.split()) for name, described in found}


def list_schedules(setting: str) -> str:
    """Return the schedules with which a setting works."""
    everything = [*sorted(installed_schedules()), "auto"]
    refused = set(REFUSED_BY_RUN.get(setting, ()))
    for name in everything if setting in TRIED else ():
        try:
            PipelineStrategy(name, **TRIED[setting])
        except InputError:
            refused.add(name)
    if not refused:
        return "all"
    allowed = [name for name in everything if name not in refused]
    few = allowed if len(allowed) <= len(refused) else [name for name in everything if name in refused]
    return ("" if few is allowed else "all except ") + ", ".join(f"`{name}`" for name in few)


def show_default(value: object) -> str:
    if isinstance(value, timedelta):
        return f"{value.total_seconds() / 60:g} minutes"
    return f"`{value!r}`".replace("'", '"')


def make_settings_page() -> str:
    """Return the page with all arguments of PipelineStrategy, from its signature and docstring."""
    parameters = inspect.signature(PipelineStrategy.__init__).parameters
    described = describe_arguments()
    lines = [
        "# Settings of PipelineStrategy\n",
        "All arguments after `microbatches` are keyword-only. *Schedules* lists the schedules with which a value other",
        'than the default works; for `loss`, the value `"batch"`. [Limits](../limits.md) lists further combinations',
        f"that are refused. {NOTE} from the signature and the docstring.",
    ]
    shown = ""
    for name, theme in list_themes():
        if theme != shown:
            lines += [f"\n## {theme[0].upper()}{theme[1:]}\n"]
            lines += ["| setting | default | schedules | meaning |", "| --- | --- | --- | --- |"]
            shown = theme
        meaning = described[name]
        meaning = (meaning[0].upper() + meaning[1:]).replace("|", "\\|")
        meaning = meaning.replace("see docs/verify.md", "see [verify](../verify.md)")
        cells = f"`{name}`", show_default(parameters[name].default), list_schedules(name), meaning
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def make_command_page() -> str:
    """Return the page with the help of each command."""
    lines = [
        "# The command line\n",
        "This page shows `lightning-pipes COMMAND --help`. [Reports, scalars and the command line](../seeing.md)",
        f"explains how the commands work together. {NOTE}.",
    ]
    for command in COMMANDS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit), patch.dict(os.environ, COLUMNS="110"):
            main([command, "--help"])
        lines += [f"\n## {command}\n", "```text", out.getvalue().rstrip(), "```"]
    return "\n".join(lines) + "\n"


def make_hydra_page() -> str:
    """Return the page with the options of each Hydra group and their settings."""
    lines = [
        "# Hydra groups\n",
        "This page shows the groups of `pkg://lightning_pipes.conf` with their options. A comment after a setting",
        "names other values or the unit. [Hydra](../hydra.md) shows how to use the groups, and [job",
        f"arrays](../arrays.md#hydra) lists the settings of the launcher and the sweeper. {NOTE}.",
    ]
    for group in sorted(path for path in (ROOT / "conf").iterdir() if [*path.glob("*.yaml")]):
        lines.append(f"\n## {group.name}")
        for option in sorted(group.glob("*.yaml")):
            text = option.read_text()
            about = " ".join(re.findall(r"^# (.+)$", text.split("defaults:")[0], re.MULTILINE))
            settings = text.split("- _self_\n")[-1].strip()
            lines += [f"\n### {group.name}={option.stem}\n", f"{about}\n", "```yaml", settings, "```"]
    return "\n".join(lines) + "\n"


PAGES = {
    "settings.md": make_settings_page,
    "command_line.md": make_command_page,
    "hydra_groups.md": make_hydra_page,
}

if __name__ == "__main__":
    for name, make_page in PAGES.items():
        (FOLDER / name).write_text(make_page())
