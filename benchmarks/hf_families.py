"""Hugging Face families with a pipeline plan, each trained in a pipeline and compared with one process.

    python benchmarks/hf_families.py [--quick] [--json] [--family NAME ...]

A tiny random model of each family is trained on two ranks with schedule 1f1b, two micro-batches, and three steps of
AdamW in float64. The first training uses the library's defaults, and the second one uses padded labels (-100) in
addition. One process trains the same model with a separate loop. The results are equal if no weight differs by more
than 1e-9. Families share processes. If a family fails, the next families run in new processes.

The table shows for each family whether the weights are equal, with the largest difference, and the layers that are cut.
The last column has the warnings about the loss, or the reason why the training was refused.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.harness.hf_tiny import Batch, Tiny, families, tiny_model
from benchmarks.harness.report import QUIET, make_parser
from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks

QUICK = (
    "llama",
    "qwen3",
    "mixtral",
    "gemma2",
    "gemma3n",
    "deepseek_v3",
    "glm4",
    "mistral_large4",
    "phi3",
    "qwen2_vl",
    "t5gemma",
    "ultrabert",
)
RANKS, STEPS, RATE = 2, 3, 1e-2
EQUAL = 1e-9
"""The largest allowed difference of weights in float64, which are computed in another order."""
VARIANTS = ("default", "padded")
SETTINGS: Mapping[str, Any] = {"microbatches": 2, "partition": "parameters"}
A_ROUND = 20
"""The number of families that share processes."""
CUT = re.compile(r"The pipeline is cut from self\.(\S+?)[;,]")


@dataclass
class Result:
    """The result of a family with one kind of labels.

    Attributes:
        family: the name of the family.
        variant: one of `VARIANTS`.
        model: the name of the model class.
        outcome: "equal", "differs", "refused", or "failed" if the processes ended with an error.
        apart: the largest difference of a weight.
        cut: the path of the layers that are spread over the ranks.
        said: the warnings, or the reason why the training was refused or failed.
        weighed: how micro-batches are weighted, if not by their number of samples.
    """

    family: str
    variant: str
    model: str
    outcome: str
    apart: float = 0.0
    cut: str = ""
    said: str = ""
    weighed: str = ""


class LitFamily(pl.LightningModule):
    """A module that trains a model as a user of the library would."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE)


def compare(rank: int, names: Sequence[str], file: str, settings: Mapping[str, Any] = SETTINGS) -> None:
    """Train families one after the other and write a line for each result, until one is refused.

    Args:
        rank: the rank of this process.
        names: the families.
        file: the file to which rank 0 appends results as JSON.
        settings: arguments of `PipelineStrategy`.
    """
    torch.set_num_threads(1)
    for name in names:
        for variant in VARIANTS:
            tiny = tiny_model(name)
            result, failed = _compared(rank, name, variant, tiny, settings)
            if rank == 0:
                with Path(file).open("a") as lines:
                    lines.write(json.dumps(asdict(result)) + "\n")
            if failed:
                return


def _compared(rank: int, name: str, variant: str, tiny: Tiny, settings: Mapping[str, Any]) -> tuple[Result, bool]:
    batch = tiny.batch if variant == "default" else tiny.padded()
    module = LitFamily(tiny.model)
    found = Result(name, variant, tiny.name, "equal")
    plain = _trained_plainly(tiny_model(name, tiny.name).model, batch) if rank == 0 else {}
    with _heard() as lines:
        try:
            _fit(module, batch, settings)
        except Exception as error:
            reason = str(error) if type(error).__module__.startswith("lightning_pipes") else f"{error!r}"
            found.outcome, found.said = "refused", " ".join(reason.split())
    found.cut = next((match[1] for match in map(CUT.search, lines) if match), "")
    found.weighed = next((line for line in lines if "weighted by" in line), "")
    if found.outcome == "refused":
        return found, True
    found.said = "; ".join(line for line in lines if line.startswith("Only ") or "not a mean over samples" in line)
    weights = module.net.state_dict()
    found.apart = max((float((weights[key] - value).abs().max()) for key, value in plain.items()), default=0.0)
    if not found.apart <= EQUAL:
        found.outcome = "differs"
    return found, False


def _trained_plainly(model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the weights after training with a loop that does not use this package."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**{key: value.clone() for key, value in batch.items()}).loss.backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def _fit(module: pl.LightningModule, batch: Batch, settings: Mapping[str, Any]) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=PipelineStrategy(**settings),
        max_steps=STEPS,
        **QUIET,
    )
    batches: Any = [batch] * STEPS
    trainer.fit(module, DataLoader(batches, batch_size=None))


class _heard:  # noqa: N801  # read as a function
    """Collects the warnings and the log messages inside a `with` block."""

    def __enter__(self) -> list[str]:
        self._lines: list[str] = []
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self._lines.append(record.getMessage())  # type: ignore[method-assign]
        self._loggers = [logging.getLogger(name) for name in ("lightning.pytorch.utilities.rank_zero",)]
        for logger in self._loggers:
            logger.addHandler(self._handler)
        self._caught = warnings.catch_warnings(record=True)
        self._warned = self._caught.__enter__()
        warnings.simplefilter("always")
        return self._lines

    def __exit__(self, *_: object) -> None:
        self._caught.__exit__(None, None, None)
        self._lines += [str(warning.message) for warning in self._warned or ()]
        for logger in self._loggers:
            logger.removeHandler(self._handler)


def results(names: Sequence[str], settings: Mapping[str, Any] = SETTINGS) -> Iterator[Result]:
    """Compare families in shared processes and yield the results.

    Args:
        names: the families.
        settings: arguments of `PipelineStrategy`.
    """
    left = [*names]
    while left:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results"
            file.touch()
            try:
                run_ranks(compare, RANKS, left[:A_ROUND], str(file), settings, timeout=60.0 * len(left[:A_ROUND]))
                error = ""
            except RanksFailedError as failure:
                error = str(failure).strip().splitlines()[-1]
            found = [Result(**json.loads(line)) for line in file.read_text().splitlines()]
        tried = {(result.family, result.variant) for result in found}
        yield from found
        if error:
            family = next(name for name in left if (name, VARIANTS[-1]) not in tried)
            yield from (Result(family, v, "", "failed", said=error) for v in VARIANTS if (family, v) not in tried)
            tried |= {(family, v) for v in VARIANTS}
        elif found and found[-1].outcome == "refused" and found[-1].variant == VARIANTS[0]:
            refused = found[-1]
            yield Result(**{**asdict(refused), "variant": VARIANTS[1]})
            tried.add((refused.family, VARIANTS[1]))
        left = [name for name in left if (name, VARIANTS[-1]) not in tried]


def main() -> None:
    """Compare the families and print the table."""
    parser = make_parser(__doc__, "twelve families, within 120 s")
    parser.add_argument("--family", nargs="*", help="only these families")
    options = parser.parse_args()
    names = options.family or (QUICK if options.quick else families())
    print("| family | model | default | padded | cut at | messages |\n| --- | --- | --- | --- | --- | --- |")
    found: dict[str, list[Result]] = {}
    for result in results(names):
        found.setdefault(result.family, []).append(result)
        if result.variant == VARIANTS[-1]:
            print(_row(found[result.family]), flush=True)
    counts = Counter((r.variant, r.outcome) for each in found.values() for r in each)
    print(f"\n{len(found)} families; " + ", ".join(f"{v} {o}: {n}" for (v, o), n in sorted(counts.items())))
    if options.json:
        worst = max((r.apart for each in found.values() for r in each if r.outcome == "equal"), default=0.0)
        keys = {
            "families": len(found),
            "families_equal": counts["default", "equal"],
            "padded_equal": counts["padded", "equal"],
            "silent": sum(r.outcome == "differs" and not r.said for each in found.values() for r in each),
            "largest_difference": worst,
        }
        print(json.dumps(keys))


def _row(both: Sequence[Result]) -> str:
    cells = [r.outcome + ("" if r.outcome in ("refused", "failed") else f" ({r.apart:.0e})") for r in both]
    said = next((r.said for r in both if r.said), "")
    return f"| {both[0].family} | {both[0].model} | {' | '.join(cells)} | {both[0].cut} | {said[:160]} |"


if __name__ == "__main__":
    main()
