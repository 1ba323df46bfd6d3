"""The command line: `lightning-pipes schedules | simulate | profile | plan | report | compare`."""

from lightning_pipes.tune.cli.main import main

__all__ = ["main"]
