"""Runs `make demo` repeatedly, and checks whether each run ends balanced and as fast as predicted.

A run is balanced if its second stage begins at the expected layer. The prediction was made when the stages were cut, or
after the first steps if these contradicted the earlier prediction.

    python benchmarks/demo.py              ten runs, each about a minute; exit status 1 unless all are right
    python benchmarks/demo.py --quick      one run of 40 batches
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.report import make_parser
from lightning_pipes.sim.records.compare import BottleneckRank
from lightning_pipes.sim.records.record import RunRecord

SCRIPT = Path(__file__).parents[1] / "examples" / "train.py"
BALANCED = [3]
"""The layer at which the second stage should begin, after the embedding and two blocks. Two blocks and the head follow.
"""
CLOSE = 0.1
"""The largest allowed difference between a measured and a predicted step, relative to the predicted one."""
SHORT = ["trainer.limit_train_batches=40", "trainer.limit_val_batches=1", "trainer.val_check_interval=1.0"]
_SAID = r"Step time, excluding the optimizer: ([\d.e+]+) (s|ms|us) predicted, ([\d.e+]+) (s|ms|us) measured"
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True)
class Run:
    """The outcome of one run of the example.

    Attributes:
        cut: the layers at which stages begin, except for the first stage.
        ratio: the time of the busier stage, divided by the time of the other one.
        predicted: the predicted seconds of a step up to the optimizer. The prediction was made when the model was cut,
            or when the first steps corrected it.
        measured: the measured seconds of a step up to the optimizer, as the median of the first hundred steps since
            then.
        contradicted: whether a trial of the pipeline contradicted the times that were measured layer by layer.
    """

    cut: list[int]
    ratio: float
    predicted: float
    measured: float
    contradicted: bool

    @classmethod
    def of(cls, record: RunRecord) -> Run:
        """Return the outcome that `examples/train.py` has saved."""
        assert record.measured is not None
        number = re.search(_SAID, record.choice)
        if number is None:
            raise SystemExit(f"nothing was predicted: {record.choice}")
        return cls(
            [span.start for span in record.plan.layers[1:]],
            BottleneckRank.from_timeline(record.measured).ratio,
            float(number[1]) * _UNITS[number[2]],
            float(number[3]) * _UNITS[number[4]],
            "A trial" in record.choice,
        )

    @property
    def off(self) -> float:
        """The relative difference between the measured and the predicted step, positive if the step was longer."""
        return self.measured / self.predicted - 1

    @property
    def right(self) -> bool:
        """Whether the run ended balanced and as fast as predicted."""
        return self.cut == BALANCED and abs(self.off) <= CLOSE

    def __str__(self) -> str:
        said = ", after a trial contradicted the profile" if self.contradicted else ""
        return (
            f"{'right' if self.right else 'WRONG'}  stages begin at {self.cut}, the busier one takes {self.ratio:.2f}x "
            f"the other's time; {1e3 * self.predicted:.0f} ms predicted{said}, {1e3 * self.measured:.0f} ms measured "
            f"({self.off:+.1%})"
        )


def demo(*overrides: str) -> Run:
    """Run the example once, with `overrides` of its settings, and return the outcome."""
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), f"hydra.run.dir={folder}/out", "trainer.enable_progress_bar=false"]
        done = subprocess.run([*command, *overrides], cwd=folder, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return Run.of(RunRecord.load(f"{folder}/out"))


def main() -> int:
    """Run the example several times and print the outcome of each run.

    Returns:
        The exit status: 1 if a run of the complete benchmark was not right, otherwise 0.
    """
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    runs = []
    for _ in range(1 if options.quick else options.runs):
        runs.append(demo(*SHORT) if options.quick else demo())
        print(runs[-1], flush=True)
    right = sum(run.right for run in runs)
    print(f"{right} of {len(runs)} are balanced and within {CLOSE:.0%} of the prediction")
    if options.json:
        print(json.dumps({"runs": [{**asdict(run), "off": run.off} for run in runs], "right": right}))
    return 0 if options.quick or right == len(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
