"""Plain modules without a container of layers, each trained by units on two processes beside one of plain Lightning.

    python benchmarks/any_model.py [--quick] [--json] [--case NAME ...]

The modules are those of tests/trainer/units/zoo.py, in float64, two epochs of two batches with AdamW. Equal means that
no loss, weight or optimizer state differs by more than 1e-10. Modules that draw random numbers are compared with one
process of the same strategy, which draws them from the same streams. `--quick` takes every third module.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from benchmarks.harness.report import make_parser
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import differences
from tests.trainer.units.lit_zoo import CUT, DRAWING, WHOLE, train_many, train_zoo

PARTS = ("losses", "val", "weights", "saved", "optimizer")
CASES = {
    **dict.fromkeys(
        [
            "nine linears",
            "siamese",
            "multi-task heads",
            "cell in a time loop",
            "tied by functions",
            "dense skips in a dataclass",
            "autograd.Function and complex numbers",
            "experts by hand",
            "lstm and gru",
            "nn.Transformer",
            "gan with one backward",
        ],
        CUT,
    ),
    **dict.fromkeys(
        ["u-net", "resnet by hand", ".item() control flow", "parametrizations", "train mode mix"],
        WHOLE,
    ),
}


def compare(name: str, two: list[dict[str, Any]], alone: dict[str, Any]) -> list[str]:
    """Return where two ranks differ from one process."""
    parts = [(rank, part) for rank in (0, 1) for part in (PARTS if rank == 0 else PARTS[:3])]
    return [d for rank, part in parts for d in differences(alone[part], two[rank][part], 1e-10, f"rank {rank} {part}")]


def main(arguments: list[str]) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--case", nargs="*", choices=list(CASES))
    given = parser.parse_args(arguments)
    names = given.case or (list(CASES)[::3] if given.quick else list(CASES))
    equal = 0
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(train_many, 2, [(name, CASES[name]) for name in names], 2, folder, timeout=600)
        for number, name in enumerate(names):
            if name in DRAWING:
                alone = run_ranks(train_many, 1, [(name, CASES[name])], 1, folder, timeout=120)[0][0]
            else:
                alone = train_zoo(name, 0, folder)
            found = compare(name, [of_rank[number] for of_rank in ranks], alone)
            equal += not found
            print(f"{name:40s} {'equal' if not found else found[0]}", flush=True)
    if given.json:
        print(json.dumps({"zoo_equal": equal, "zoo_total": len(names)}))


if __name__ == "__main__":
    main(sys.argv[1:])
