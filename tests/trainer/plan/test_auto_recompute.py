"""Runs in which `recompute="auto"` chooses the stages that recompute, compared with one process and with given stages.

The devices of the tests have no memory limits, so limits are given in place of theirs. The bytes of layers are given,
and the bytes of units are measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.ir import PlanError
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.fit import price_stages
from lightning_pipes.planning.memory import peak_bytes
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.planning.stage_recompute import with_stages
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan import decider, layer_profiler, profile_planner
from lightning_pipes.trainer.plan.layer_profiler import NotMeasuredError
from lightning_pipes.trainer.plan.trial import Trials
from lightning_pipes.trainer.setup import memory_limit, unit_recorder, unit_setup
from tests.trainer.lit import Case, Lit, as_predicted, differences, train

MIB = 2**20
PLAIN = {"microbatches": 4, "partition": "parameters"}


class Watch(Callback):
    """Records the decision, and which stages recompute in batches of each size."""

    def __init__(self) -> None:
        self.decision: Any = None
        self.recompute: dict[int, tuple[bool, ...]] = {}
        self.kept = set[tuple[tuple[int, int], ...]]()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        plan = trainer.strategy.current_run.engine.plan
        self.decision = trainer.strategy.decision
        self.recompute[plan.jobs[0].rows] = plan.recompute
        self.kept.add(plan.kept_microbatches)


def equal_layers(self: Any, pieces: int | None, split: bool) -> ModelProfile:
    """Replace a measurement: each layer keeps 1 MiB per sample, and takes 1 s forward and 2 s backward."""
    times = dict.fromkeys(("forward", "input_backward", "weight_backward"), ((1, 0.1),))
    layer = LayerProfile("", backward=((1, 0.2),), **times, saved=((0, 0.0), (1, float(MIB))), output=((1, 64.0),))
    return ModelProfile((layer,) * 9)


def unmeasured(self: Any, *_: Any) -> Any:
    raise NotMeasuredError("the data provide no samples")


def run(
    case: dict[str, Any], ranks: int, folder: Path, limit: int | None, measured: Any = equal_layers
) -> dict[str, Any]:
    """Train with a memory limit of every rank, and return the results with the decision and the messages."""
    watch, texts = Watch(), list[str]()
    strategy = {key: value for key, value in case.items() if key != "dropout"}
    with pytest.MonkeyPatch.context() as patch:
        decider._profiles.clear()
        patch.setattr(profile_planner, "device_memory", lambda device: limit)
        patch.setattr(layer_profiler.LayerProfiler, "profile", measured)
        patch.setattr(Trials, "run", as_predicted)
        for module in (decider, memory_limit, unit_setup):
            for name in {"rank_zero_info", "rank_zero_warn"} & {*vars(module)}:
                patch.setattr(module, name, texts.append)
        settings = {"dropout": case.get("dropout", 0.0)}
        found = train(Case(Lit, settings, strategy, {"callbacks": [watch]}), ranks, folder)
    return {**found, "decision": watch.decision, "recompute": watch.recompute, "kept": watch.kept, "texts": texts}


CASES: dict[str, tuple[int, dict[str, Any], int, tuple[bool, ...]]] = {
    "one of one": (2, {}, 12 * MIB, (True, False)),
    "cut by time": (2, {"partition": "auto"}, 12 * MIB, (True, False)),
    "enough": (2, {}, 17 * MIB, ()),
    "two stages a rank": (2, {"schedule": "interleaved"}, 14 * MIB, (True, False, False, False)),
    "dropout": (2, {"dropout": 0.4}, 12 * MIB, (True, False)),
    "decided while it runs": (2, {"schedule": "ready"}, 12 * MIB, (True, False)),
    "overlapping": (2, {"schedule": "pipedream"}, 12 * MIB, (True, False)),
    "v": (2, {"schedule": "v"}, 17 * MIB, (True, False, False, False)),
    "automatic schedule": (2, {"schedule": "auto", "partition": "auto"}, 9 * MIB, (True, True, False, False)),
    "replicas": (4, {"data_parallel": 2}, 12 * MIB, (True, False)),
    "one of four": (4, {}, 13 * MIB, (True, False, False, False)),
    "two of four": (4, {}, 9 * MIB, (True, True, False, False)),
}
"""The number of ranks, settings, the bytes of each rank, and the stages that recompute."""
BY_NUMBER = ("one of one", "two stages a rank", "dropout", "decided while it runs", "replicas", "two of four")
"""The cases that are compared with runs in which the stages are given by number, and in which no stage recomputes."""


def trained(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    results = {}
    for name, (needed, given, limit, expected) in CASES.items():
        if needed != ranks:
            continue
        case = {**PLAIN, "recompute": "auto", **given}
        results[name] = run(case, ranks, Path(folder) / name, limit)
        if name in BY_NUMBER:
            stages = [stage for stage, again in enumerate(expected) if again]
            for setting in (stages, False):
                key = f"{name}, {setting}"
                results[key] = run({**case, "recompute": setting}, ranks, Path(folder) / key, None)
    return results


@cache
def runs(ranks: int) -> list[dict[str, Any]]:
    return run_ranks(trained, ranks, ranks, mkdtemp(), timeout=900)


@pytest.mark.parametrize("name", CASES)
def test_the_stages_that_lack_memory_recompute(name: str) -> None:
    ranks, _, _, expected = CASES[name]
    found = [of_rank[name] for of_rank in runs(ranks)]
    assert all(set(each["recompute"].values()) == {expected} for each in found)
    assert len({(each["decision"].recompute, each["decision"].layers) for each in found}) == 1
    assert found[0]["decision"].recompute != "auto"


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_process(name: str) -> None:
    """Gradients, weights, outputs and logs are compared. Runs with the same stages by number have the same bits."""
    ranks, given, *_ = CASES[name]
    if given.get("schedule") != "pipedream" and not {"dropout", "data_parallel"} & {*given}:
        same = {"outputs", "metrics", "weights", "rates", "steps"}
        alone = train(Case(), 1, Path(mkdtemp()))
        for found in runs(ranks):
            assert differences({k: found[name][k] for k in same}, {k: alone[k] for k in same}) == []
    if name in BY_NUMBER:
        same = {"outputs", "metrics", "weights", "rates", "steps", "gradients"}
        for found in runs(ranks):
            others = [key for key in found if key.startswith(f"{name}, ")]
            assert len(others) == 2
            for other in others:
                expected = {k: found[other][k] for k in same}
                assert differences({k: found[name][k] for k in same}, expected, tolerance=0.0) == []


def test_stages_keep_micro_batches_that_fit() -> None:
    """Stage s of four holds 4 - s micro-batches of 4 MiB. The last ones are recomputed when the first ones are gone."""
    for found in runs(4):
        assert found["one of four"]["kept"] == {((3, 4), (0, 1), (0, 1), (0, 1))}
        assert found["two of four"]["kept"] == {((2, 4), (2, 3), (0, 1), (0, 1))}


def test_the_log_names_the_stages_and_the_ranks() -> None:
    text = "\n".join(runs(4)[0]["two of four"]["texts"])
    assert (
        "recompute='auto': stages 0 and 1 recompute (stage 0: 2 of every 4 micro-batches, stage 1: 1 of every 3 "
        "micro-batches), because rank 0 would need 16 MiB of 9 MiB without it, and needs 8 MiB with it; rank 1" in text
    )
    text = "\n".join(runs(2)[0]["enough"]["texts"])
    assert "no stage recomputes, because every rank has enough memory (16 MiB of 17 MiB on rank 0)" in text


# ---- units, and runs without a choice


def cut_by_units(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Train with units, with much memory at first, and then with too little memory for stage 0.

    Stage 0 is on the last process.
    """
    borders = [f"model.{n}" for n in ((4,) if ranks == 2 else (2, 4, 6))]
    case, results = {"microbatches": 4, "partition": borders, "recompute": "auto"}, dict[str, Any]()
    results["much"] = run(case, ranks, Path(folder) / "much", 10**12)
    plain, again = peaks(results["much"]["decision"], ranks)
    assert again[0] < plain[0]
    limit = (plain[0] + again[0]) // 2 if rank == ranks - 1 else 10**12
    results["little"] = run(case, ranks, Path(folder) / "little", limit)
    results["by number"] = run({**case, "recompute": [0]}, ranks, Path(folder) / "by number", None)
    with pytest.raises(PlanError, match=r"recompute='auto': stage \d on rank \d needs .* KiB and has 100 bytes, "):
        run(case, ranks, Path(folder) / "none", 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_recorder.UnitRecorder, "measure", lambda *_: {})
        results["unmeasured"] = run(case, ranks, Path(folder) / "unmeasured", 10**12)
    return results


def peaks(decision: Any, ranks: int) -> list[tuple[int, ...]]:
    """Return the peak of each rank without recomputation, and with recomputation in stage 0."""
    plan = even_plan(make_schedule("1f1b"), ranks, 4, 8)
    costs = price_stages(decision.profile, replace(plan, layers=decision.layers), decision.deployment)
    plans = (plan, with_stages(plan, [0], early=True))
    return [peak_bytes(make_schedule("1f1b").program(each), each, costs) for each in plans]  # type: ignore[union-attr]


@pytest.mark.parametrize("ranks", [2, 4])
def test_stages_of_units_recompute(ranks: int) -> None:
    alone = train(Case(), 1, Path(mkdtemp()))
    same = {"outputs", "metrics", "weights", "rates", "steps"}
    for found in run_ranks(cut_by_units, ranks, ranks, mkdtemp(), timeout=900):
        assert set(found["much"]["recompute"].values()) == {()}
        assert set(found["little"]["recompute"].values()) == {(True, *(False,) * (ranks - 1))}
        assert differences({k: found["little"][k] for k in same}, {k: alone[k] for k in same}) == []
        for other in ("much", "by number"):
            expected = {k: found[other][k] for k in (*same, "gradients")}
            assert differences({k: found["little"][k] for k in expected}, expected, tolerance=0.0) == []
        assert set(found["unmeasured"]["recompute"].values()) == {()}
        (text,) = [text for text in found["unmeasured"]["texts"] if "is not decided" in text]
        assert "Set recompute=True if it does" in text


def left_open(rank: int, folder: str) -> dict[str, Any]:
    case = {**PLAIN, "recompute": "auto"}
    with pytest.raises(PlanError, match="stage 1 on rank 1 needs 10 MiB and has 7 MiB, and recomputation"):
        run(case, 2, Path(folder) / "none", 7 * MIB)
    return {
        "no limit": run(case, 2, Path(folder) / "no limit", None),
        "unmeasured": run(case, 2, Path(folder) / "unmeasured", 7 * MIB, unmeasured),
    }


def test_an_open_choice_is_reported_and_nothing_recomputes() -> None:
    for found in run_ranks(left_open, 2, mkdtemp(), timeout=400):
        assert all(set(each["recompute"].values()) == {()} for each in found.values())
        assert "no stage recomputes, because no memory limit is known" in "\n".join(found["no limit"]["texts"])
        (text,) = [text for text in found["unmeasured"]["texts"] if "is not decided" in text]
        assert "the data provide no samples. The run may need more memory than the devices have" in text
