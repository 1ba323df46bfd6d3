"""Models of every kind in a pipeline that is cut between units, compared with one process.

    python benchmarks/any_model.py [PART ...] [--quick] [--json] [--case NAME ...]

| part | what it trains |
| --- | --- |
| zoo | the models of tests/trainer/cuts/units, by `Trainer` on two and three processes, compared with plain Lightning |
| hf | a tiny model of each of 135 families of transformers, in two stages |
| towers | families with an encoder and a decoder, or with pictures, whose batches use both; cut by measured time |
| vision | models of torchvision and timm, if installed, in two stages that are cut by the measured time of units |
| speed | a GPT in two stages: captured, as nn.Sequential, and by torch's own `pipeline()` |

The zoo contains plain modules, and models of transformers, torchvision and timm if these are installed. Training takes
two epochs of two batches in float64 with AdamW, or with SGD for vision models. A model is equal if no loss, weight or
optimizer state differs by more than 1e-10. Models that draw random numbers are compared with one process of the same
strategy, which draws them from the same streams. `--quick` takes every fourth model and no vision models.

A family of transformers is equal if it passes two comparisons. First, two stages run in one process, each without the
weights of the other. Their loss and gradients must equal the results of the whole model to 1e-10, with the library's
defaults and with padded labels. Second, three steps of `Trainer` on two processes with two micro-batches must give the
same weights as one process, to 1e-10. `--quick` makes the second comparison for a few families only.

`--json` also includes the results that benchmarks/lightning_suite.py has saved, because they are not measured here.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.engine import gpt_parts
from benchmarks.harness.report import QUIET, Report, hush, make_parser, run_parts
from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from tests.trainer.cuts.units.library_zoo import VISION, own_loss
from tests.trainer.cuts.units.lit_zoo import ALL, draws, read_result, settings_of, train_many, train_zoo
from tests.trainer.cuts.units.test_lazy_step import Stages, cloned, cut
from tests.trainer.cuts.units.zoo import Case
from tests.trainer.lit import differences

ROWS, TOKENS, MICROBATCHES = 16, 96, 4
SPLIT = "blocks.4"
"""The layer at which the second stage of the GPT begins, in the comparison of speed."""
BALANCED, TIMED_STEPS = 0.8, 5
"""The least time of a stage in a balanced vision model, relative to the mean stage, and the number of timed steps."""
PARTS_OF_A_RUN = ("losses", "val", "weights", "saved", "optimizer")
SIZES = (2, 3)
"""The numbers of processes in a pipeline."""
A_ROUND = 12
"""The number of models of the zoo that share processes, and whose weights are kept at the same time."""
EQUAL = 1e-10
"""The largest allowed difference of losses, gradients and weights in float64."""
QUICK_FAMILIES = ["gpt2", "t5", "clip", "segformer", "gemma3n", "diffusion_gemma", "mixtral", "qwen2_vl"]
QUICK_TRAINED = ["t5", "diffusion_gemma"]
"""Families that are trained on two processes in a quick run."""
TRANSLATING = ["t5", "bart", "whisper", "clip", "t5gemma", "t5gemma2"]
QUICK_TOWERS = ["t5", "clip", "qwen2_vl"]
"""The families with two towers in a quick run. TRANSLATING lists families whose usual batches use both towers."""
NORMALIZED = ("clip", "segformer")
"""Families with a contrastive loss or batch normalization. Their batches are not cut into micro-batches."""


def compare(ranks: Sequence[dict[str, Any]], alone: dict[str, Any]) -> list[str]:
    """Return the differences between the ranks of a pipeline and one process."""
    parts = [(rank, p) for rank in range(len(ranks)) for p in (PARTS_OF_A_RUN if rank == 0 else PARTS_OF_A_RUN[:3])]
    return [
        d for rank, part in parts for d in differences(alone[part], ranks[rank][part], EQUAL, f"rank {rank} {part}")
    ]


def train_in_pipelines(names: Sequence[str], folder: str) -> dict[str, list[list[dict[str, Any]] | str]]:
    """Train cases of the zoo in pipelines of each size.

    Returns:
        For each case and each size of the pipeline, the results of all ranks or the reason for the failure.
    """
    found: dict[str, list[Any]] = {name: [] for name in names}
    for size in SIZES:
        cases = [(name, settings_of(name)) for name in names]
        try:
            ranks = run_ranks(train_many, size, cases, size, folder, timeout=1800)
            for number, name in enumerate(names):
                found[name].append([read_result(of_rank[number]) for of_rank in ranks])
        except RanksFailedError:  # run them one by one to find the case that fails
            for case in cases:
                try:
                    ranks = run_ranks(train_many, size, [case], size, folder, timeout=300)
                    found[case[0]].append([read_result(of_rank[0]) for of_rank in ranks])
                except RanksFailedError as error:
                    found[case[0]].append(str(error).strip().splitlines()[-1])
    return found


def check_case(name: str, pipelines: Sequence[list[dict[str, Any]] | str], folder: str) -> list[str]:
    """Return descriptions of the failures and differences of a case, at most one for each size of the pipeline."""
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
    """Train models of the zoo on two and on three processes."""
    names = list(given or ([name for name in ALL if name not in VISION][::4] if quick else ALL))
    wrong: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for few in (names[at : at + A_ROUND] for at in range(0, len(names), A_ROUND)):
            pipelines = train_in_pipelines(few, folder)
            wrong |= {name: check_case(name, pipelines[name], folder) for name in few}
    lines = [f"{name:40s} {'; '.join(why) or 'equal'}" for name, why in wrong.items()]
    return Report(lines, {"zoo_equal": sum(not why for why in wrong.values()), "zoo_total": len(names)})


def compare_stages(case: Case, layout: UnitLayout) -> str:
    """Compare two stages of a model in one process with the whole model.

    Returns:
        A description of the largest difference, or an empty string if the results are equal.
    """
    stages, whole = Stages(case, layout), copy.deepcopy(case.model)
    torch.manual_seed(0)
    off = {"the loss": stages.train(case.batch)}
    torch.manual_seed(0)
    loss = case.step(whole, cloned(case.batch))
    loss.backward()  # type: ignore[no-untyped-call]
    off["the loss"] = (off["the loss"] - loss.detach()).abs()
    found = stages.gradients()
    for name, p in whole.named_parameters():
        if p.grad is not None:
            off[name] = (found.get(name, torch.zeros_like(p)) - p.grad).abs().max()
    worst = max(off, key=lambda name: float(off[name]))
    return f"{worst} is off by {float(off[worst]):.0e}" if not float(off[worst]) <= EQUAL else ""


def check_family(name: str) -> str:
    """Return the difference of a family of transformers in two stages of one process, or an empty string."""
    from benchmarks.harness.hf_tiny import tiny_model

    tiny = tiny_model(name)
    layout = cut(Case(tiny.model, tiny.batch, own_loss), 2)
    for variant, batch in (("default", tiny.batch), ("padded", tiny.padded())):
        wrong = compare_stages(Case(tiny.model, batch, own_loss), layout)
        if wrong:
            return f"{variant}: {wrong}"
    return ""


def train_families(names: Sequence[str]) -> dict[str, str]:
    """Train families on two processes, and return descriptions of failures and differences, by family."""
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
        except Exception as error:  # a family that fails is counted as not equal, and the other families still run
            wrong[name] = f"{type(error).__name__}: {error}"
    torch.set_num_threads(threads)
    trained = [name for name in names if not wrong[name] and (given or not quick or name in QUICK_TRAINED)]
    wrong |= train_families(trained)
    lines = [f"{name:40s} {why or 'equal'}" for name, why in wrong.items()]
    return Report(lines, {"hf_equal": sum(not why for why in wrong.values()), "hf_total": len(names)})


def least_share(case: Case, layout: UnitLayout) -> float:
    """Return the processor time of the shortest stage, divided by the mean time of all stages."""
    stages = Stages(case, layout)
    runs = []
    for _ in range(TIMED_STEPS):
        stages.train(case.batch)
        runs.append(list(stages.seconds))
    best = list(map(min, zip(*runs, strict=True)))
    return float(min(best) / (sum(best) / len(best)))


def check_towers(quick: bool, given: Sequence[str] | None) -> Report:
    """Train families with two towers in two stages that are cut by measured time, with batches that use both towers."""
    from benchmarks.harness.hf_tiny import PICTURED, tiny_model

    names = list(given or (QUICK_TOWERS if quick else [*TRANSLATING, *PICTURED]))
    torch.set_num_threads(1)
    lines, shares = [], []
    for name in names:
        tiny = tiny_model(name)
        case = Case(tiny.model, tiny.pictured() if name in PICTURED else tiny.batch, own_loss)
        layout = cut(case, 2, measured=True)
        wrong = compare_stages(case, layout)
        shares.append(0.0 if wrong else least_share(case, layout))
        place = layout.names[layout.starts[1]]
        lines.append(f"{name:20s} {wrong or 'equal'}, cut at {place}, shortest stage {shares[-1]:.2f} of the mean")
    return Report(lines, {"towers_least_share": min(shares), "towers_total": len(names)})


def check_vision(quick: bool, given: Sequence[str] | None) -> Report:
    """Train vision models in two stages that are cut by measured time."""
    names = list(given or (list(VISION)[::4] if quick else VISION))
    torch.set_num_threads(1)
    lines, equal, balanced = [], 0, 0
    for name in names:
        case = VISION[name]()
        layout = cut(case, 2, measured=True)
        wrong = compare_stages(case, layout)
        share = least_share(case, layout)
        equal += not wrong
        balanced += share >= BALANCED
        lines.append(f"{name:40s} {wrong or 'equal'}, shortest stage {share:.2f} of the mean")
    return Report(lines, {"vision_equal": equal, "vision_balanced": balanced, "vision_total": len(names)})


class Attributes(nn.Module):
    """A GPT whose `forward` calls its layers one by one."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding, *blocks, self.head = layers
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class LitGpt(pl.LightningModule):
    """A module that trains a GPT to predict the next byte."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0][:, :-1]), batch[0][:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class StepTimes(pl.Callback):
    """Records the end of each step, as wall-clock time and as processor time of this process."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, float]] = []

    def note(self) -> None:
        """Record that a step has ended."""
        self._ends.append((perf_counter(), process_time()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.note()

    def shortest(self) -> tuple[float, float]:
        """Return the least wall-clock seconds and the least processor seconds of a step, without the first steps."""
        steps = [(b - a, d - c) for (a, c), (b, d) in pairwise(self._ends[2:])]
        return min(seconds for seconds, _ in steps), min(seconds for _, seconds in steps)


def train_with_trainer(net: nn.Module, steps: int, settings: Mapping[str, Any]) -> StepTimes:
    """Train with `Trainer`, and return the times of the steps."""
    data = DataLoader(TensorDataset(make_texts().repeat(steps, 1)), batch_size=ROWS)
    times = StepTimes()
    strategy = PipelineStrategy(microbatches=MICROBATCHES, schedule="1f1b", check_loss=False, **settings)
    pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, callbacks=[times], **QUIET).fit(
        LitGpt(net), data
    )
    return times


def train_with_torch(net: nn.Module, rank: int, steps: int) -> StepTimes:
    """Train with torch's own `pipeline()`, and return the times of the steps."""
    texts = make_texts()
    inputs, targets = texts[:, :-1].contiguous(), texts[:, 1:].contiguous()
    pipe = pipeline(net, (inputs[: ROWS // MICROBATCHES],), split_spec={SPLIT: SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
    times = StepTimes()
    for _ in range(steps):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
        times.note()
    return times


def make_texts() -> torch.Tensor:
    """Return a batch of random bytes. Each sample has one byte more than the model has inputs."""
    return torch.randint(256, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(0))


def time_sides(rank: int, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return the smallest wall-clock and processor seconds of a step, for each side in each round."""
    torch.set_num_threads(1)
    hush()

    def layers() -> list[nn.Module]:
        return list(gpt_parts(1)[0])

    sides: dict[str, Callable[[], StepTimes]] = {
        "sequential": lambda: train_with_trainer(nn.Sequential(*layers()), steps, {"partition": [5]}),
        "captured": lambda: train_with_trainer(
            Attributes(layers()), steps, {"module": "", "partition": [f"net.{SPLIT}"]}
        ),
        "torch": lambda: train_with_torch(Attributes(layers()), rank, steps),
    }
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, train in sides.items():
            found[side].append(train().shortest())
    return found


def compare_speed(quick: bool, given: Sequence[str] | None) -> Report:
    """Time the steps of a GPT with three sides: captured, as nn.Sequential, and by torch's own `pipeline()`."""
    of_ranks = run_ranks(time_sides, 2, 2 if quick else 6, 12 if quick else 25, timeout=900)
    lines, clock, busy = [], {}, {}
    for side in of_ranks[0]:
        times = [found[side] for found in of_ranks]
        clock[side] = min(max(seconds for seconds, _ in both) for both in zip(*times, strict=True))
        busy[side] = sum(min(seconds for _, seconds in of_rank) for of_rank in times)
        lines.append(f"{side:12s} {clock[side] * 1e3:6.1f} ms a step, {busy[side] * 1e3:6.1f} ms of processors")
    keys = {
        "capture_overhead": clock["captured"] / clock["sequential"],
        "capture_overhead_processors": busy["captured"] / busy["sequential"],
        "vs_torch_pipeline": clock["captured"] / clock["torch"],
        "vs_torch_pipeline_processors": busy["captured"] / busy["torch"],
    }
    return Report(lines, keys)


PARTS: Mapping[str, Callable[[bool, Sequence[str] | None], Report]] = {
    "zoo": check_zoo,
    "hf": check_families,
    "towers": check_towers,
    "vision": check_vision,
    "speed": compare_speed,
}


def main(arguments: list[str]) -> None:
    """Run the given parts of the benchmark."""
    parser = make_parser(__doc__)
    parser.add_argument("part", nargs="*", choices=[*PARTS, []], help="the parts to run, by default all")
    parser.add_argument("--case", nargs="*", help="only models with these names")
    given = parser.parse_args(arguments)
    names = given.part or list(PARTS)
    keys = run_parts({name: partial(_run_part, name, given.case) for name in names}, names, given.quick)
    if given.json:
        print(json.dumps({**keys, **read_suite()}))


def read_suite() -> dict[str, Any]:
    """Return the saved share of Lightning's own tests that pass, and the date of that run.

    The dict is empty if no run was saved.
    """
    path = Path(__file__).with_name("lightning_suite.json")
    saved = json.loads(path.read_text()) if path.exists() else {}
    return {name: value for name, value in saved.items() if name in ("lightning_suite_share", "lightning_suite_date")}


def _run_part(name: str, cases: Sequence[str] | None, quick: bool) -> Report:
    return PARTS[name](quick, cases)


if __name__ == "__main__":
    main(sys.argv[1:])
