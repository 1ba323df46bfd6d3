"""The command line: `lightning-pipes schedules | simulate | profile | plan | report`."""

from lightning_pipes.tune.cli.main import main

__all__ = ["main"]
