"""Models of every kind cut by units, beside one process.

    python benchmarks/any_model.py [PART ...] [--quick] [--json] [--case NAME ...]

| part | what it trains |
| --- | --- |
| zoo | the models of tests/trainer/units, by `Trainer` on two and three processes, beside plain Lightning |
| hf | a tiny model of each of 135 families of transformers, in two stages |

The zoo has plain modules, and models of transformers, torchvision and timm as far as these are installed. Training
takes two epochs of two batches with AdamW in float64. Equal means that no loss, weight or optimizer state differs by
more than 1e-10. Models that draw random numbers are compared with one process of the same strategy, which draws them
from the same streams. `--quick` takes every fourth model.

A family of transformers is equal if two things are. In one process two stages, each without the weights of the other,
give the loss and the gradients of the whole model to 1e-10, with the library's defaults and with padded labels. On two
processes three steps of `Trainer` with two micro-batches give its weights to 1e-10; `--quick` leaves this to a few.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.harness.report import Report, make_parser, run_parts
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from lightning_pipes.trainer.units.layout import UnitLayout
from tests.trainer.lit import differences
from tests.trainer.units.library_zoo import own_loss
from tests.trainer.units.lit_zoo import ALL, draws, read_result, settings_of, train_many, train_zoo
from tests.trainer.units.test_lazy_step import Stages, cloned, cut
from tests.trainer.units.zoo import Case

PARTS_OF_A_RUN = ("losses", "val", "weights", "saved", "optimizer")
SIZES = (2, 3)
"""Processes of a pipeline."""
EQUAL = 1e-10
"""How far losses, gradients and weights in float64 may differ."""
QUICK_FAMILIES = ["gpt2", "t5", "clip", "segformer", "gemma3n", "diffusion_gemma", "mixtral", "qwen2_vl"]
QUICK_TRAINED = ["t5", "diffusion_gemma"]
"""Families that train on two processes in a quick run."""
NORMALIZED = ("clip", "segformer")
"""Families with a contrastive loss or batch normalisation: their batches are not cut into micro-batches."""


def compare(ranks: Sequence[dict[str, Any]], alone: dict[str, Any]) -> list[str]:
    """Return where the ranks of a pipeline differ from one process."""
    parts = [(rank, p) for rank in range(len(ranks)) for p in (PARTS_OF_A_RUN if rank == 0 else PARTS_OF_A_RUN[:3])]
    return [
        d for rank, part in parts for d in differences(alone[part], ranks[rank][part], EQUAL, f"rank {rank} {part}")
    ]


def train_in_pipelines(names: Sequence[str], folder: str) -> dict[str, list[list[dict[str, Any]] | str]]:
    """Return by case what each rank of each size of pipeline has, or why it failed."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    for size in SIZES:
        cases = [(name, settings_of(name)) for name in names]
        try:
            ranks = run_ranks(train_many, size, cases, size, folder, timeout=1800)
            for number, name in enumerate(names):
                found[name].append([read_result(of_rank[number]) for of_rank in ranks])
        except RanksFailedError:  # which of them it was
            for case in cases:
                try:
                    ranks = run_ranks(train_many, size, [case], size, folder, timeout=300)
                    found[case[0]].append([read_result(of_rank[0]) for of_rank in ranks])
                except RanksFailedError as error:
                    found[case[0]].append(str(error).strip().splitlines()[-1])
    return found


def check_case(name: str, pipelines: Sequence[list[dict[str, Any]] | str], folder: str) -> list[str]:
    """Return what is wrong with a case of the zoo."""
    if draws(name):
        alone = read_result(run_ranks(train_many, 1, [(name, settings_of(name))], 1, folder, timeout=300)[0][0])
    else:
        alone = train_zoo(name, 0, folder)
    wrong = []
    for size, ranks in zip(SIZES, pipelines, strict=True):
        said = [ranks] if isinstance(ranks, str) else compare(ranks, alone)
        wrong += [f"{size} processes: {text}" for text in said[:1]]
    return wrong


def check_zoo(quick: bool, given: Sequence[str] | None) -> Report:
    """Train models of the zoo on two and three processes."""
    names = given or (list(ALL)[::4] if quick else list(ALL))
    with tempfile.TemporaryDirectory() as folder:
        pipelines = train_in_pipelines(names, folder)
        wrong = {name: check_case(name, pipelines[name], folder) for name in names}
    lines = [f"{name:40s} {'; '.join(why) or 'equal'}" for name, why in wrong.items()]
    return Report(lines, {"zoo_equal": sum(not why for why in wrong.values()), "zoo_total": len(names)})


def compare_stages(model: nn.Module, layout: UnitLayout, batch: Any) -> str:
    """Return what differs between two stages of a model in one process and the model; nothing if all is equal."""
    stages, whole = Stages(Case(model, batch, own_loss), layout), copy.deepcopy(model)
    torch.manual_seed(0)
    off = {"the loss": stages.train(batch)}
    torch.manual_seed(0)
    loss = own_loss(whole, cloned(batch))
    loss.backward()  # type: ignore[no-untyped-call]
    off["the loss"] = (off["the loss"] - loss.detach()).abs()
    found = stages.gradients()
    for name, p in whole.named_parameters():
        if p.grad is not None:
            off[name] = (found.get(name, torch.zeros_like(p)) - p.grad).abs().max()
    worst = max(off, key=lambda name: float(off[name]))
    return f"{worst} is off by {float(off[worst]):.0e}" if not float(off[worst]) <= EQUAL else ""


def check_family(name: str) -> str:
    """Return what is wrong with a family of transformers in two stages of one process."""
    from benchmarks.harness.hf_tiny import tiny_model

    tiny = tiny_model(name)
    layout = cut(Case(tiny.model, tiny.batch, own_loss), 2)
    for variant, batch in (("default", tiny.batch), ("padded", tiny.padded())):
        wrong = compare_stages(tiny.model, layout, batch)
        if wrong:
            return f"{variant}: {wrong}"
    return ""


def train_families(names: Sequence[str]) -> dict[str, str]:
    """Train families on two processes, and return by name what is wrong with them."""
    from benchmarks.hf_families import results

    wrong: dict[str, str] = {}
    for few, settings in (
        ([name for name in names if name not in NORMALIZED], {"module": "", "microbatches": 2}),
        ([name for name in names if name in NORMALIZED], {"module": "", "microbatches": 1}),
    ):
        for result in results(few, settings):
            if result.outcome != "equal" or not result.apart <= EQUAL:
                why = (
                    result.said if result.outcome in ("refused", "failed") else f"weights are off by {result.apart:.0e}"
                )
                wrong.setdefault(result.family, f"Trainer, {result.variant}: {result.outcome}, {why}")
    return wrong


def check_families(quick: bool, given: Sequence[str] | None) -> Report:
    """Train families of transformers in two stages."""
    from benchmarks.harness.hf_tiny import WITHOUT_PLAN, families

    names = list(given or (QUICK_FAMILIES if quick else [*WITHOUT_PLAN, *families()]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    wrong = {}
    for name in names:
        try:
            wrong[name] = check_family(name)
        except Exception as error:  # a family that fails is counted, and the others are run
            wrong[name] = f"{type(error).__name__}: {error}"
    torch.set_num_threads(threads)
    trained = [name for name in names if not wrong[name] and (given or not quick or name in QUICK_TRAINED)]
    wrong |= train_families(trained)
    lines = [f"{name:40s} {why or 'equal'}" for name, why in wrong.items()]
    return Report(lines, {"hf_equal": sum(not why for why in wrong.values()), "hf_total": len(names)})


PARTS: Mapping[str, Callable[[bool, Sequence[str] | None], Report]] = {"zoo": check_zoo, "hf": check_families}


def main(arguments: list[str]) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="all if left out")
    parser.add_argument("--case", nargs="*", help="models of these names")
    given = parser.parse_args(arguments)
    names = given.part or list(PARTS)
    keys = run_parts({name: partial(_run_part, name, given.case) for name in names}, names, given.quick)
    if given.json:
        print(json.dumps(keys))


def _run_part(name: str, cases: Sequence[str] | None, quick: bool) -> Report:
    return PARTS[name](quick, cases)


if __name__ == "__main__":
    main(sys.argv[1:])
