"""The entry point of the command line, which parses the arguments and runs a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.resources import files

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from lightning_pipes.ir import InputError, short_repr
from lightning_pipes.tune.cli.command import Command
from lightning_pipes.tune.messages import plain_errors
from lightning_pipes.tune.schema import register

COMMANDS = {
    "schedules": "the installed schedules, with settings, bubble and memory on a small example",
    "simulate": "step time, bubble, memory and a timeline of a schedule",
    "profile": "measure the layers of a model on this device",
    "plan": "choose schedule, micro-batches and partition for a model on a cluster",
    "stages": "choose the numbers of stages and replicas of a training without flushes",
    "interference": "measure how much neighbors slow down a stage, and train the predictor of dynpipe",
    "report": "one HTML page about a run, with advice",
    "verify": "also train the first batches of a script in one plain process, and compare",
    "consolidate": "one checkpoint, or safetensors files, from a checkpoint that ranks have written",
    "compare": "the first batch and layer in which two trainings are not bitwise equal",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 1 for failure, or 2 for an invalid command line.

    Args:
        arguments: the arguments of the command line. By default, they are `sys.argv[1:]`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_overview())
        return 0 if given else 2
    name, *rest = given
    if name not in COMMANDS:
        print(f"there is no command {name!r}\n\n{_overview()}", file=sys.stderr)
        return 2
    command: Command = import_module(f"lightning_pipes.tune.cli.{name}").COMMAND
    after: list[str] = []
    if command.script:  # all arguments after the script belong to the script
        start = next((n + 1 for n, word in enumerate(rest) if word.endswith(".py")), len(rest))
        rest, after = rest[:start], rest[start:]
    options = _parser(command).parse_intermixed_args(rest)
    options.arguments = after
    with plain_errors():
        return _run(command, options)


def _run(command: Command, options: argparse.Namespace) -> int:
    overrides = [word for word in options.settings if "=" in word]
    words = [word for word in options.settings if "=" not in word]
    if len(words) != len(command.positionals) and (words or not command.optional):
        expected = " ".join(command.positionals) or "settings only, as name=value"
        print(
            f"lightning-pipes {command.name} takes {expected}; got {' '.join(words) or 'nothing'}. "
            f"Examples: lightning-pipes {command.name} --help",
            file=sys.stderr,
        )
        return 2
    settings = _settings(command, overrides)
    try:
        command.run(settings, words, options)
    except OSError as error:
        raise InputError(f"{short_repr(error.filename)}: {error.strerror}" if error.filename else str(error)) from error
    return 0


def _settings(command: Command, overrides: Sequence[str]) -> DictConfig:
    if command.config is None:
        return DictConfig({})
    register()
    with initialize_config_module("lightning_pipes.conf", version_base="1.3"):
        accepted = [override for override in overrides if override not in command.defaults]
        try:
            return compose(command.config, overrides=accepted)
        except (TypeError, ValueError) as error:  # from Hydra, if a group is set to a number or a list
            raise InputError(f"{' '.join(accepted)}: a setting has a value that can't be read: {error}") from error


def _parser(command: Command) -> argparse.ArgumentParser:
    text = f"{command.about}\n\nexamples:\n" + "\n".join(f"  {line}" for line in command.examples)
    if command.config:
        text += f"\n\nsettings, with their defaults:\n{_defaults(command.config)}"
    parser = argparse.ArgumentParser(
        f"lightning-pipes {command.name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=" ".join(["lightning-pipes", command.name, *_positional_usage(command)]),
    )
    parser.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for flag, (placeholder, about) in command.flags.items():
        if placeholder:
            parser.add_argument(flag, metavar=placeholder, help=about)
        else:
            parser.add_argument(flag, action="store_true", help=about)
    return parser


def _positional_usage(command: Command) -> list[str]:
    settings = ["[name=value ...]", "[options]"]
    if command.script:
        of_script = ["[options]", *command.positionals, "[its arguments]"]
        return [*settings, "or", *of_script] if command.optional else of_script
    return [*command.positionals, *settings]


def _defaults(config: str) -> str:
    """Return the settings file without its list of defaults."""
    lines = (files("lightning_pipes.conf") / f"{config}.yaml").read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if n and line and not line.startswith(("#", "defaults", " ")))
    return "\n".join(f"  {line}".rstrip() for line in lines[start:])


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: lightning-pipes COMMAND [name=value ...] [--json] [--help]",
            "",
            *(f"  {name:{width}}  {about}" for name, about in COMMANDS.items()),
            "",
            "lightning-pipes COMMAND --help shows examples and every setting.",
        ]
    )
