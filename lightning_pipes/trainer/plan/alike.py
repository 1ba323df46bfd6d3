"""All ranks have made the strategy from the same arguments."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_pipes.ir import InputError
from lightning_pipes.planning.formatting import schedule_settings
from lightning_pipes.trainer.plan.request import RunRequest
from lightning_pipes.trainer.plan.settings import Settings
from lightning_pipes.trainer.ranks.control import Control

_SETTINGS = ("module", "seed", "transport", "sharded", "gather", "check_loss", "verify", "moves")


def said(request: RunRequest, settings: Settings) -> dict[str, str]:
    """The arguments that have to be the same on all ranks, by name."""
    args = schedule_settings(request.schedule)
    return {
        "schedule": "auto" if request.chooses else request.schedule.name,
        "schedule_args": repr({name: args[name] for name in sorted(args)}),
        **{name: repr(getattr(request, name)) for name in ("microbatches", "recompute", "partition")},
        "replan": repr(request.replanner),
        **{name: repr(getattr(settings, name)) for name in _SETTINGS},
    }


def check_alike(arguments: Mapping[str, str], control: Control) -> None:
    """Compares what all ranks were told. Collective.

    Raises:
        InputError: one was told something else than rank 0, and ranks would wait for different things.
    """
    found = control.all_gather(dict(arguments))
    for rank, other in zip(control.ranks, found, strict=True):
        different = [
            f"{name}={other[name]}, rank {control.ranks[0]} {value}"
            for name, value in found[0].items()
            if other[name] != value
        ]
        if different:
            raise InputError(
                f"PipelineStrategy has other arguments on rank {rank}: {'; '.join(different)}. Every process has to "
                "make it from the same ones: look for what differs between processes, as environment variables and "
                "files do, and give a job array its jobs in one order"
            )
