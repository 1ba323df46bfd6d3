"""Train random modules in a pipeline and in one plain process, and compare the results."""

from __future__ import annotations

import linecache
import os
import re
import shutil
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lightning_pipes import JobArray, PipelineStrategy
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from tests.compat.runs import Keeper, rows_of_csv
from tests.fuzz.modules import Made, moving_module, padded_module, random_module, replanned_module, source
from tests.fuzz.moving import REPLANS, KeepsCuts, MovesLayers
from tests.fuzz.old_weights import ReadsOldWeights
from tests.fuzz.supernets import STREAM_CUT, moving_stream, streamed_module, supernet_module
from tests.trainer.lit import differences, plain_values, quiet

EQUAL, REFUSED, WARNED, ALIKE, WRONG = "equal", "refused", "warned", "fails alike", "WRONG"
TOLERANCE = 1e-9
EACH = 60.0
"""Seconds per module and rank. A busy machine needs ten times as long as a quiet one."""
_OWN = re.compile(r"/(lightning_pipes|strategies)/")
_PASSED_ON = re.compile(r"/(lightning_utilities|lightning/(fabric|pytorch)/utilities|warnings\.py)")

Found = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a module in a pipeline, compared with one plain process.

    Attributes:
        kind: `EQUAL`, `REFUSED`, `WARNED`, `ALIKE` (both runs fail with the same error) or `WRONG`.
        text: an error, a warning or a difference that explains the kind.
        warned: all warnings of the ranks.
        moved: the number of times that layers moved.
    """

    kind: str
    text: str = ""
    warned: tuple[str, ...] = ()
    moved: int = 0


def loaded(made: Made) -> types.ModuleType:
    """Execute the script of a module like an import, and return it. Tracebacks show its lines."""
    text, name = source(made), f"<module {made.seed}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    script = types.ModuleType(f"fuzzed_{made.seed}")
    sys.modules[script.__name__] = script
    exec(compile(text, name, "exec"), script.__dict__)
    return script


@contextmanager
def own_warnings() -> Iterator[list[str]]:
    """Collect the warnings that lightning_pipes gives in the block, without printing any warnings."""
    caught: list[str] = []
    quiet()

    def look(message: Any, *_: Any, **__: Any) -> None:
        frame = sys._getframe(1)
        while frame is not None and (
            _PASSED_ON.search(frame.f_code.co_filename) or "warnings" in frame.f_code.co_filename
        ):
            frame = frame.f_back  # type: ignore[assignment]
        if frame is not None and _OWN.search(frame.f_code.co_filename):
            caught.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = look
        yield caught


def train(
    made: Made, strategy: Callable[[], Any], ranks: int, folder: str, lr: float = 0.05, moved: Any = None
) -> Found:
    """Run a module and return its results on this rank, or its error if it ended early.

    Args:
        moved: `KeepsCuts.moved` of the pipeline, for the plain run of a stream.
    """
    try:
        found = _trained(made, strategy, ranks, folder, lr, moved or {})
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        told = isinstance(error, PipelineError)
        found = {
            "error": f"{type(error).__name__}: {error}"[:800],
            "ours": told,
            "at": f"{Path(where.filename).name}:{where.lineno}",
            "trace": "" if told else traceback.format_exc()[-3000:],
        }
    torch.autograd.set_detect_anomaly(False)
    return found


def _trained(made: Made, strategy: Callable[[], Any], ranks: int, folder: str, lr: float, moved: Any) -> Found:
    script = loaded(made)
    resumes = script.RESUMES
    for epochs in (1, 2) if resumes else (None,):
        keeper, made_strategy = Keeper(), strategy()
        moves = [MovesLayers(made.seed)] if made.base.moves and made_strategy != "auto" else []
        late: list[Any] = []
        if made_strategy != "auto":
            late = [KeepsCuts()] if REPLANS in made.causes else []
        elif made.base.place == "headless":
            late = [ReadsOldWeights(STREAM_CUT, moved)]
        trainer, module = script.make(folder, made_strategy, ranks, [*late, keeper, *moves], lr, epochs)
        resume = {"ckpt_path": f"{folder}/first.ckpt", "weights_only": False} if epochs == 2 else {}
        trainer.fit(module, **script.data(), **resume)
        if epochs == 1:
            trainer.save_checkpoint(f"{folder}/first.ckpt")
    found = {
        "outputs": keeper.outputs,
        "rates": keeper.rates,
        "validations": keeper.metrics,
        "weights": plain_values(dict(module.state_dict())),
        "metrics": plain_values(dict(trainer.callback_metrics)),
        "logged": plain_values(dict(trainer.logged_metrics)),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
    }
    if moves:
        found["moved"] = moves[0].moved
    elif made_strategy != "auto" and late:
        found["moved"] = late[0].moved
    if trainer.is_global_zero:
        found["rows"] = rows_of_csv(Path(folder) / "version_0" / "metrics.csv")
    return found


RATES = (0.05, 0.02, 0.01)
"""Learning rates of the siblings of an array. A single run has the first one."""


def alone(made: Made, folder: str, moved: Any = None) -> list[Found]:
    """Return the results of the plain runs, one for each sibling."""
    rates = RATES[: max(1, made.base.siblings)]
    with own_warnings():
        return [train(made, lambda: "auto", 1, f"{folder}/{n}", rate, moved) for n, rate in enumerate(rates)]


def in_pipeline(made: Made, folder: str) -> list[Found]:
    """Return the results of the run, or of each sibling, on this rank."""
    strategy = partial(PipelineStrategy, **settings(made))
    jobs: list[Callable[[], Found]] = [
        partial(train, made, strategy, made.base.ranks, f"{folder}/{n}", rate)
        for n, rate in enumerate(RATES[: max(1, made.base.siblings)])
    ]
    with own_warnings() as warned:  # shared by all siblings: warnings can be caught only for the whole process
        if made.base.siblings:
            array: Any = JobArray(made.base.siblings, progress=False)
            values = {outcome.index: outcome.value for outcome in array.run(jobs)}
        else:
            values = {0: jobs[0]()}
    return [values[n] | {"warned": warned} for n in range(len(jobs))]


def settings(made: Made) -> dict[str, Any]:
    return loaded(made).SETTINGS  # type: ignore[no-any-return]


def on_a_rank(rank: int, cases: Sequence[Made], folder: str) -> list[list[Found]]:
    """Run all modules on one rank, one after another in one process, even after a module fails."""
    found = []
    for number, made in enumerate(cases):
        Path(folder, f"rank{rank}").write_text(f"{number}")
        found.append(in_pipeline(made, f"{folder}/{number}"))
    return found


def verdict(made: Made, ranks: Sequence[Found], plain: Found) -> Verdict:
    """Return the verdict on a module from the results of its ranks and of the plain run."""
    errors = [found.get("error", "") for found in ranks]
    if "error" in plain:
        kind = plain["error"].partition(":")[0]
        if all(errors) and any(kind in each for each in errors):
            return Verdict(ALIKE, plain["error"])
        if all(errors) and all(found["ours"] for found in ranks):
            return Verdict(REFUSED, errors[0])
        return Verdict(WRONG, f"alone: {plain['error']}, ranks: {errors}")
    if any(errors):
        if not all(errors):
            return Verdict(WRONG, f"one rank ends well, another not: {errors}")
        if not all(found["ours"] for found in ranks):
            traces = "\n".join(found["trace"] for found in ranks)
            return Verdict(WRONG, f"raw error: {errors}\n{traces}")
        allowed = [piece.refused for piece in made.pieces if piece.refused]
        if any(re.search(pattern, each) for pattern in allowed for each in errors):
            return Verdict(REFUSED, errors[0])
        return Verdict(WRONG, f"refused, and nothing in it should be: {errors}")
    found = [f"rank {rank}, {each}" for rank, one in enumerate(ranks) for each in compare(made, one, plain)]
    if not found:
        return Verdict(EQUAL)
    warned = [text for one in ranks for text in one["warned"]]
    allowed = [piece.warned for piece in made.pieces if piece.warned]
    for text in warned:
        if any(re.search(pattern, text) for pattern in allowed):
            return Verdict(WARNED, text)
    return Verdict(WRONG, "silent difference: " + "; ".join(found[:12]) + f"; warned of: {warned}")


def compare(made: Made, found: Found, plain: Found) -> list[str]:
    """Return the differences between the results of a rank and of the plain run."""
    wrong = []
    for what in sorted(plain.keys() - {"warned"} - made.uncompared):
        if what == "rows" and what not in found:
            continue
        wrong += differences(found.get(what), plain[what], TOLERANCE, what)
    return wrong


def verdicts(cases: Sequence[Made], env: dict[str, str] | None = None) -> list[Verdict]:
    """Return the verdict on each module.

    Modules with the same number of ranks share processes. If one of them does not end, the others run again.
    """
    found: dict[int, Verdict] = {}
    with TemporaryDirectory() as folder:
        for ranks in sorted({made.base.ranks for made in cases}):
            left = [n for n, made in enumerate(cases) if made.base.ranks == ranks]
            while left:
                chosen = [cases[n] for n in left]
                here = f"{folder}/{ranks}_{len(left)}"
                Path(here).mkdir()
                try:
                    by_rank = run_ranks(on_a_rank, ranks, chosen, here, timeout=60 + EACH * len(chosen), env=env)
                except RanksFailedError as error:
                    at = max(int(each.read_text() or 0) for each in (*Path(here).glob("rank*"), Path(os.devnull)))
                    found[left[at]] = Verdict(WRONG, f"no end: {error}")
                    left = left[:at] + left[at + 1 :]
                    continue
                for n, *each in zip(left, *by_rank, strict=True):
                    moved = each[0][0].get("moved")
                    plain = alone(cases[n], f"{folder}/alone{n}", moved)
                    runs = [verdict(cases[n], one, alone) for *one, alone in zip(*each, plain, strict=True)]
                    worst = max(runs, key=lambda came: [EQUAL, ALIKE, REFUSED, WARNED, WRONG].index(came.kind))
                    warned = dict.fromkeys(text for runs in each for one in runs for text in one["warned"])
                    found[n] = replace(worst, warned=tuple(warned), moved=len(moved) if isinstance(moved, dict) else 0)
                shutil.rmtree(here)
                left = []
    return [found[n] for n in range(len(cases))]


def shrunk(made: Made) -> Made:
    """Return a smaller version of a module that is still wrong, with fewer pieces and a plainer base."""
    smaller = True
    while smaller:
        smaller = False
        fewer = [made.without(n) for n in range(len(made.pieces))]
        fewer += [_plainer(made, name) for name in _PLAIN if getattr(made.base, name) != _PLAIN[name]]
        for each, came in zip(fewer, verdicts(fewer), strict=True):
            if came.kind == WRONG:
                made, smaller = each, True
                break
    return made


_PLAIN: dict[str, Any] = {
    "place": "sequential",
    "block": "tanh",
    "batches": "pairs",
    "loss": "cross entropy",
    "optimizer": "sgd",
    "rows": 24,
    "schedule": "1f1b",
    "epochs": 1,
    "resumes": False,
    "siblings": 0,
}


def _plainer(made: Made, name: str) -> Made:
    more: dict[str, Any] = {name: _PLAIN[name]}
    if name == "schedule":
        more["schedule_args"] = {}
    return replace(made, base=replace(made.base, **more))


def main(arguments: Sequence[str]) -> None:
    """Print the verdicts on the modules of the given seeds, or ranges of seeds such as 0-300."""
    options = {each for each in arguments if each.startswith("--")}
    seeds: list[int] = []
    for each in arguments:
        if not each.startswith("--"):
            first, _, last = each.partition("-")
            seeds += range(int(first), int(last or first) + 1)
    counts: dict[str, int] = {}
    for start in range(0, len(seeds), 25):
        most = 1 if "--alone" in options else 6
        kinds = {
            "--moving": moving_module,
            "--padded": padded_module,
            "--supernet": supernet_module,
            "--stream": streamed_module,
            "--replan": replanned_module,
            "--moving-stream": moving_stream,
        }
        make = next((kinds[each] for each in options if each in kinds), random_module)
        cases = [make(seed, pieces_at_most=most) for seed in seeds[start : start + 25]]
        if len(seeds) == 1 and "--quiet" not in options:
            print(source(cases[0]))
        for made, came in zip(cases, verdicts(cases), strict=True):
            counts[came.kind] = counts.get(came.kind, 0) + 1
            if came.moved:
                counts["moved"] = counts.get("moved", 0) + came.moved
            if came.kind != EQUAL:
                print(f"{made.seed}: {came.kind}: {made.causes} {made.base}\n    {came.text}", flush=True)
            if came.kind == WRONG and "--shrink" in options:
                small = shrunk(made)
                print(f"    {made.seed} shrunk: {small.causes} {small.base}\n{source(small)}")
    print(counts)
