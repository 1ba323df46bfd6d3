"""The command line `lightning-pipes COMMAND`. `main.COMMANDS` lists all commands."""

from lightning_pipes.tune.cli.main import main

__all__ = ["main"]
