"""The figures and tables of the papers, with one command for all of them.

    python -m benchmarks.papers                  a list of all figures
    python -m benchmarks.papers PAPER [FIGURE ...] [--quick] [--json] [--set NAME=VALUE ...]

Without FIGURE, all figures of the paper are made. `--set` replaces a parameter of the figures, for example
`--set subnets=40` or `--set picture=losses.png`. The results are in RESULTS.md of each paper's folder. The scripts
kfkb.py, jap.py, umpipe.py, csp.py and dynpipe.py in benchmarks/ have the main results of each paper.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

from benchmarks.harness.netlab import lab_unavailable_reason
from benchmarks.harness.report import make_parser


@dataclass(frozen=True)
class Figure:
    """A figure or a table.

    Attributes:
        prints: a description of the printed results.
        made_by: the function, as "module:name" within the folder of the paper. The function yields the lines and
            numbers of the figure one by one.
        parameters: the arguments of the function.
        quick: the arguments that differ with `--quick`.
        is_on_links: whether the figure needs shaped links, and therefore root on Linux.
    """

    prints: str
    made_by: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    quick: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    is_on_links: bool = False


KFKB = {
    "f2": Figure(
        "analysis: a backward takes two forwards, and a message half a forward; simulated",
        "figures:analysis",
        {"cases": ((2, 4), (4, 16), (8, 32))},
    ),
    "f6": Figure(
        "granularity: k = 1 to 6 with micro-batches of floor(6 / k) samples, eight stages, fast and slow links",
        "figures:granularity",
        {"samples": 192},
        is_on_links=True,
    ),
    "f7": Figure(
        "weak scaling as with U-Net: the batch grows with the workers",
        "figures:weak",
        {"name": "f7", "microbatches": (16, 32, 64)},
        is_on_links=True,
    ),
    "f8": Figure(
        "weak scaling as with GPT: the model grows with the workers, and the batch does not",
        "figures:weak",
        {"name": "f8", "microbatches": (64, 64, 64)},
        is_on_links=True,
    ),
    "f9": Figure(
        "strong scaling: a forward of 40 ms and messages of 5 ms, on 2, 4 and 8 workers",
        "figures:strong",
        is_on_links=True,
    ),
    "f10": Figure(
        "links that change: an adaptive run compared with constant k, and the schedules that it adopted",
        "figures:changing",
        is_on_links=True,
    ),
    "gpt": Figure(
        "a real GPT in two stages, compared with DDP over the same links",
        "figures:gpt",
        {"rounds": 12, "speeds": (0.0, 1.0, 2.0)},
        {"rounds": 4, "speeds": (0.0, 2.0)},
        is_on_links=True,
    ),
    "tuner": Figure(
        "the cost of a choice, of a decision during training, and of a change of schedule",
        "tuner:tuner",
        {"batches": 120},
        {"batches": 40},
    ),
}
"""Ada-Grouper (Wang et al. 2023, arXiv:2303.01675)."""
JAP = {
    "stages": Figure("arrays with one, two and four stages per rank, simulated", "epochs:stages"),
}
"""ArrayPipe."""
UMPIPE = {
    "f10": Figure(
        "accuracy by epochs with the schemes of table 7, compared with the unsplit run",
        "accuracy:accuracy",
        {"networks": ("mnist", "cifar"), "epochs": 20, "double": False},
        {"epochs": 3},
    ),
}
"""UMPIPE."""
CSP = {
    "t3": Figure(
        "weights, losses, accuracy of a search and accesses of a layer on several numbers of stages (also F4 and T4)",
        "reproducibility:convergence",
        {"subnets": 400, "counts": (1, 2, 4, 8), "picture": ""},
        {"subnets": 60, "counts": (2, 4)},
    ),
    "peers": Figure(
        "subnets per second of real layers, compared with other ways to train them",
        "peers:peers",
        {
            "subnets": 200,
            "rounds": 3,
            "ways": (
                *("csp 1", "csp 2", "csp 4", "1f1b 2", "1f1b 4"),
                *("zero_bubble 2", "zero_bubble 4", "ddp", "one process"),
            ),
        },
        {"subnets": 60, "rounds": 1, "ways": ("csp 1", "1f1b 2", "ddp", "one process")},
    ),
    "turns": Figure(
        "hits and waiting times of layers that take turns in the memory of a device, on emulated layers",
        "turns:turns",
        {"subnets": 200},
        {"subnets": 50},
    ),
    "mirroring": Figure(
        "the gain of a partition for each subnet, simulated", "figures:mirroring", {"subnets": 300}, {"subnets": 100}
    ),
}
"""NASPipe (Zhao et al. 2022)."""
DYNPIPE = {
    "traces": Figure(
        "the time that moves regain under ten traces of neighbors, in virtual time",
        "planner:traces",
        {"cases": (("1f1b", 4, 16), ("1f1b", 8, 24), ("dynpipe", 4, 16), ("dynpipe", 8, 24)), "batches": 2000},
        {"cases": (("1f1b", 4, 16), ("dynpipe", 4, 16)), "batches": 800},
    ),
    "changing": Figure(
        "moves if neighbors of all ranks come and go at random, in virtual time",
        "planner:changing_neighbours",
        {"stays": (10, 20, 60, 200), "seeds": 3},
        {"stays": (20, 200), "seeds": 1},
    ),
    "formulas": Figure(
        "the errors of equations 4 and 5, against the simulator", "planner:formulas", {"count": 50}, {"count": 10}
    ),
    "replan": Figure("the processor time of a re-plan", "planner:replan"),
    "staleness": Figure(
        "batches until a target by stages, measured and predicted", "staleness:staleness", {"seeds": 6}, {"seeds": 2}
    ),
    "interference": Figure(
        "predictors of the slowdown by neighbors; `data` names a file to keep the measurements",
        "predictor:predictor",
        {"few": False, "seconds": 0.2, "problems": 200, "data": ""},
        {"few": True, "seconds": 0.06, "problems": 20},
    ),
    "migration": Figure(
        "steps while layers move, and the time of a move", "migration:migration", {"rounds": 30}, {"rounds": 5}, True
    ),
}
"""DynPipe."""
PAPERS = {"kfkb": KFKB, "jap": JAP, "umpipe": UMPIPE, "csp": CSP, "dynpipe": DYNPIPE}


def arguments_of(figure: Figure, quick: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a figure's function, with the values in `given` for parameters that it has."""
    arguments = {**figure.parameters, **(figure.quick if quick else {})}
    return arguments | {name: value for name, value in given.items() if name in arguments}


def make(paper: str, name: str, quick: bool, given: Mapping[str, Any]) -> dict[str, float]:
    """Make a figure, print its lines one by one, and return its numbers."""
    figure, keys = PAPERS[paper][name], dict[str, float]()
    print(f"\n{name}: {figure.prints}", flush=True)
    if figure.is_on_links and (reason := lab_unavailable_reason()):
        print(f"It can't be measured here: {reason}")
        return keys
    module, _, function = figure.made_by.partition(":")
    for found in getattr(import_module(f"benchmarks.papers.{paper}.{module}"), function)(
        **arguments_of(figure, quick, given)
    ):
        if isinstance(found, str):
            print(found, flush=True)
        else:
            keys |= found
    return keys


def value_of(text: str) -> Any:
    """Return the value of a text that is a Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def main() -> None:
    """List all figures, or make the named figures."""
    parser = make_parser(__doc__, "smaller parameters, for a shorter run")
    parser.add_argument("paper", nargs="?", choices=PAPERS)
    parser.add_argument("figures", nargs="*", metavar="figure", help="by default, all figures of the paper")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="the value of a parameter")
    options = parser.parse_args()
    if options.paper is None:
        for paper, figures in PAPERS.items():
            print("\n".join([paper, *(f"  {name:12} {figure.prints}" for name, figure in figures.items())]))
        return
    known = PAPERS[options.paper]
    names = options.figures or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{options.paper} has no figure {', '.join(unknown)}; it has {', '.join(known)}")
    given = {name: value_of(value) for name, _, value in (each.partition("=") for each in options.set)}
    taken = set().union(*(known[name].parameters for name in names))
    if unknown := [name for name in given if name not in taken]:
        parser.error(f"no parameter {', '.join(unknown)}; {', '.join(names)} have {', '.join(sorted(taken)) or 'none'}")
    keys: dict[str, float] = {}
    for name in names:
        keys |= make(options.paper, name, options.quick, given)
    if options.json:
        print(json.dumps(keys))


if __name__ == "__main__":
    main()
