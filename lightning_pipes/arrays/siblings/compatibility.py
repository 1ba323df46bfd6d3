"""Siblings of an array share one pipeline, so they have one structure and one cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import lightning.pytorch as pl

from lightning_pipes.arrays.siblings.sibling import Sibling
from lightning_pipes.ir import PlanError
from lightning_pipes.planning.planner import planner_of
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.request import RunRequest

Structure = dict[str, tuple[tuple[int, ...], str]]
"""Shape and type of every parameter, by name."""


class CompatibilityError(PlanError):
    """A sibling can't share the pipeline of the others.

    Attributes:
        first: the index of the sibling whose pipeline it is.
    """

    def __init__(self, text: str, first: int = 0) -> None:
        super().__init__(text)
        self.first = first


def with_default_microbatches(request: RunRequest, sibling: Sibling[object], ranks: int) -> RunRequest:
    """Return a sibling's request, with the array's micro-batches where the sibling names none."""
    if request.microbatches is not None or request.chooses or planner_of(request.schedule).user_chose_microbatches:
        return request
    stages = len(request.schedule.place_stages(ranks))
    return replace(request, microbatches=sibling.array.count_default_microbatches(stages))


def find_shared_container(sibling: Sibling[object], module: pl.LightningModule, find: Callable[[], str]) -> str:
    """Return the path of the first sibling's container if this module has it, else `find()`."""
    facts = sibling.array.shared.facts
    if "container" not in facts:
        facts["container"] = find()
    path: str = facts["container"]
    return path if path in dict(module.named_modules()) else find()


def decide_shared_cut(
    sibling: Sibling[object], module: pl.LightningModule, plain: Decision, decide: Callable[[], Decision]
) -> Decision:
    """Return the decision for a sibling: the first one's cut, with the sibling's own schedule and micro-batches.

    Raises:
        CompatibilityError: its parameters, its stages or the cut that it asks for are not those of the first.
    """
    own: Structure = {n: (tuple(p.shape), str(p.dtype)) for n, p in module.named_parameters()}
    facts = sibling.array.shared.facts
    if "structure" not in facts:
        facts["structure"], facts["plain"], facts["decision"] = (sibling.index, own), plain, decide()
    first, structure = facts["structure"]
    decision: Decision = facts["decision"]
    asked: Decision = facts["plain"]
    if first == sibling.index:
        return decision
    different = _difference(structure, own, first)
    if different:
        raise CompatibilityError(
            f"sibling {sibling.index} of the array {different}; siblings share one pipeline, so they must have the "
            "same layers and may differ in everything else. Run it in an array of its own",
            first,
        )
    if plain.ranks != decision.ranks:
        raise CompatibilityError(
            f"sibling {sibling.index} of the array has stages on ranks {plain.ranks} with schedule "
            f"{plain.schedule.name!r}, sibling {first} on {decision.ranks}; give them the same schedule",
            first,
        )
    if plain.layers != asked.layers:
        cuts = [[span.start for span in each.layers[1:]] for each in (plain, asked)]
        raise CompatibilityError(
            f"sibling {sibling.index} of the array asks for stages that begin at the layers {cuts[0]}, sibling {first} "
            f"at {cuts[1]}; siblings share one cut, so give them the same partition",
            first,
        )
    return replace(
        decision,
        schedule=plain.schedule,
        microbatches=plain.microbatches,
        recompute=plain.recompute,
        seconds=None,
        computing=None,
        cut="",
    )


def _difference(first: Structure, own: Structure, index: int) -> str:
    for name in {**first, **own}:
        if name not in own:
            return f"has no parameter {name}, which sibling {index} has"
        if name not in first:
            return f"has a parameter {name}, which sibling {index} has not"
        if first[name] != own[name]:
            return (
                f"has {name} of shape {own[name][0]} and {own[name][1]}, sibling {index} has {first[name][0]} and "
                + (first[name][1])
            )
    return ""
