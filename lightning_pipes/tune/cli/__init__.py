"""The command line `lightning-pipes COMMAND`; `main.COMMANDS` lists what there is."""

from lightning_pipes.tune.cli.main import main

__all__ = ["main"]
