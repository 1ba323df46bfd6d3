"""The small parts, each by itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

import lightning_pipes.trainer
from lightning_pipes.arrays.siblings.barriers import has_purpose
from lightning_pipes.ir import DeadlockError, Instruction, Kind, PipelineError, Plan, Policy, Program, RankView, Span
from lightning_pipes.ir.registry import installed_schedules, make_schedule
from lightning_pipes.planning.planner import Problem
from lightning_pipes.trainer.module.batches import check_same, fingerprint, join, rows_of, sample_fingerprint, take
from lightning_pipes.trainer.module.capture import Interceptor
from lightning_pipes.trainer.module.equal_starts import checksum
from lightning_pipes.trainer.module.optimizers import OptimizerLayout, parameter_names
from lightning_pipes.trainer.module.pipelined import CutModule
from lightning_pipes.trainer.patches import Patches
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.step.hook_view import track_hooks
from lightning_pipes.trainer.step.hooks import wrap_module_hooks
from lightning_pipes.trainer.step.logs import LogCall, merge, recorded
from tests.trainer.lit import Lit, LitTied, restore
from tests.trainers import make_trainer


class Pair(NamedTuple):
    x: Any
    y: Any


def test_take_cuts_what_counts_samples():
    x = torch.arange(12).view(6, 2)
    batch = {"pair": Pair(x, [x[:, 0], 7]), "names": list("abcdef"), "weights": torch.ones(3), "flag": True}
    part = take(batch, Span(2, 4), 6)
    assert part["pair"].x.tolist() == [[4, 5], [6, 7]]
    assert part["pair"].y[0].tolist() == [4, 6]
    assert part["pair"].y[1] == 7
    assert part["names"] == ["c", "d"]
    assert part["weights"] is batch["weights"]
    assert part["flag"] is True


def test_rows_of():
    assert rows_of({"x": torch.ones(5, 2)}) == 5
    assert rows_of({"temperature": torch.tensor(2.0), "names": ["a"], "pair": Pair(None, [torch.ones(4), 1])}) == 4
    with pytest.raises(PipelineError, match="can't tell how many samples a batch of type dict holds"):
        rows_of({})
    with pytest.raises(PipelineError, match="axis 0 counts samples"):
        rows_of([torch.tensor(1.0), "abc"])


def test_join_is_the_other_direction_of_take():
    x = {"a": torch.randn(7, 2), "b": (torch.arange(7), None)}
    spans = [Span(0, 3), Span(3, 7)]
    whole = join([{"a": x["a"][a:b], "b": (x["b"][0][a:b], None)} for a, b in spans], spans, "it")
    assert torch.equal(whole["a"], x["a"])
    assert torch.equal(whole["b"][0], x["b"][0])
    masks = [torch.ones(1, 4), torch.ones(1, 4)]
    assert join([{"mask": m} for m in masks], spans, "it")["mask"] is masks[0]
    with pytest.raises(PipelineError, match=r"it for 3 samples has shape \(1, 4\)"):
        join([torch.ones(1, 4), torch.zeros(1, 4)], spans, "it")
    with pytest.raises(PipelineError, match=r"it for 3 samples has shape \(2, 3\); axis 0 must count samples"):
        join([torch.ones(2, 3), torch.ones(2, 4)], spans, "it")


def test_fingerprint_sees_values_shapes_and_types():
    x = torch.arange(6.0)
    others = [x.view(2, 3), x.double(), x + 1e-6 * (x == 3), x.flip(0)]
    assert len({fingerprint({"x": t}) for t in (x, *others)}) == 5
    assert fingerprint([x, "a"]) == fingerprint([x.clone(), "b"])
    with pytest.raises(PipelineError, match="training, batch 0: the ranks of one pipeline loaded different batches"):
        check_same(["a", "b"], [0, 1], "training, batch 0")


def test_sampled_fingerprint_sees_other_samples_in_little_time():
    x = torch.randn(64, 3, 50, 50)
    others = [x.double(), x[:32], x.roll(1, 0), x + (torch.arange(64) == 5).view(-1, 1, 1, 1)]
    assert len({sample_fingerprint({"x": t}) for t in (x, *others)}) == 5
    assert sample_fingerprint([x, "a"]) == sample_fingerprint([x.clone(), "b"])
    small = torch.zeros(40)
    assert sample_fingerprint(small) != sample_fingerprint(small + (torch.arange(40) == 7))
    columns = torch.zeros(4096, 64)
    assert sample_fingerprint(columns) != sample_fingerprint(columns + (torch.arange(64) == 3))  # some of each column
    assert sample_fingerprint(x.transpose(0, 1)) == sample_fingerprint(x.transpose(0, 1).contiguous())


def test_merged_calls():
    def calls(mean: float, total: int, most: float, twice: list[float], size: int | None = None) -> list[LogCall]:
        return [
            LogCall("mean", torch.tensor(mean), {"prog_bar": True}),
            LogCall("sum", total, {"reduce_fx": "sum"}),
            LogCall("max", torch.tensor(most), {"reduce_fx": torch.max}),
            *(LogCall("twice", value) for value in twice),
            *([LogCall("sized", mean, {"batch_size": size})] if size else []),
        ]

    merged = merge([calls(1.0, 2, 5.0, [1.0, 10.0], 7), calls(4.0, 3, -1.0, [3.0, 30.0], 14)], [1, 2])
    by_name = [(c.name, float(c.value), c.options["batch_size"]) for c in merged]
    assert by_name == [
        ("mean", 3.0, 3),
        ("sum", 5.0, 3),
        ("max", 5.0, 3),
        ("twice", pytest.approx(7 / 3), 3),
        ("twice", pytest.approx(70 / 3), 3),
        ("sized", pytest.approx(3.0), 21),
    ]
    assert merged[0].options["prog_bar"]


def test_recording_leaves_the_module_as_it_was():
    module = Lit()
    with recorded(module) as calls:
        module.log("a", 1.0, True, on_epoch=True)
        module.log_dict({"b": torch.tensor(2.0), "c": 3}, batch_size=4)
    assert [(c.name, float(c.value)) for c in calls] == [("a", 1.0), ("b", 2.0), ("c", 3.0)]
    assert calls[0].options == {"prog_bar": True, "on_epoch": True}
    assert calls[1].options["batch_size"] == 4
    assert "log" not in vars(module)


class TestInterceptor:
    def test_capture_stops_at_the_call(self):
        reached = []
        inner = Interceptor("self.model")

        def step(x: int) -> None:
            reached.append("before")
            try:
                inner((x * 2,), {})
            except Exception:
                reached.append("caught")
            reached.append("after")

        assert inner.capture(step, 21) == 42
        assert reached == ["before"]

    def test_supply_gives_the_answer(self):
        inner = Interceptor("self.model")
        assert inner.supply(lambda x: inner((x,), {}) + 1, lambda x: 10 * x, 4) == 41

    def test_outside_of_a_step(self):
        with pytest.raises(PipelineError, match="called outside of training_step"):
            Interceptor("self.model")((1,), {})


class TestCutModule:
    def cut(self, module: pl.LightningModule, local: list[int]) -> CutModule:
        return CutModule(module, "model", local, Interceptor("self.model"))

    def test_only_local_layers_are_registered_under_their_names(self):
        module = Lit()
        whole = dict(module.state_dict())
        cut = self.cut(module, [2, 8])
        assert list(module.state_dict()) == ["model.2.0.weight", "model.2.0.bias", "model.8.weight", "model.8.bias"]
        assert cut.keys == list(whole)
        assert len(module.model) == 9
        assert module.model[0][0].weight.is_meta
        assert module.model[0][0].weight.shape == whole["model.0.0.weight"].shape
        assert [m is module.model[n] for n, m in enumerate(module.model)] == [True] * 9
        assert "(0): on another rank" in repr(module.model)

    def test_memory_of_other_ranks_layers_is_released(self):
        module = Lit()
        foreign = module.model[0][0].weight
        self.cut(module, [2])
        assert foreign.is_meta

    def test_restore_brings_the_same_objects_back(self):
        module = LitTied()
        before = dict(module.named_parameters(remove_duplicate=False))
        values = {k: v.clone() for k, v in module.state_dict().items()}
        full = module.model
        cut = self.cut(module, [2])
        restore(cut, values)
        after = dict(module.named_parameters(remove_duplicate=False))
        assert module.model is full
        assert all(after[name] is before[name] for name in before)
        assert all(torch.equal(v, values[k]) for k, v in module.state_dict().items())

    def test_tied_weights_stay_where_one_of_them_is_local(self):
        module = LitTied()
        cut = self.cut(module, [4])
        assert not module.model[4].weight.is_meta
        assert module.model[0].weight is module.model[4].weight
        assert not cut.is_foreign(module.model[4].weight)

    def test_buffers_that_are_not_saved_stay(self):
        module = Lit()
        module.model[0].register_buffer("table", torch.arange(3), persistent=False)
        module.model[0].register_buffer("count", torch.arange(4))
        values = copy.deepcopy(module.state_dict())
        cut = self.cut(module, [2])
        assert module.model[0].count.is_meta
        restore(cut, values)
        assert module.model[0].table.tolist() == [0, 1, 2]
        assert module.model[0].count.tolist() == [0, 1, 2, 3]

    def test_attributes_of_the_whole_are_reachable(self):
        module = Lit()
        module.model.note = "hello"
        self.cut(module, [0])
        assert module.model.note == "hello"
        with pytest.raises(AttributeError):
            module.model.missing  # noqa: B018


def test_optimizer_keeps_groups_and_loses_foreign_parameters():
    module = Lit()
    optimizer = torch.optim.Adagrad(  # makes its state at once
        [{"params": [p for n, p in module.named_parameters() if n.endswith(e)]} for e in ("weight", "bias")]
    )
    whole = parameter_names(module, [optimizer])[0]
    one_process = copy.deepcopy(optimizer.state_dict())
    layouts = []
    for local in ([0, 1], [2, 3, 4, 5, 6, 7, 8]):
        other = copy.deepcopy(module)
        mine = torch.optim.Adagrad(
            [{"params": [p for n, p in other.named_parameters() if n.endswith(e)]} for e in ("weight", "bias")]
        )
        cut = CutModule(other, "model", local, Interceptor("self.model"))
        layouts.append((mine, OptimizerLayout(mine, whole)))
        layouts[-1][1].keep_local(cut.is_foreign)
    first, layout = layouts[0]
    assert layout.local == (("model.0.0.weight",), ("model.0.0.bias",))
    assert len(first.state) == 2
    states = [layout.states_by_name(o.state_dict()) for o, layout in layouts]
    gathered = layout.whole_state(first.state_dict(), states)
    assert str(gathered) == str(one_process)
    for mine, layout in layouts:
        mine.load_state_dict(layout.local_state(one_process))
    one_process["param_groups"].pop()
    with pytest.raises(PipelineError, match="has 1 parameter groups, this one 2"):
        layout.local_state(one_process)


def test_names_in_lightning_s_registry():
    assert lightning_pipes.trainer.PipelineStrategy is lightning_pipes.PipelineStrategy
    for name in installed_schedules():
        assert f"pipeline_{name}" in StrategyRegistry.available_strategies()
    trainer = make_trainer(strategy="pipeline_kfkb", devices=1)
    assert trainer.strategy.schedule.name == "kfkb"


@dataclass(frozen=True)
class Refusing(Policy):
    """A policy that begins nothing once two micro-batches are under way, and does not go on with those either."""

    name: ClassVar[str] = "refusing"

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return ready[0] if sum(view.in_flight.values()) < 2 else None


def test_a_policy_that_gets_stuck_is_refused():
    plans = Plans(Problem(Refusing(), 2, 1, 4, layers=(Span(0, 1),) * 2))
    assert plans.for_rows(1)
    with pytest.raises(DeadlockError, match="and refusing picks none"):
        plans.for_rows(8)


def test_the_last_stage_never_recomputes():
    """It runs the user's whole step, which logs and counts."""
    plans = Plans(Problem(make_schedule("1f1b"), 3, 1, None, True, (Span(0, 1),) * 3))
    assert plans.microbatches == 6
    plan, order = plans.for_rows(50)
    assert plan.recompute == (True, True, False)
    assert plans.for_rows(50) == (plan, order)
    assert plans.for_rows(3)[0].jobs[0].rows == 3


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("here", [True, False])
def test_what_a_hook_misses_on_other_stages_is_explained(here, overlaps):
    class Storing(Lit):
        def on_train_batch_end(self, *args: Any) -> None:
            self.last_loss.item()

    module = Storing()
    patches = Patches()
    wrap_module_hooks(module, patches, lambda hook: hook, here, overlaps, lambda: None, lambda: None)
    with pytest.raises(AttributeError, match="last_loss") as caught:
        module.on_train_batch_end(None, None, 0)
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert ("on_train_batch_end runs on every rank" in notes) is not here
    assert ("after a flush" in notes) is (overlaps and not here)
    assert ("after the batch, if it can be sent" in notes) is not (overlaps or here)
    patches.close()
    assert not [name for name in vars(module) if name.startswith("on_")]


def test_a_hook_on_the_module_itself_comes_back():
    module, called = Lit(), []
    own: Any = lambda *_: called.append("hook")  # noqa: E731
    vars(module)["on_train_batch_end"] = own
    with Patches() as patches:
        track_hooks(module, [], CutModule(module, "model", [0], Interceptor("self.model")).scope, patches)
        wrap_module_hooks(module, patches, lambda hook: hook, True, False, lambda: called.append("agree"), lambda: None)
        module.on_train_batch_end(None, None, 0)
    assert called == ["hook", "agree"]
    assert vars(module)["on_train_batch_end"] is own


def test_the_plan_is_what_the_schedule_asks_for() -> None:
    plan, order = Plans(Problem(make_schedule("zero_bubble"), 2, 1, 4, True, (Span(0, 1),) * 2)).for_rows(8)
    assert plan.split_backward
    assert isinstance(order, Program)
    assert Kind.W in {i.kind for i in order.iter_instructions()}
    plan, order = Plans(Problem(make_schedule("pipedream"), 2, 1, 1, layers=(Span(0, 1),) * 2)).for_rows(8)
    assert plan.versions == (2, 1)
    assert isinstance(order, Program)
    assert order.is_endless


def test_checksums_see_values_places_and_signs() -> None:
    ones = torch.ones(1001)
    moved = torch.arange(9.0)[[1, 0, *range(2, 9)]]
    different = [
        [ones],
        [2 * ones],
        [-ones],
        [torch.arange(9.0)],
        [moved],
        [ones, torch.zeros(2)],
        [torch.zeros(2), ones],
    ]
    assert len({checksum(tensors) for tensors in different}) == len(different)
    assert checksum([torch.arange(12.0)[3:6]]) == checksum([torch.arange(3.0, 6.0)])


def test_barriers_are_for_what_users_hooks_do() -> None:
    class Writes(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None: ...

    options: Any = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False}
    plain, writing = pl.Trainer(**options), pl.Trainer(**options, callbacks=[Writes()])
    for trainer in (plain, writing):
        trainer.strategy._lightning_module = pl.LightningModule()
    assert not has_purpose("post_setup", plain)
    assert has_purpose("post_setup", writing)
    assert not has_purpose("run-stage", writing)
    assert has_purpose("of the user's own", plain)
    assert has_purpose(None, plain)
