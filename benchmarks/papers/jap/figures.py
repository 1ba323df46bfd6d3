"""The figures of ArrayPipe's paper, simulated, one command each: 64 jobs of four models on A100s.

    python benchmarks/papers/jap/figures.py f7|f8|f9|f10a|f10b|f10c|f10d|f11|ga ... [--quick] [--json] [--plot FILE.png]

An epoch is 240 batches of the jobs with the smallest ones. Baselines run jobs one after another, each with its best
number of micro-batches; ArX has batches of siblings where X has micro-batches; "rounds" is the paper's scheme, with our
search for the order of a round, and "ours" runs without rounds. What recomputes does so for whole stages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.harness.report import make_parser
from benchmarks.papers.jap.jobs import random_array
from benchmarks.papers.jap.schemes import ARRAYED, MODELS, Epoch, Hardware, of_model
from benchmarks.papers.jap.single import RECOMPUTING, SINGLE, Spent
from lightning_pipes.sim import load_kernel
from lightning_pipes.strategies.jap import Effort
from lightning_pipes.strategies.jap.solvers.genetic import OrderEvolution, evolve_orders

Scheme = Callable[[Epoch], Spent | None]
SCHEMES: dict[str, Scheme] = {
    "Vanilla": Epoch.vanilla,
    **{name: partial(Epoch.one_by_one, how=how) for name, how in SINGLE.items()},
    **{name: partial(Epoch.paper, method=name) for name in ARRAYED},
    "rounds": Epoch.paper,
    "ours": Epoch.ours,
}
COMPARED = ("GPipe", "BPipe", "Hanayo", "rounds", "ours")
ABLATION: dict[str, Scheme] = {
    "rounds": Epoch.paper,
    "rounds, no memory manager": Epoch.without_memory_manager,
    "rounds, no low-cost switching": Epoch.without_low_cost_switching,
    "ours": Epoch.ours,
}
GIB = 2**30
USUAL = Hardware()
"""Eight stages on one server with NVLink, GPUs of 80 GiB."""


@dataclass(frozen=True)
class Table:
    """Numbers to print and to draw.

    Attributes:
        rows: numbers by name, one for each of `columns`; NaN where there is none.
        form: how a number is printed.
        unit: what numbers are, for an axis.
        stacked: whether the numbers of a row are parts of a whole.
    """

    title: str
    columns: tuple[str, ...]
    rows: dict[str, list[float]]
    form: str = ".0f"
    unit: str = ""
    stacked: bool = False

    def __str__(self) -> str:
        head = f"{self.title:32}" + "".join(f"{column:>14}" for column in self.columns)
        cells = {name: ["-" if math.isnan(x) else format(x, self.form) for x in row] for name, row in self.rows.items()}
        return "\n".join([head, *(f"  {name:30}" + "".join(f"{x:>14}" for x in row) for name, row in cells.items())])


class Runs:
    """What epochs took, each computed once."""

    def __init__(self, models: Sequence[str] = tuple(MODELS), **options: int) -> None:
        self.models = tuple(models)
        self._options = options
        self.epoch = cache(self._epoch)
        self.spent = cache(self._spent)

    def _epoch(self, model: str, hardware: Hardware) -> Epoch:
        return of_model(model, hardware, **self._options)

    def _spent(self, model: str, name: str, hardware: Hardware = USUAL) -> Spent | None:
        epoch = self.epoch(model, hardware)
        if name in RECOMPUTING:
            return epoch.one_by_one(RECOMPUTING[name])
        return {**ABLATION, **SCHEMES}[name](epoch)

    def seconds(self, model: str, name: str, hardware: Hardware = USUAL) -> float:
        """NaN where the scheme can't run the model."""
        spent = self.spent(model, name, hardware)
        return math.nan if spent is None else spent.time / 1e9


def saved(
    runs: Runs, setting: Sequence[Hardware] = (USUAL,), against: Sequence[str] = ("Hanayo", "GPipe", "BPipe")
) -> dict[str, list[float]]:
    """By how much rounds, and we, are shorter than others: means over the models, by setting."""
    rows = {}
    for ours in ("rounds", "ours"):
        for name in against:
            rows[f"{ours} against {name}"] = [
                _mean(1 - runs.seconds(m, ours, hardware) / runs.seconds(m, name, hardware) for m in runs.models)
                for hardware in setting
            ]
    return rows


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def f7(runs: Runs) -> list[Table]:
    """How long an epoch of all jobs takes."""
    rows = {name: [runs.seconds(model, name) for model in runs.models] for name in SCHEMES}
    times = Table("seconds", runs.models, rows)
    over = {name: [x / y for x, y in zip(row, rows["ours"], strict=True)] for name, row in rows.items()}
    singles = [name for name in SCHEMES if name in SINGLE]
    best = [min(x for x in column if not math.isnan(x)) for column in zip(*(rows[n] for n in singles), strict=True)]
    gains = {
        f"{name} over the best of them": [x / y for x, y in zip(best, rows[name], strict=True)]
        for name in ("rounds", "ours")
    }
    return [
        times,
        replace(times, title="over ours", rows=over, form=".2f", unit="epoch over ours"),
        Table("throughput", runs.models, gains, ".2f"),
        Table("time saved, mean", ("",), saved(runs) | saved(runs, against=list(RECOMPUTING)), ".1%"),
    ]


def f8(runs: Runs) -> list[Table]:
    """How much of the time stages compute, recomputation included, on average."""
    rows = {}
    for name in SCHEMES:
        found = [runs.spent(model, name) for model in runs.models]
        rows[name] = [spent.utilisation(USUAL.stages) if spent else math.nan for spent in found]
    return [Table("utilisation", runs.models, rows, ".1%", "utilisation")]


def f9(runs: Runs) -> list[Table]:
    """What memory manager and low-cost switching are worth: throughput over Vanilla, and the jobs of an array."""
    rows = {}
    jobs = {}
    for name in ABLATION:
        times = {model: runs.seconds(model, name) for model in runs.models}
        rows[name] = [runs.seconds(model, "Vanilla") / time for model, time in times.items()]
        settings = [spent.setting if (spent := runs.spent(m, name)) else "none fits" for m in runs.models]
        jobs[name] = [float(text.split()[0]) if text[0].isdigit() else math.nan for text in settings]
    return [
        Table("throughput over Vanilla", runs.models, rows, ".2f", "throughput over Vanilla"),
        Table("jobs at a time", runs.models, jobs),
    ]


def varied(runs: Runs, settings: dict[str, Hardware]) -> list[Table]:
    """Seconds of an epoch, a table for each model, and what is saved."""
    columns, hardware = tuple(settings), list(settings.values())
    tables = []
    for model in runs.models:
        rows = {name: [runs.seconds(model, name, each) for each in hardware] for name in COMPARED}
        tables.append(Table(f"{model}, seconds", columns, rows, unit=f"{model}: seconds"))
    return [*tables, Table("time saved, mean", columns, saved(runs, hardware), ".1%")]


def f10a(runs: Runs) -> list[Table]:
    """Eight stages on 1, 2, 4 and 8 servers."""
    return varied(runs, {f"{n} servers": Hardware(servers=n) for n in (1, 2, 4, 8)})


def f10b(runs: Runs) -> list[Table]:
    """GPUs with 40 and 80 GiB."""
    return varied(runs, {f"{n} GiB": Hardware(memory=n * GIB) for n in (40, 80)})


def f10c(runs: Runs) -> list[Table]:
    """PCIe and NVLink between the GPUs."""
    return varied(runs, {"PCIe": Hardware(inside=64e9), "NVLink": USUAL})


def f10d(runs: Runs) -> list[Table]:
    """Models in 4, 8 and 16 stages; where a bar is missing, there are fewer layers than Hanayo has stages."""
    return varied(runs, {f"{n} stages": Hardware(stages=n) for n in (4, 8, 16)})


def f11(runs: Runs) -> list[Table]:
    """Where the time of a stage goes, on average. Overhead is recomputation, updates and switches."""
    tables = []
    for model in runs.models:
        rows = {}
        for name in ("Vanilla", *COMPARED):
            spent = runs.spent(model, name)
            if spent is not None:
                whole = spent.time * USUAL.stages
                parts = [spent.forward, spent.backward, spent.overhead + spent.switching]
                rows[name] = [*(part / whole for part in parts), 1 - sum(parts) / whole]
        columns = ("forward", "backward", "overhead", "bubble")
        tables.append(Table(model, columns, rows, ".1%", f"{model}: share of the time", stacked=True))
    return tables


def ga(runs: Runs) -> list[Table]:
    """The genetic algorithm's makespan over the lower bound, by generations of 100 individuals. From a random
    population it goes on getting better for thousands of generations, the longer the more stages there are."""
    counts = (100, 1_000) if len(runs.models) == 1 else (100, 1_000, 4_000)
    tables = []
    for jobs in (8, 16):
        rows: dict[str, list[float]] = {}
        for stages in (4, 10, 16):
            problem = random_array(jobs, stages, seed=0)
            for name, seeded in (("random", False), ("rules in it", True)):
                made = [
                    evolve_orders(problem, Effort(1 << 40), settings=OrderEvolution(generations=count, seeded=seeded))
                    for count in counts
                ]
                rows[f"{stages} stages, first population {name}"] = [one.makespan / one.bound for one in made]
        columns = tuple(f"{count} generations" for count in counts)
        tables.append(Table(f"genetic, {jobs} jobs", columns, rows, ".3f", "makespan over the lower bound"))
    return tables


FIGURES = {"f7": f7, "f8": f8, "f9": f9, "f10a": f10a, "f10b": f10b, "f10c": f10c, "f10d": f10d, "f11": f11, "ga": ga}


def draw(tables: Sequence[Table], path: Path, title: str) -> None:
    """Bars for each table that has a unit."""
    import matplotlib.pyplot as plt

    shown = [table for table in tables if table.unit]
    across = min(2, len(shown))
    down = -(-len(shown) // across)
    size = (6.4 * across, 3.6 * down) if across > 1 else (10.0, 4.4)
    figure, axes = plt.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
    for table, axis in zip(shown, axes.flat, strict=False):
        (_stack if table.stacked else _group)(axis, table)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(6, len(names)), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _group(axis: Any, table: Table) -> None:
    import matplotlib.pyplot as plt

    width = 0.85 / len(table.rows)
    for n, (name, row) in enumerate(table.rows.items()):
        at = [column - 0.425 + (n + 0.5) * width for column in range(len(row))]
        axis.bar(at, row, width, label=name, color=plt.get_cmap("tab20")(n))
    axis.set_xticks(range(len(table.columns)), table.columns)
    axis.set_ylabel(table.unit)


def _stack(axis: Any, table: Table) -> None:
    bottom = [0.0] * len(table.rows)
    for n, column in enumerate(table.columns):
        part = [row[n] for row in table.rows.values()]
        colour = ("#4c78a8", "#f58518", "#b79a20", "#d9d9d9")[n]
        axis.bar(list(table.rows), part, 0.7, bottom, label=column, color=colour)
        bottom = [x + y for x, y in zip(bottom, part, strict=True)]
    axis.set_ylabel(table.unit)


def keys(figure: str, tables: Sequence[Table]) -> dict[str, float]:
    """All numbers by flat names."""
    found = {}
    for table in tables:
        for name, row in table.rows.items():
            for column, value in zip(table.columns, row, strict=True):
                if not math.isnan(value):
                    words = " ".join(filter(None, (figure, table.title, name, column))).replace(",", "").lower()
                    found["_".join(words.split())] = round(value, 4)
    return found


def main() -> None:
    parser = make_parser(__doc__, "BERT-large alone")
    parser.add_argument("figures", nargs="*", help=f"of {', '.join(FIGURES)}; by default all, with --quick f7")
    parser.add_argument("--plot", type=Path, help="draw the figure into this file")
    options = parser.parse_args()
    chosen = options.figures or (["f7"] if options.quick else list(FIGURES))
    if unknown := set(chosen) - set(FIGURES):
        parser.error(f"there is no figure {', '.join(unknown)}; there is {', '.join(FIGURES)}")
    if options.plot and len(chosen) > 1:
        parser.error("--plot draws one figure: name it")
    load_kernel()
    runs = Runs(["BERT-large"] if options.quick else list(MODELS))
    results: dict[str, float] = {}
    for name in chosen:
        tables = FIGURES[name](runs)
        print(f"\n{name}: {FIGURES[name].__doc__}\n")
        print("\n\n".join(map(str, tables)), flush=True)
        results |= keys(name, tables)
        if options.plot:
            draw(tables, options.plot, f"{name}: {FIGURES[name].__doc__}")
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
